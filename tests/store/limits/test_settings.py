"""Set limits by tasks, settings and clients, and report wrong limits at once."""

import json

import pytest
from django.core.checks import run_checks
from django.core.management import call_command

from django_faktory import task
from django_faktory.core.job_options import MAX_LOCK_KEY, limit_key
from django_faktory.core.limits import InvalidLimit
from django_faktory.errors import InvalidPayload
from django_faktory.models import Job, Limit
from django_faktory.tasks import limits
from django_faktory.tasks.base import _registry
from django_faktory.tasks.compat import InvalidTask
from tests.factories import payload
from tests.store.limits import tasks

pytestmark = pytest.mark.portable


def problems():
    return {(one.id.partition(".")[2], one.msg) for one in run_checks() if one.id[-3:-1] == "05"}


def test_limits_of_tasks_and_settings_are_read(settings, transactional_db):
    settings.FAKTORY = settings.FAKTORY | {"LIMITS": {"queues": {"mail": 5}, "keys": {"customer": "10/m"}}}
    limits.sync(using="default")
    allowances = {(one.scope, one.name): one.allowance_text for one in Limit.objects.all()}
    assert allowances[("queue", "mail")] == "5 at a time"
    assert allowances[("key", "customer")] == "10/m"
    assert allowances[("task", tasks.at_most_two.jobtype)] == "2 at a time"
    assert allowances[("key", tasks.by_customer.jobtype)] == "1 at a time and 100/s"


def test_limits_in_settings_override_limits_of_tasks(settings, transactional_db):
    settings.FAKTORY = settings.FAKTORY | {"LIMITS": {"tasks": {tasks.at_most_two.jobtype: 9}}}
    limits.sync(using="default")
    assert Limit.objects.get(name=tasks.at_most_two.jobtype).concurrency == 9


@pytest.mark.parametrize(
    ("wrong", "number", "text"),
    [
        ({"clients": {}}, "E050", "LIMITS: no such scope: 'clients'"),
        ({"queues": 5}, "E051", "LIMITS['queues']: expected a dict of names"),
        ({"queues": {"mail": "many"}}, "E051", "LIMITS['queues']['mail']: rate: expected"),
        ({"queues": {"mail": -1}}, "E051", "LIMITS['queues']['mail']: concurrency: expected"),
        ({"queues": {"a b": 1}}, "E051", "LIMITS['queues']['a b']: name:"),
        ({"workers": {"mail": "5/s"}}, "E051", "LIMITS['workers']['mail']: expected a whole number"),
        ({"tasks": {5: 1}}, "E051", "LIMITS['tasks'][5]: name:"),
        ({"keys": {"k": {"speed": 1}}}, "E051", "LIMITS['keys']['k']: no such key: 'speed'"),
    ],
)
def test_an_invalid_limit_setting_is_reported_with_its_path(settings, wrong, number, text):
    settings.FAKTORY = settings.FAKTORY | {"LIMITS": wrong}
    found = problems()
    assert [one for one, message in found if text in message] == [number]
    with pytest.raises(InvalidLimit):
        list(limits.definitions())


def test_valid_limit_settings_report_no_problems(settings):
    settings.FAKTORY = settings.FAKTORY | {
        "LIMITS": {"queues": {"mail": {"concurrency": 1, "rate": "5/s"}}, "workers": {"mail": 2}}
    }
    assert problems() == set()


def test_limits_set_with_a_remote_broker_raise_a_warning(settings):
    settings.FAKTORY = settings.FAKTORY | {"BROKER": "remote", "LIMITS": {"queues": {"mail": 1}}}
    assert "W050" in {number for number, _ in problems()}


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"limit": "fast"}, {"limit": {}}, {"limit_key": 5}, {"limit_key": ""}]
)
def test_an_invalid_limit_option_of_a_task_is_rejected(options):
    with pytest.raises(InvalidTask, match=rf"{next(iter(options))}: expected"):
        task(**options)(tasks.body)


def test_a_task_name_with_a_colon_rejects_a_per_key_limit():
    with pytest.raises(InvalidTask, match="name without a colon"):
        task(name="a:b", limit=1, limit_key=str)(tasks.body)
    assert "a:b" not in _registry


def test_jobs_of_a_task_store_their_limit_key(transactional_db):
    tasks.by_customer.enqueue(42)
    tasks.by_customer.enqueue(0)
    tasks.shared.enqueue()
    keys = list(Job.objects.order_by("pk").values_list("limit_key", flat=True))
    assert keys == [f"{tasks.by_customer.jobtype}:42", None, "printer"]


def test_enqueue_raises_errors_of_the_limit_key_function(transactional_db):
    with pytest.raises(ZeroDivisionError):
        tasks.raising.enqueue(0)
    with pytest.raises(InvalidPayload, match=r"custom\.limit: expected a key"):
        tasks.raising.enqueue(1)
    assert not Job.objects.exists()


@pytest.mark.parametrize("value", [5, "", True, [], {}])
def test_an_invalid_limit_key_of_a_client_is_rejected(value):
    with pytest.raises(InvalidPayload, match=r"custom\.limit: expected a key, got"):
        payload(custom={"limit": value})


@pytest.mark.parametrize("value", [None, False])
def test_a_client_may_pass_null_or_false_as_limit_key(value):
    assert payload(custom={"limit": value}).options is None


def test_a_long_limit_key_is_hashed_after_its_prefix():
    long = "customer:" + "x" * 400
    kept = limit_key(long)
    assert kept.startswith("customer:sha256:")
    assert len(kept) <= MAX_LOCK_KEY
    assert limit_key("k" * 400).startswith("sha256:")


def test_the_python_api_pauses_tasks_and_sets_and_removes_limits(transactional_db):
    assert limits.pause(tasks.at_most_two, "go.worker") == ["go.worker", tasks.at_most_two.jobtype]
    assert limits.paused() == ["go.worker", tasks.at_most_two.jobtype]
    assert limits.resume("go.worker", "another") == ["go.worker"]
    limits.set_limit("queue", "mail", "5/s")
    assert Limit.objects.get(scope="queue").allowance_text == "5/s"
    assert limits.remove_limit("queue", "mail") is True
    assert limits.remove_limit("queue", "mail") is False
    limits.set_limit("key", "tenant:" + "x" * 300, 5)
    assert limits.remove_limit("key", "tenant:" + "x" * 300) is True
    with pytest.raises(InvalidLimit, match="scope: expected queue, task, key"):
        limits.set_limit("worker", "x", 1)


def test_the_command_line_sets_pauses_lists_and_removes_limits(transactional_db, capsys):
    def run(*words):
        call_command("faktory", "limits", *words)
        return capsys.readouterr().out

    run("set", "task", "noop", "5", "100/s", "--new")
    run("pause", "noop")
    [one] = json.loads(run("--json"))["limits"]
    assert (one["concurrency"], one["rate"], one["is_paused"], one["waiting"]) == (5, "100/s", True, 0)
    assert "paused, else 5 at a time and 100/s" in run()
    run("resume", "noop")
    run("remove", "task", "noop")
    assert not Limit.objects.exists()
