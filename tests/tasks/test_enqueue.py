"""The stored rows of enqueued jobs; they commit or roll back with the transaction of the caller."""

from datetime import datetime, time, timedelta
from typing import ClassVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings
from django.utils import timezone, translation
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy

from django_faktory import push, task
from django_faktory.backend import MAX_BUILDERS, FaktoryBackend
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.json import jsontext
from django_faktory.errors import CommandRefused, InvalidPayload
from django_faktory.models import Job
from django_faktory.tasks.compat import InvalidTask, Task, TaskResultStatus, task_backends, task_enqueued
from django_faktory.tasks.job_id import new_jid, new_jids
from django_faktory.tasks.json_values import encode_json, normalize_result
from tests.project import tasks
from tests.tasks.work import work

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

BACKEND = "django_faktory.backend.FaktoryBackend"
OTHERS = "django_tasks" if Task.__module__.startswith("django_tasks") else "django.tasks"


def plain():
    pass


def stored(result):
    job = Job.objects.get(jid=result.id)
    return job, jsontext.decode(job.payload)


def test_an_enqueued_job_is_stored_and_its_result_is_ready():
    result = tasks.echo.enqueue(1, "two", key=[3])
    job, payload = stored(result)
    assert (job.state, job.jobtype, job.queue, job.priority) == ("enqueued", "tests.project.tasks.echo", "default", 0)
    assert payload["args"] == [1, "two"]
    assert payload["custom"]["kwargs"] == {"key": [3]}
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [1, "two"], {"key": [3]})
    assert (result.backend, result.errors, result.worker_ids, result.attempts) == ("default", [], [], 0)


def test_task_options_are_stored_with_the_job():
    job, payload = stored(tasks.charge.enqueue(5))
    assert (job.retry, job.reserve_for, job.result_ttl, job.backtrace) == (2, 120, 60, 5)
    assert (payload["retry"], payload["reserve_for"], payload["custom"]["result_ttl"]) == (2, 120, 60)


def test_settings_apply_if_the_task_has_no_such_option():
    with override_settings(FAKTORY={"MAX_ATTEMPTS": 3, "RESERVE_FOR": 90, "RESULT_TTL": 7}):
        job, _ = stored(tasks.noop.enqueue())
    assert (job.retry, job.reserve_for, job.result_ttl) == (2, 90, 7)


def test_the_second_enqueue_of_a_task_reads_changed_settings():
    tasks.noop.enqueue()
    with override_settings(FAKTORY={"MAX_ATTEMPTS": 3}):
        assert stored(tasks.noop.enqueue())[0].retry == 2
    assert stored(tasks.noop.enqueue())[0].retry == 25


def test_a_backend_keeps_few_of_the_tasks_made_by_using():
    backend = task_backends["default"]
    copies = [tasks.noop.using(priority=number % 100) for number in range(MAX_BUILDERS + 20)]
    jobs = [backend.callback_job(copy, [], {}) for copy in copies]
    assert [job.priority for job in jobs] == [copy.priority for copy in copies]
    assert len(backend._builders) <= MAX_BUILDERS


@pytest.mark.parametrize(("timeout", "reserve_for"), [(10, 90), (60, 90), (60.5, 91), (3600, 3630)])
def test_reserve_for_is_longer_than_the_task_timeout(timeout, reserve_for):
    limited = task(name=f"limited to {timeout}", timeout=timeout)(plain)
    with override_settings(FAKTORY={"RESERVE_FOR": 90}):
        job, _ = stored(limited.enqueue())
    assert job.reserve_for == reserve_for


def test_using_sets_options_of_single_jobs():
    one = tasks.noop.using(max_attempts=3, unique_for=60, expires_in=90, timeout=3600)
    _, payload = stored(one.enqueue())
    assert (payload["retry"], payload["reserve_for"]) == (2, 3630)
    assert {name: payload["custom"].get(name) for name in ("unique_for", "expires_in", "timeout")} == {
        "unique_for": 60, "expires_in": 90, "timeout": 3600,
    }  # fmt: skip
    assert "timeout" not in stored(tasks.noop.enqueue())[1]["custom"]


def test_queue_and_priority_are_stored_with_the_job():
    job, payload = stored(tasks.send_invoice.using(priority=-60).enqueue(1))
    assert (job.queue, job.priority, payload["priority"]) == ("mail", -60, 3)


def test_a_rollback_removes_the_enqueued_job():
    with transaction.atomic():
        result = tasks.noop.enqueue()
        assert Job.objects.filter(jid=result.id).exists()
        transaction.set_rollback(True)
    assert not Job.objects.exists()


@pytest.mark.parametrize("wait", [timedelta(hours=1), "aware"])
def test_run_after_schedules_the_job(wait):
    before = timezone.now()
    result = tasks.noop.using(run_after=before + timedelta(hours=1) if wait == "aware" else wait).enqueue()
    job, _ = stored(result)
    assert job.state == "scheduled"
    assert timedelta(0) <= job.run_at - before - timedelta(hours=1) < timedelta(minutes=1)
    assert result.task.run_after == job.run_at


def test_run_after_in_the_past_enqueues_at_once():
    assert stored(tasks.noop.using(run_after=timedelta(hours=-1)).enqueue())[0].state == "enqueued"


def test_async_code_enqueues_with_aenqueue():
    result = async_to_sync(tasks.add.aenqueue)(1, 2)
    assert stored(result)[1]["args"] == [1, 2]


@pytest.mark.parametrize("value", [object(), {1, 2}, {None: 1}, {(1,): 2}])
def test_an_unsupported_argument_is_refused_before_any_job_is_stored(value):
    with pytest.raises(TypeError):
        tasks.returns.enqueue(value)
    with pytest.raises(TypeError):
        tasks.returns.enqueue_many([(1,), {"value": value}])
    assert not Job.objects.exists()


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def contains_itself():
    value = {"list": []}
    value["list"].append(value)
    return value


IN_BERLIN = time(12, 30, tzinfo=ZoneInfo("Europe/Berlin"))
UNSUPPORTED = {
    "two keys that JSON writes alike": ({1: "a", "1": "b"}, "expected a str as key, got int"),
    "a number as key": ({"x": {1: "a"}}, "expected a str as key, got int"),
    "True as key": ({True: 1}, "expected a str as key, got bool"),
    "None as key": ({None: 1}, "expected a str as key, got NoneType"),
    "a UUID as key": ({UUID(int=1): 1}, "expected a str as key, got UUID"),
    "a time in a zone": (IN_BERLIN, "a time in a zone without a date has no offset"),
    "NaN": (float("nan"), "no NaN"),
    "5,000 digits": (10**5000, "digits"),
    "200 levels": (nested(200), "nested deeper than 128 levels"),
    "2,000 levels": (nested(2000), "nested deeper than 128 levels"),
    "a value that contains itself": (contains_itself(), "nested deeper than 128 levels"),
}


WAYS = {
    "enqueue": lambda args, kwargs: tasks.echo.enqueue(*args, **kwargs),
    "enqueue of plain JSON": lambda args, kwargs: plain_json.enqueue(*args, **kwargs),
    "push": lambda args, kwargs: push("elsewhere", *args, kwargs=kwargs),
}


@task(name="enqueue.plain_json", plain_json=True)
def plain_json(*args, **kwargs):
    pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("value", "problem"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_argument_that_json_would_change_is_refused_by_name(value, problem, is_named, way):
    if way != "enqueue" and value is IN_BERLIN:
        problem = "Unsupported type"
    args, kwargs = ([1], {"when": value}) if is_named else ([1, value], {})
    place = r"kwargs\['when'\]" if is_named else r"args\[1\]"
    with pytest.raises((TypeError, ValueError, InvalidPayload), match=f"^{place}.*: .*{problem}") as caught:
        WAYS[way](args, kwargs)
    assert "\n" not in str(caught.value)
    assert not Job.objects.exists()


@pytest.mark.parametrize("text", [gettext_lazy("Yes"), format_lazy("{}!", gettext_lazy("Yes"))])
def test_a_lazy_text_is_sent_in_the_language_of_the_caller(text):
    with translation.override("de"):
        tasks.returns.enqueue({"text": [text]})
    assert jsontext.decode(work().result) == {"text": ["Ja!" if "!" in str(text) else "Ja"]}


def test_a_result_may_have_numbers_as_keys_but_not_two_that_json_writes_alike():
    assert jsontext.decode(encode_json(normalize_result({200: {1.5: [None]}}))) == {"200": {"1.5": [None]}}
    with pytest.raises(ValueError, match="2 keys that JSON writes alike"):
        normalize_result([{1: "a", "1": "b"}])


@pytest.mark.parametrize("value", ["\x00", "\ud800", "😀", 10**30, "a\r\nb", "<script>"])
def test_unusual_argument_values_survive_the_database(value):
    tasks.returns.enqueue(value)
    assert jsontext.decode(work().result) == value


def test_the_task_enqueued_signal_is_sent_after_the_job_is_stored():
    seen = []

    def receiver(sender, task_result, **_):
        seen.append((sender, task_result.id, Job.objects.filter(jid=task_result.id).exists()))

    task_enqueued.connect(receiver)
    try:
        result = tasks.noop.enqueue()
    finally:
        task_enqueued.disconnect(receiver)
    assert seen == [(FaktoryBackend, result.id, True)]


def test_a_task_made_for_another_backend_is_refused():
    foreign = {"BACKEND": f"{OTHERS}.backends.dummy.DummyBackend", "QUEUES": []}
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": []}, "other": foreign}):
        made = Task(func=plain, priority=0, backend="other", queue_name="default", run_after=None)
        with pytest.raises(InvalidTask, match=r"test_enqueue\.plain: made for another backend"):
            made.using(backend="default")


# --- enqueue_many


def test_enqueue_many_makes_a_job_for_each_call():
    results = tasks.send_invoice.enqueue_many([(42,), (43,), {"invoice_id": 44}])
    payloads = [stored(result)[1] for result in results]
    assert [payload["args"] for payload in payloads] == [[42], [43], []]
    assert payloads[2]["custom"]["kwargs"] == {"invoice_id": 44}
    assert [result.task.queue_name for result in results] == ["mail"] * 3


def test_enqueue_many_stores_100_jobs_in_at_most_10_queries(django_assert_max_num_queries):
    with django_assert_max_num_queries(10):  # includes BEGIN, COMMIT and storing the queue's name
        tasks.noop.enqueue_many([()] * 100)
    assert Job.objects.count() == 100


def test_enqueue_many_without_calls_returns_an_empty_list():
    assert tasks.noop.enqueue_many([]) == []


@pytest.mark.parametrize("call", [42, "42", [42], None, {1: 2}])
def test_enqueue_many_refuses_a_call_that_is_neither_tuple_nor_dict(call):
    with pytest.raises(TypeError, match="call 1: expected a tuple of arguments"):
        tasks.send_invoice.enqueue_many([(1,), call])
    assert not Job.objects.exists()


def test_enqueue_many_with_a_delay_schedules_them_all():
    tasks.noop.using(run_after=timedelta(minutes=5)).enqueue_many([(), ()])
    assert set(Job.objects.values_list("state", flat=True)) == {"scheduled"}


def test_enqueue_many_works_with_backends_without_bulk_support():
    with override_settings(TASKS={"default": {"BACKEND": f"{OTHERS}.backends.dummy.DummyBackend", "QUEUES": []}}):
        results = tasks.send_invoice.enqueue_many([(42,), {"invoice_id": 44}])
        assert [(result.args, result.kwargs) for result in results] == [([42], {}), ([], {"invoice_id": 44})]
        assert len(task_backends["default"].results) == 2


# --- jids


def test_the_ids_of_a_bulk_enqueue_ascend():
    made = new_jids(100)
    assert made == sorted(set(made))


def test_jids_are_32_hex_digits_in_order_of_time():
    made = [new_jid() for _ in range(100)]
    assert len(set(made)) == 100
    assert all(len(jid) == 32 and int(jid, 16) for jid in made)
    assert [jid[:12] for jid in made] == sorted(jid[:12] for jid in made)


# --- settings and other brokers


class ListBroker(OrmBroker):
    """OrmBroker that appends pushed jobs to a list."""

    pushed: ClassVar = []

    def push(self, jobs_):
        self.pushed.extend(jobs_)
        return [None] * len(jobs_)


def test_without_use_tz_a_naive_run_after_is_local_time():
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo", FAKTORY={"BROKER": f"{__name__}.ListBroker"}):
        tasks.noop.using(run_after=datetime(2126, 5, 1, 9)).enqueue()  # noqa: DTZ001
    assert jsontext.decode(ListBroker.pushed.pop().text)["at"] == "2126-05-01T00:00:00Z"


class RefusingBroker(OrmBroker):
    """OrmBroker that stores the first job of a push and refuses the others."""

    def push(self, jobs_):
        return [*super().push(jobs_[:1]), *(CommandRefused("no more today", code="FULL") for _ in jobs_[1:])]


def test_a_refusal_by_the_broker_raises_command_refused():
    with override_settings(FAKTORY={"BROKER": f"{__name__}.RefusingBroker"}):
        tasks.noop.enqueue()
        with pytest.raises(CommandRefused, match="no more today"):
            tasks.noop.enqueue_many([(), ()])
    assert Job.objects.count() == 2
