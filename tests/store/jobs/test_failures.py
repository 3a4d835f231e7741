"""Records of failures: which fields are written, and which are not. Rules: W17 to W20."""

import json
from datetime import timedelta

import pytest

from django_faktory.core.lifecycle import count_claims
from django_faktory.core.payloads import FetchRequest, failure
from django_faktory.models import Job
from django_faktory.store.jobs import claims, failures, history, pushes
from django_faktory.store.maintenance import due
from django_faktory.store.maintenance.pending_work import find_pending_work
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, payload

pytestmark = pytest.mark.django_db

USING = "default"
LINES = [f"line {n}" for n in range(300)]


def fail_once(job, **report):
    [answer] = failures.fail(Store(USING, now=T0), [failure(jid=job.jid, wid="w1", **report)])
    assert answer is True
    return Job.objects.get(pk=job.pk)


def test_a_failure_record_has_the_fields_of_the_original_server():
    row = fail_once(JobFactory(working=True, retry=5), errtype="KeyError", message="'x'", backtrace=["a", "b"])
    recorded = json.loads(row.failure)
    assert recorded.pop("next_at") > "2026-05-01T12:00:14Z"
    assert recorded == {
        "retry_count": 0,
        "remaining": 5,
        "failed_at": "2026-05-01T12:00:00Z",
        "message": "'x'",
        "errtype": "KeyError",
        "backtrace": ["a", "b"],
    }


def test_a_second_failure_keeps_the_failed_at_time_of_the_first():
    row = fail_once(JobFactory(working=True, retry=5))
    Job.objects.filter(pk=row.pk).update(state="working", run_at=None, reserved_until=T0)
    [_] = failures.fail(Store(USING, now=T0 + timedelta(hours=1)), [failure(jid=row.jid, wid="w1")])
    recorded = json.loads(Job.objects.get().failure)
    assert (recorded["retry_count"], recorded["remaining"]) == (1, 4)
    assert recorded["failed_at"] == "2026-05-01T12:00:00Z"


def test_only_the_latest_attempts_of_a_job_keep_their_log_lines():
    job = JobFactory(working=True)
    for number in range(8):
        row = fail_once(job, log=[f"line {number}"])
        Job.objects.filter(pk=job.pk).update(state="working", run_at=None, reserved_until=T0)
    kept = [attempt.get("log") for attempt in json.loads(row.history)]
    assert kept == [None, None, None, *([f"line {number}"] for number in range(3, 8))]
    assert "log" not in json.loads(row.failure)


@pytest.mark.parametrize(("wanted", "kept"), [(-1, 0), (0, 30), (3, 3), (200, 200)])
def test_a_job_keeps_as_many_backtrace_lines_as_it_asks_for(wanted, kept):
    """W17: the first lines are kept, 30 by default."""
    row = fail_once(JobFactory(working=True, backtrace=wanted), backtrace=LINES)
    assert json.loads(row.failure).get("backtrace", []) == LINES[:kept]


def test_the_history_records_every_failed_attempt_with_its_worker():
    job = JobFactory(working=True)
    row = fail_once(job, errtype="A", message="first")
    Job.objects.filter(pk=job.pk).update(state="working", wid="w2", attempt=2, run_at=None, reserved_until=T0)
    failures.fail(Store(USING, now=T0), [failure(jid=job.jid, wid="w2", errtype="B", message="second")])
    attempts = json.loads(Job.objects.get(pk=row.pk).history)
    assert [(one["attempt"], one["wid"], one["errtype"], one["message"]) for one in attempts] == [
        (1, "w1", "A", "first"),
        (2, "w2", "B", "second"),
    ]


def test_the_attempt_history_is_bounded():
    job = JobFactory(working=True, retry=1000, history=json.dumps([{"attempt": n} for n in range(60)]))
    row = fail_once(job)
    assert len(json.loads(row.history)) == history.HISTORY_LIMIT


@pytest.mark.parametrize("text", ["nul \x00 in it", "\ud800 alone", "x" * 5000, "line\nbreak \u2028"])
def test_hostile_error_texts_are_sanitized_or_truncated_and_never_rejected(text):
    row = fail_once(JobFactory(working=True), errtype=text, message=text, backtrace=[text])
    assert row.state == "retries"
    assert len(json.loads(row.failure)["message"].encode()) <= 1000


def test_a_requested_retry_delay_is_used_unchanged():
    row = fail_once(JobFactory(working=True), retry_in_s=7.5)
    assert row.run_at == T0 + timedelta(seconds=7.5)


def test_a_kill_or_discard_verdict_ends_a_job_with_retries_left():
    killed = fail_once(JobFactory(working=True), verdict="kill")
    assert killed.state == "dead"
    kept = fail_once(JobFactory(working=True, result_ttl=60), verdict="discard")
    assert kept.state == "discarded"
    gone = JobFactory(working=True)
    failures.fail(Store(USING), [failure(jid=gone.jid, wid="w1", verdict="discard")])
    assert not Job.objects.filter(pk=gone.pk).exists()


def test_each_failure_report_of_a_set_gets_its_own_answer():
    good, held = JobFactory(working=True), JobFactory(working=True, wid="other")
    answers = failures.fail(
        Store(USING),
        [
            failure(jid=held.jid, wid="w1"),
            failure(jid="unknown jid", wid="w1"),
            failure(jid=good.jid, wid="w1"),
            failure(jid=good.jid, wid="w1"),
            failure(jid="nul\x00in it", wid="w1"),
        ],
    )
    assert [str(answer) for answer in answers] == [
        "False",
        "Job not found unknown jid",
        "True",
        "False",
        "Job not found nul\x00in it",
    ]


def test_an_expired_reservation_counts_as_a_failure():
    """W19: the failure is recorded as ReservationExpired."""
    fresh = JobFactory(working=True, reserved_until=T0 + timedelta(seconds=10))
    overdue = JobFactory(working=True, reserved_until=T0 - timedelta(seconds=1))
    assert failures.reap(Store(USING, now=T0)) == 1
    assert Job.objects.get(pk=fresh.pk).state == "working"
    row = Job.objects.get(pk=overdue.pk)
    assert (row.state, row.errtype, row.failures) == ("retries", "ReservationExpired", 1)


def test_a_job_of_a_lost_worker_returns_to_its_old_queue_position():
    """W20: the loss is recorded in the job's history."""
    old = JobFactory(working=True, enqueued_at=T0 - timedelta(hours=1))
    JobFactory(enqueued_at=T0)
    failures.reclaim_lost(Store(USING), ["w1"])
    [[first]] = claims.fetch(Store(USING), [FetchRequest(queues=("default",))])
    assert first.jid == old.jid
    assert json.loads(first.history)[0]["errtype"] == "WorkerLost"


def test_a_retry_is_enqueued_when_it_is_due_and_not_before():
    job = payload()
    pushes.push(Store(USING, now=T0), [job])
    claims.fetch(Store(USING, now=T0), [FetchRequest(queues=("default",), wid="w1")])
    failures.fail(Store(USING, now=T0), [failure(jid=job.jid, wid="w1", retry_in_s=60)])
    assert find_pending_work(using=USING, now=T0).due_in_s == 60
    assert due.enqueue_due(Store(USING, now=T0 + timedelta(seconds=59))) == set()
    assert due.enqueue_due(Store(USING, now=T0 + timedelta(seconds=60))) == {"default"}
    [[again]] = claims.fetch(Store(USING), [FetchRequest(queues=("default",), wid="w1")])
    assert (count_claims(again.attempt), '"failure":{"retry_count":0' in again.wire()) == (2, True)
