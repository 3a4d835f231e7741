"""The options of @task: accepted values, refused values, and error messages."""

import json
import pickle
from datetime import UTC, datetime, timedelta

import django
import pytest

from django_faktory import task
from django_faktory.tasks.base import FaktoryTask, new_task
from django_faktory.tasks.compat import InvalidTask, task_backends
from django_faktory.tasks.results import call_of
from tests.project import tasks

pytestmark = pytest.mark.core


def plain():
    pass


def test_a_bare_task_has_djangos_defaults_and_its_dotted_path_as_jobtype():
    assert isinstance(tasks.noop, FaktoryTask)
    assert tasks.noop.jobtype == tasks.noop.module_path == "tests.project.tasks.noop"
    assert (tasks.noop.name, tasks.noop.priority, tasks.noop.queue_name) == ("noop", 0, "default")


def test_the_name_option_sets_the_jobtype_and_not_djangos_name():
    assert tasks.charge.jobtype == "billing.charge"
    assert tasks.charge.name == "charge"


def test_faktory_and_django_options_are_both_kept():
    assert (tasks.charge.max_attempts, tasks.charge.reserve_for) == (3, 120)
    assert (tasks.charge.result_ttl, tasks.charge.backtrace) == (60, 5)
    assert (tasks.send_invoice.queue_name, tasks.send_invoice.priority) == ("mail", 10)


def test_the_backend_task_class_creates_a_faktory_task_with_its_options():
    made = task_backends["default"].task_class(
        func=plain, name="by django", max_attempts=2, priority=0, queue_name="default", backend="default",
        takes_context=False, run_after=None,
    )  # fmt: skip
    assert (type(made), made.jobtype, made.max_attempts) == (FaktoryTask, "by django", 2)


@pytest.mark.skipif(django.VERSION < (6, 1), reason="before 6.1 Django's own decorator takes no further options")
def test_djangos_task_decorator_creates_a_faktory_task():
    from django.tasks import task as djangos

    made = djangos(name="through django", max_attempts=7)(plain)
    assert (type(made), made.jobtype, made.max_attempts) == (FaktoryTask, "through django", 7)


@pytest.mark.parametrize("option", ["locked", "x"])
def test_an_unknown_option_is_refused_by_name(option):
    with pytest.raises(TypeError, match=f"unexpected option '{option}'.*; known: .*max_attempts"):
        task(**{option: 1})(plain)


def test_the_decorator_refuses_run_after():
    with pytest.raises(TypeError, match=r"\.using\(run_after="):
        task(run_after=datetime.now(UTC))(plain)


INVALID = {
    "name": [5, "n" * 256, "two\nlines"], "max_attempts": [0, True, "5", 2**31], "backoff": [5],
    "retry_on": [ValueError("an instance"), [int]], "discard_on": ["ValueError", None], "result_ttl": [-1],
    "reserve_for": [59, 86_401, 60.5], "backtrace": [-2, 201, None], "track": [1], "timeout": [0, "60", 86_371],
    "unique_for": [0, True, "60", float("inf"), float("nan")], "unique_until": ["end", None], "missing": ["ignore"],
    "expires_in": [-1, timedelta(seconds=1)], "plain_json": [1], "atomic": [1],
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [(name, one) for name, values in INVALID.items() for one in values])
def test_an_invalid_option_value_is_refused_with_task_option_and_rule(option, value):
    shown = "jobtype" if option == "name" else option
    with pytest.raises(InvalidTask, match=rf"task tests\.tasks\.test_options\.plain: {shown}: expected .+, got "):
        task(**{option: value})(plain)


@pytest.mark.parametrize("given", [ValueError, [ValueError], (ValueError,), {ValueError}])
def test_exception_options_accept_one_class_or_any_collection(given):
    made = new_task(func=plain, name=f"exceptions {type(given).__name__}", retry_on=given, discard_on=given)
    assert made.retry_on == made.discard_on == (ValueError,)


@pytest.mark.parametrize("queue", ["with space", "", "ü", "q" * 256, 5])
def test_a_queue_name_the_protocol_cannot_carry_is_refused(queue):
    with pytest.raises(InvalidTask, match="queue_name: "):
        task(queue_name=queue)(plain)


def test_using_returns_a_copy_that_keeps_the_other_options():
    changed = tasks.charge.using(priority=-20, queue_name="low", backend="default")
    assert (changed.priority, changed.queue_name, changed.max_attempts, changed.jobtype) == (
        -20,
        "low",
        3,
        "billing.charge",
    )
    assert (tasks.charge.priority, tasks.charge.queue_name) == (0, "default")


@pytest.mark.parametrize("option", ["max_attempts", "unique_for", "expires_in", "timeout"])
def test_using_rejects_options_out_of_their_range(option):
    with pytest.raises(InvalidTask, match=f": {option}: expected"):
        tasks.noop.using(**{option: -1})


def test_using_rejects_a_timeout_that_the_reservation_does_not_cover():
    with pytest.raises(InvalidTask, match="timeout: expected less than reserve_for"):
        tasks.charge.using(timeout=120)


@pytest.mark.parametrize("timeout", ["soon", True, -1, [], 1e300])
def test_a_timeout_of_another_client_that_is_no_number_of_seconds_is_ignored(timeout):
    call = call_of(json.dumps({"jobtype": "x", "args": [], "custom": {"timeout": timeout}}))
    assert call.timeout is None


def test_using_with_a_timedelta_counts_from_each_enqueue():
    later = tasks.noop.using(run_after=timedelta(hours=1))
    now = datetime(2026, 5, 1, tzinfo=UTC)
    assert later.run_after is None
    assert later.due(now).run_after == now + timedelta(hours=1)
    assert later.due(now + timedelta(days=1)).run_after == now + timedelta(days=1, hours=1)


def test_a_later_using_overrides_an_earlier_one():
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    later = tasks.noop.using(run_after=timedelta(hours=1))
    assert later.using(run_after=moment).due(moment - timedelta(days=1)).run_after == moment
    assert later.using(run_after=moment).using(run_after=timedelta(0)).due(moment).run_after == moment
    assert later.using(priority=5).due(moment).run_after == moment + timedelta(hours=1)


@pytest.mark.skipif(django.VERSION < (6, 1), reason="Django's tasks are pickled from 6.1 on")
def test_a_pickled_task_keeps_its_options():
    sent = tasks.charge.using(priority=7, run_after=timedelta(minutes=5))
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_the_class_takes_type_parameters_at_run_time():
    assert FaktoryTask[[int], str].__origin__ is FaktoryTask


def test_call_runs_the_function_immediately():
    assert tasks.add.call(1, 2) == 3


def test_a_timeout_must_be_shorter_than_reserve_for():
    with pytest.raises(
        InvalidTask, match=r"timeout: expected less than reserve_for \(60 s\), got 60; without reserve_for"
    ):
        task(timeout=60, reserve_for=60)(plain)


@pytest.mark.parametrize(
    ("option", "meant"),
    [("max_retries", "max_attempts"), ("queue", "queue_name"), ("bind", "takes_context"), ("priorty", "priority")],
)
def test_a_misspelt_or_foreign_option_is_refused_with_a_suggestion(option, meant):
    with pytest.raises(TypeError, match=f"unexpected option '{option}'; did you mean '{meant}'"):
        task(**{option: 1})(plain)


@pytest.mark.parametrize(
    ("name", "here"),
    [("delay", r"enqueue\(…\)"), ("apply_async", r"using\(…\)\.enqueue"), ("delay_on_commit", "commits with")],
)
def test_a_method_of_another_library_is_refused_with_the_equivalent(name, here):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': here it is .*{here}"):
        getattr(tasks.noop, name)
    assert not hasattr(tasks.noop, "no_such_thing")


@pytest.mark.parametrize("run_after", [60, 1.5, "tomorrow"])
def test_using_refuses_a_run_after_that_is_not_a_time(run_after):
    with pytest.raises(TypeError, match="run_after: expected a timedelta or an aware datetime, got"):
        tasks.noop.using(run_after=run_after)
