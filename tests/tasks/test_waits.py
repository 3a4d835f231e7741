"""`raise Later`, `context.sleep` and `context.wait_for`: the run ends, uses no attempt, and a later one continues."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone

from django_faktory import Later, WaitTimedOut
from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Ack
from django_faktory.core.steps import FOREVER, Parking
from django_faktory.errors import InvalidPayload, InvalidTransition, JobNotFound
from django_faktory.models import Batch as StoredBatch
from django_faktory.models import Job, JobLock, JobSignal, JobStep
from django_faktory.store.jobs import waits
from django_faktory.store.maintenance import due
from django_faktory.tasks.batch import Batch
from django_faktory.testing import drain
from django_faktory.worker.execution import prepare
from tests.settings import KIND
from tests.tasks.programs import (
    again,
    follows,
    follows_async,
    follows_atomically,
    in_secret,  # noqa: F401  (a fixture)
    mark,
    marks,
    message,
    programs,
    recorded,
    run,
)
from tests.tasks.work import fetched, work

pytestmark = pytest.mark.django_db(transaction=True)


def only():
    return Job.objects.get()


def result():
    return follows.get_result(only().jid)


def overdue():
    """Move the end of every sleep and wait into the past."""
    JobStep.objects.update(until=timezone.now() - timedelta(seconds=1))
    Job.objects.filter(state="scheduled").update(run_at=timezone.now() - timedelta(seconds=1))
    due.enqueue_due(get_broker())


def sleeps(context):
    mark(f"before {context.attempt}")
    context.sleep(hours=3)
    return "awake"


def waits_for_approval(context):
    return context.wait_for("approved")


# --- what a job that waits is


def test_a_sleep_schedules_the_job_and_uses_no_attempt():
    report = run(sleeps)
    assert isinstance(report, Parking)
    job = only()
    assert (job.state, job.failures, job.losses, job.interruptions, job.attempts) == ("scheduled", 0, 0, 0, 0)
    assert timedelta(hours=2.9) < job.run_at - timezone.now() < timedelta(hours=3.1)
    assert (job.wid, job.reserved_until, job.awaited, recorded()) == ("", None, "", [("sleep", "")])
    overdue()
    assert work().result == '"awake"'
    assert marks() == ["before 1", "before 1"]


def test_a_job_that_is_woken_early_parks_again_until_the_same_time():
    run(sleeps)
    ends = only().run_at
    for _ in range(2):
        assert Job.objects.all().requeue() == 1
        assert isinstance(work(), Parking)
        assert (only().state, only().run_at) == ("scheduled", ends)
    assert JobStep.objects.get().until == ends


def test_later_runs_the_job_again_from_its_first_line():
    def program(context):
        mark(f"run of {context.attempt}")
        if len(marks()) < 3:
            raise Later(minutes=5)

    for _ in range(2):
        run(program) if not programs or programs[-1] is not program else work()
        assert (only().state, only().failures, recorded()) == ("scheduled", 0, [])
        assert timedelta(minutes=4) < only().run_at - timezone.now() < timedelta(minutes=6)
        overdue()
    assert isinstance(work(), Ack)


def test_later_ends_an_atomic_task_and_undoes_it():
    def program(context):
        mark("undone")
        raise Later(seconds=1)

    assert isinstance(run(program, of=follows_atomically), Parking)
    assert (only().state, marks()) == ("scheduled", [])


def defer(_):
    raise Later(days=1)


@pytest.mark.parametrize("end", [defer, sleeps, waits_for_approval])
def test_except_exception_does_not_catch_the_end_of_a_run(end):
    def program(context):
        try:
            end(context)
        except Exception:  # noqa: BLE001
            mark("swallowed")

    assert isinstance(run(program), Parking)
    assert "swallowed" not in marks()


def test_a_task_that_catches_the_end_of_its_run_gets_it_again_at_the_next_block():
    def program(context):
        try:
            context.sleep(days=1)
        except BaseException:  # noqa: BLE001
            with context.step("a"):
                mark("a")

    assert isinstance(run(program), Parking)
    assert marks() == []


def test_a_wait_without_a_time_out_is_scheduled_for_the_last_year():
    run(waits_for_approval)
    job = only()
    assert (job.state, job.run_at, job.due_at, job.awaited) == ("scheduled", FOREVER, None, "approved")


def test_a_job_that_parks_keeps_its_unique_key_and_loses_its_expiry_and_its_lock():
    programs.append(sleeps)
    follows.using(unique_for=9, expires_in=9).enqueue()
    Job.objects.update(lock_key="k")
    work()
    job = only()
    assert (job.state, job.expires_at, job.lock_token, JobLock.objects.count()) == ("scheduled", None, None, 0)
    assert job.unique_key is not None


def test_a_batch_counts_a_job_that_parks_as_not_yet_executed():
    programs.append(sleeps)
    with Batch(complete=follows) as batch:
        follows.enqueue()
    work()
    status = batch.status()
    assert (status.total, status.pending, status.complete_st) == (1, 1, "")
    assert StoredBatch.objects.count() == 1
    overdue()
    work()
    assert batch.status().complete_st == "1"


def test_a_run_that_gets_further_than_a_sleep_forgets_failures_and_one_that_is_woken_early_does_not():
    def program(context):
        if len(marks()) == 0:
            raise ValueError(mark("first"))
        context.sleep(days=1)

    run(program)
    assert only().failures == 1
    again()
    assert (only().failures, only().state) == (0, "scheduled")
    Job.objects.update(failures=1)
    Job.objects.all().requeue()
    work()
    assert only().failures == 1


def test_a_cancelled_job_that_parks_is_discarded():
    programs.append(sleeps)
    follows.enqueue()
    execution = prepare(fetched())
    get_broker().cancel([only().jid])
    get_broker().interrupt([execution.run(get_broker())])
    assert only().state == "discarded"


def test_a_worker_that_lost_its_job_does_not_park_it():
    programs.append(sleeps)
    follows.enqueue()
    report = prepare(fetched("w1")).run(get_broker())
    get_broker().lost(["w1"])
    assert get_broker().interrupt([report]) == [False]
    assert (only().state, recorded()) == ("enqueued", [])


# --- signals


@pytest.mark.parametrize("payload", [None, 7, {"by": "ann", "note": "é \u2028"}, [1, [2]], ""])
def test_a_wait_returns_the_payload_of_a_signal_now_and_in_later_runs(payload):
    def program(context):
        seen.append(context.wait_for("approved"))
        if len(seen) == 1:
            raise ValueError

    seen = []
    run(program)
    result().signal("approved", payload)
    assert only().state == "enqueued"
    work()
    again()
    assert seen == [payload, payload]
    assert (JobSignal.objects.count(), recorded()) == (0, [("approved", "")])


def test_a_signal_that_comes_before_the_wait_is_kept():
    programs.append(waits_for_approval)
    follows.enqueue().signal("approved", "early")
    assert only().state == "enqueued"
    assert work().result == '"early"'


def test_each_wait_takes_the_oldest_signal_of_its_name():
    def program(context):
        return [context.wait_for("n", key=key) for key in "ab"], context.wait_for("other")

    programs.append(program)
    job = follows.enqueue()
    for name, payload in [("n", 1), ("other", 2), ("n", 3), ("n", 4)]:
        job.signal(name, payload)
    assert work().result == "[[1,3],2]"
    assert recorded() == [("n", "a"), ("n", "b"), ("other", "")]


def test_a_signal_of_another_name_wakes_no_job():
    run(waits_for_approval)
    result().signal("rejected")
    assert only().state == "scheduled"


def test_a_signal_counts_with_the_commit_of_its_sender():
    run(waits_for_approval)
    with transaction.atomic():
        result().signal("approved")
        assert only().state == "scheduled"
        transaction.set_rollback(True)
    assert (only().state, JobSignal.objects.count()) == ("scheduled", 0)
    with transaction.atomic():
        result().signal("approved")
    assert only().state == "enqueued"


@pytest.mark.skipif(KIND == "sqlite", reason="one writer at a time")
def test_an_open_transaction_with_a_signal_holds_up_no_job():
    programs.append(waits_for_approval)
    job = follows.enqueue()
    sent, may_commit = threading.Event(), threading.Event()

    def sender():
        with transaction.atomic():
            job.signal("approved", "late")
            sent.set()
            may_commit.wait(30)
        connection.close()

    thread = threading.Thread(target=sender)
    thread.start()
    sent.wait(30)
    assert isinstance(work(), Parking)  # the job itself parks
    Job.objects.all().requeue()
    assert isinstance(work(), Parking)
    assert waits.sweep(get_broker()) == (set(), None)
    programs.append(lambda _: "other")
    follows.enqueue()
    assert isinstance(work(), Ack)
    may_commit.set()
    thread.join()
    assert Job.objects.get(jid=job.id).state == "enqueued"


def test_a_job_that_parks_looks_for_signals_after_its_commit():
    programs.append(waits_for_approval)
    job = follows.enqueue()
    report = prepare(fetched()).run(get_broker())
    job.signal("approved")  # its sender sees the job at work
    assert only().state == "working"
    get_broker().interrupt([report])
    assert only().state == "enqueued"


def test_a_sweep_wakes_a_job_whose_signal_did_not_and_deletes_signals_to_jobs_that_have_ended():
    run(waits_for_approval)
    woken = only()
    programs.append(lambda _: None)
    ended = follows.enqueue()
    ended.signal("approved")
    work()
    JobSignal.objects.create(job_id=woken.pk, pushed_at=woken.created_at, name="approved", payload="1")
    after, calls = None, 0
    while calls == 0 or after is not None:
        _, after = waits.sweep(get_broker(), after=after, portion=1)
        calls += 1
    assert [signal.job_id for signal in JobSignal.objects.all()] == [woken.pk]
    assert (Job.objects.get(pk=woken.pk).state, calls) == ("enqueued", 3)


def test_a_signal_to_a_job_that_has_ended_or_never_was_is_an_error():
    run(lambda _: None)
    job = result()
    with pytest.raises(InvalidTransition, match="a job that is succeeded cannot take a signal"):
        job.signal("approved")
    Job.objects.all().delete()
    with pytest.raises(JobNotFound):
        job.signal("approved")


def test_a_dead_job_keeps_its_signals_for_a_retry():
    def program(context):
        if not marks():
            mark("failed")
            raise ValueError
        return context.wait_for("approved")

    run(program)
    Job.objects.all().kill()
    result().signal("approved", 1)
    assert again().result == "1"


def test_starting_over_deletes_signals_too():
    run(waits_for_approval)
    result().signal("rejected")
    assert Job.objects.all().restart() == 1
    assert JobSignal.objects.count() == 0


def test_a_jid_that_is_pushed_again_gets_no_signal_of_the_earlier_job():
    run(waits_for_approval)
    result().signal("rejected")
    Job.objects.all().kill()
    job = only()
    earlier = JobSignal.objects.get()
    JobSignal.objects.filter(pk=earlier.pk).update(name="approved", pushed_at=datetime(2020, 1, 1, tzinfo=UTC))
    Job.objects.all().retry()
    assert isinstance(work(), Parking)
    waits.sweep(get_broker())
    assert (only().pk, JobSignal.objects.count()) == (job.pk, 0)


@pytest.mark.parametrize(
    ("name", "payload", "part"),
    [
        ("", None, "expected a name of 1 to 100 printable characters, got ''"),
        ("x" * 101, None, "expected a name of 1 to 100"),
        ("a\n", None, "expected a name of 1 to 100"),
        ("a", "x" * 1024 * 1024, "expected at most 1,048,576 bytes of JSON"),
        ("a", object(), "payload: "),
        ("a", float("nan"), "payload: "),
    ],
)
def test_a_signal_that_cannot_be_sent_names_what_is_wrong(name, payload, part):
    run(waits_for_approval)
    with pytest.raises(InvalidPayload, match=part):
        result().signal(name, payload)


# --- time-outs


def test_a_wait_that_times_out_raises_in_each_run_although_a_signal_comes_later():
    def program(context):
        try:
            context.wait_for("approved", timeout=60)
        except WaitTimedOut as error:
            mark(f"timed out {len(marks())}")
            raise ValueError(str(error)) from error

    run(program)
    assert timedelta(seconds=50) < only().run_at - timezone.now() < timedelta(seconds=61)
    overdue()
    assert message(work()) == "wait 'approved': no signal came before the time-out"
    result().signal("approved")
    again()
    assert marks() == ["timed out 0", "timed out 1"]
    assert JobSignal.objects.count() == 1


def test_a_signal_that_came_in_time_counts_although_the_job_runs_after_the_time_out():
    run(lambda context: context.wait_for("approved", timeout=timedelta(seconds=60)))
    JobSignal.objects.create(job_id=only().pk, pushed_at=only().created_at, name="approved", payload="1")
    overdue()
    assert work().result == "1"


# --- other kinds of tasks


def test_the_payload_of_an_encrypted_job_is_encrypted(in_secret):  # noqa: F811
    def program(context):
        return context.wait_for("approved") + context.wait_for("plain")

    run(program, of=in_secret)
    job = in_secret.get_result(only().jid)
    job.signal("approved", "secret one")
    get_broker().signal(job.id, "plain", '"secret two"')  # as another language sends it
    assert "secret one" not in JobSignal.objects.get(name="approved").payload
    work()
    assert [step.result for step in JobStep.objects.all() if "secret" in step.result] == []
    assert in_secret.get_result(job.id).return_value == "secret onesecret two"


def test_an_async_task_sleeps_and_waits():
    async def program(context):
        await context.asleep(seconds=5)
        try:
            return await context.await_for("approved", timeout=5)
        except Exception:  # noqa: BLE001
            mark("swallowed")

    run(program, of=follows_async)
    assert (only().state, recorded()) == ("scheduled", [("sleep", "")])
    overdue()
    assert isinstance(work(), Parking)
    follows_async.get_result(only().jid).signal("approved", 7)
    assert (work().result, marks()) == ("7", [])


# --- in tests of a project


@pytest.mark.django_db(transaction=False)
def test_drain_runs_sleeps_and_waits_by_its_clock_and_a_signal_of_a_test_wakes():
    def program(context):
        context.sleep(hours=3)
        seen.append(timezone.now())
        payload = context.wait_for("approved", timeout=timedelta(days=2).total_seconds())
        try:
            context.wait_for("paid", timeout=60)
        except WaitTimedOut:
            return payload

    seen, began = [], timezone.now()
    programs.append(program)
    job = follows.enqueue()
    assert [one.state for one in drain()] == ["scheduled"]
    assert [one.state for one in drain(until=timedelta(hours=4))] == ["scheduled"]
    assert timedelta(hours=3) <= seen[0] - began < timedelta(hours=3, minutes=5)
    job.signal("approved", "yes")
    assert [one.state for one in drain(until=timedelta(minutes=2))] == ["scheduled", "succeeded"]
    job.refresh()
    assert job.return_value == "yes"


@pytest.mark.parametrize("program", [sleeps, waits_for_approval])
def test_the_immediate_backend_leaves_a_job_that_parks_as_it_is(program):
    programs.append(program)
    backend = {"BACKEND": "django_faktory.testing.backends.ImmediateBackend"}
    with override_settings(TASKS={"default": backend}):
        result = follows.enqueue()
    assert (str(result.status), result.errors) == ("READY", [])
