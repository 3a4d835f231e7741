"""Test `drain()`: real broker and execution, in the test's thread and transaction, at a time that the test sets."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase, override_settings
from django.utils import timezone

from django_faktory import FaktoryError, task
from django_faktory.brokers import get_broker
from django_faktory.models import Job
from django_faktory.tasks.compat import TaskResultStatus
from django_faktory.testing import JobFailed, drain
from tests.factories import payload
from tests.project import tasks
from tests.project.models import Mark

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

HOUR = timedelta(hours=1)
moments = []


@task
def notes_the_time():
    moments.append(timezone.now())


@task
def runs_every_hour():
    moments.append(timezone.now())
    runs_every_hour.using(run_after=HOUR).enqueue()


@task
def enqueues_itself():
    enqueues_itself.enqueue()


@task
def enqueues_when_committed():
    Mark.objects.create(text="first")
    transaction.on_commit(lambda: tasks.writes_mark.enqueue("second"))


@task(max_attempts=1)
def fails_in_the_database():
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM no_such_table")


@task(max_attempts=1)
def breaks_a_constraint(pk):
    Mark(pk=pk, text="twice").save(force_insert=True)


@task(takes_context=True, track=True)
def reports_progress(context):
    context.progress(1, 4)
    context.progress(2, 4, "half")


@task(takes_context=True, track=True)
async def async_reports_progress(context):
    context.progress(2, 4, "half")


@task(max_attempts=1)
async def async_reads_a_mark(pk):
    return (await Mark.objects.aget(pk=pk)).text


@pytest.fixture(autouse=True)
def _no_moments():
    moments.clear()


def attempts(ran):
    return [(one.jobtype.rpartition(".")[2], one.attempt, one.state) for one in ran]


def test_ready_jobs_run_in_order_and_are_returned():
    tasks.add.enqueue(1, 2)
    tasks.fails_for_good.enqueue()
    first, second = drain()
    assert (first.state, first.result.return_value, first.error) == ("succeeded", 3, None)
    assert (second.state, second.result.status, type(second.error)) == ("dead", TaskResultStatus.FAILED, ValueError)
    assert drain() == []


def test_jobs_enqueued_by_drained_jobs_also_run():
    tasks.writes_mark_atomically_and.enqueue("text", "enqueues")
    assert attempts(drain()) == [("writes_mark_atomically_and", 1, "succeeded"), ("noop", 1, "succeeded")]


def test_only_the_named_queue_is_drained():
    tasks.noop.enqueue()
    tasks.send_invoice.enqueue(1)
    assert attempts(drain(queue="mail")) == [("send_invoice", 1, "succeeded")]
    assert Job.objects.get(state="enqueued").jobtype == tasks.noop.jobtype


def test_queues_are_drained_in_the_order_of_the_settings():
    tasks.noop.enqueue()
    tasks.send_invoice.enqueue(1)
    with override_settings(FAKTORY={"QUEUES": ["mail", "default"]}):
        assert [one.queue for one in drain()] == ["mail", "default"]


def test_a_paused_queue_is_not_drained():
    tasks.noop.enqueue()
    get_broker().pause(["default"])
    assert drain() == []
    get_broker().resume(["default"])
    assert attempts(drain()) == [("noop", 1, "succeeded")]


def test_async_tasks_see_rows_written_by_the_test():
    mark = Mark.objects.create(text="here")
    async_reads_a_mark.enqueue(mark.pk)
    [ran] = drain()
    assert ran.result.return_value == "here"


@pytest.mark.parametrize("made", [reports_progress, async_reports_progress])
def test_progress_of_a_drained_task_can_be_read(made):
    result = made.enqueue()
    drain()
    [tracked] = get_broker().track_get([result.id])
    assert (tracked.percent, tracked.desc, tracked.state) == (50, "half", "success")


def test_an_unknown_jobtype_fails_and_is_retried():
    get_broker().push([payload(jobtype="unknown.task")])
    [ran] = drain()
    assert (ran.state, ran.result, type(ran.error)) == ("retries", None, FaktoryError)


def test_raise_errors_raises_the_error_of_a_job():
    tasks.fails.enqueue("oh no")
    with pytest.raises(JobFailed, match="ValueError: oh no") as failed:
        drain(raise_errors=True)
    assert isinstance(failed.value.__cause__, ValueError)
    assert Job.objects.get().state == "retries"


# --- time


def test_scheduled_jobs_stay_if_no_time_is_given():
    tasks.noop.using(run_after=HOUR).enqueue()
    tasks.fails.enqueue()
    assert attempts(drain()) == [("fails", 1, "retries")]
    assert drain() == []


def test_until_runs_scheduled_jobs_in_order_of_their_time():
    begun = timezone.now()
    for hours in (3, 1, 2):
        notes_the_time.using(run_after=hours * HOUR).enqueue()
    assert len(drain(until=2.5 * HOUR)) == 2
    assert [round((moment - begun) / HOUR, 1) for moment in moments] == [1.0, 2.0]
    assert len(drain(until=4 * HOUR)) == 1


def test_until_runs_retries_after_their_backoff():
    tasks.fails_with_backoff.enqueue()
    assert attempts(drain(until=timedelta(seconds=10))) == [
        ("fails_with_backoff", 1, "retries"),
        ("fails_with_backoff", 2, "retries"),
    ]
    [last] = drain(until=timedelta(minutes=1))
    assert (last.attempt, last.state) == (3, "dead")


def test_until_60_days_runs_all_26_attempts():
    tasks.fails.enqueue()
    ran = drain(until=timedelta(days=60))
    assert (len(ran), ran[-1].state) == (26, "dead")


def test_a_job_schedules_the_next_one_by_the_simulated_time():
    begun = timezone.now()
    runs_every_hour.enqueue()
    drain(until=3.5 * HOUR)
    assert [round((moment - begun) / HOUR) for moment in moments] == [0, 1, 2, 3]


def test_now_sets_the_time_for_all_jobs_of_a_drain():
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    notes_the_time.using(run_after=moment - HOUR).enqueue()
    notes_the_time.using(run_after=moment + HOUR).enqueue()
    assert len(drain(now=moment)) == 1
    assert abs(moments[0] - moment) < timedelta(minutes=1)
    assert Job.objects.get(state="succeeded").finished_at.year == 2030


def test_jobs_not_run_before_expires_at_expire():
    task = tasks.noop
    task.enqueue()
    Job.objects.update(expires_at=timezone.now() + HOUR)
    assert drain(now=timezone.now() + 2 * HOUR) == []
    assert Job.objects.get().state == "expired"


def test_the_clock_is_restored_after_a_drain():
    drain(now=datetime(2030, 1, 1, tzinfo=UTC))
    assert timezone.now().year != 2030
    assert get_broker().clock() is None


# --- bad calls


def test_an_endless_chain_of_jobs_stops_at_the_limit():
    enqueues_itself.enqueue()
    with pytest.raises(AssertionError, match="does a task enqueue itself"):
        drain(limit=5)
    assert Job.objects.filter(state="enqueued").count() == 1


def test_invalid_arguments_are_rejected():
    with pytest.raises(TypeError, match="got both"):
        drain(now=timezone.now(), until=HOUR)
    with pytest.raises(ValueError, match="aware datetime"):
        drain(now=datetime(2030, 1, 1))  # noqa: DTZ001  (it is what is refused)
    with override_settings(FAKTORY={"BROKER": "remote"}), pytest.raises(FaktoryError, match="BROKER"):
        drain()


# --- the test's transaction


class InATestCase(TestCase):
    """Each test runs in one transaction, which is never committed."""

    def test_a_database_error_fails_the_job_but_not_the_test(self):
        mark = Mark.objects.create(text="mine")
        breaks_a_constraint.enqueue(mark.pk)
        fails_in_the_database.enqueue()
        tasks.writes_mark.enqueue("after")
        first, second, third = drain()
        assert isinstance(first.error, IntegrityError)
        assert [one.state for one in (first, second, third)] == ["dead", "dead", "succeeded"]
        assert {mark.text for mark in Mark.objects.all()} == {"mine", "after"}

    def test_an_atomic_task_is_rolled_back_when_it_fails(self):
        tasks.writes_mark_atomically_and.enqueue("text", "fails")
        tasks.writes_mark_atomically.enqueue("kept")
        drain()
        assert [mark.text for mark in Mark.objects.all()] == ["kept"]

    def test_on_commit_hooks_of_tasks_run(self):
        enqueues_when_committed.enqueue()
        assert [one.state for one in drain()] == ["succeeded", "succeeded"]
        assert {mark.text for mark in Mark.objects.all()} == {"first", "second"}

    def test_on_commit_hooks_of_the_test_do_not_run(self):
        ran = []
        transaction.on_commit(lambda: ran.append("too early"))
        enqueues_when_committed.enqueue()
        drain()
        assert ran == []

    def test_a_task_that_leaves_a_transaction_open_raises_an_assertion_error(self):
        tasks.leaves_transaction_open.enqueue("text")
        with pytest.raises(AssertionError, match="left a transaction open"):
            drain()

    def test_a_job_enqueued_in_a_rolled_back_block_is_not_run(self):
        with transaction.atomic():
            tasks.noop.enqueue()
            transaction.set_rollback(True)
        assert drain() == []


@pytest.mark.django_db(transaction=True)
def test_drain_works_outside_of_a_transaction():
    tasks.writes_mark.enqueue("text")
    breaks_a_constraint.enqueue(None)
    tasks.leaves_transaction_open.enqueue("lost")
    assert [one.state for one in drain()] == ["succeeded", "succeeded", "retries"]
