"""The job buffer of a worker: each job leaves it once."""

import pytest

from django_faktory.core.payloads import Ack, Failure, Reservation
from django_faktory.worker.job_buffer import MAX_UNREPORTED, JobBuffer

pytestmark = pytest.mark.core


def reserved(number=1):
    return Reservation(jid=f"job-{number:05d}", queue="default", text="{}", wid="w1", attempt=1)


def ack(job):
    return Ack(jid=job.jid)


@pytest.fixture
def held():
    """Buffer for two threads, after its first jobs have ended."""
    found = JobBuffer(concurrency=2, max_prefetch=0)
    for _ in range(2):
        run_one(found)
    while not found.finished.empty():
        found.finished.get()
    return found


def run_one(held):
    job = reserved()
    held.add([job])
    assert held.take_next() is job
    held.finish(job, ack(job), ran_s=1.0)


def test_an_abandoned_job_is_not_reported_by_its_thread(held):
    job = reserved()
    held.add([job])
    assert held.abandon() == [job]
    assert held.finish(job, ack(job), ran_s=1.0) is False
    assert held.finished.empty()


def test_an_abandoned_buffer_accepts_no_jobs(held):
    held.abandon()
    assert held.add([reserved()]) is False
    assert held.wait_for_room(0) == 0
    assert held.is_empty()


def test_two_attempts_of_one_job_are_tracked_separately(held):
    first, second = reserved(), reserved()
    held.add([first, second])
    held.finish(first, ack(first), ran_s=1.0)
    assert not held.is_empty()


def test_the_buffer_has_no_room_while_too_many_jobs_are_unreported(held):
    for _ in range(MAX_UNREPORTED + 1):
        held.finished.put(ack(reserved()))
    assert held.wait_for_room(0) == 0


def test_a_held_lock_is_remembered_only_for_an_acknowledged_job(held):
    """Check that no lock is remembered for a failure: it takes another path, and the entry would never be read."""
    jobs = [Reservation(jid=f"job-{n}", queue="q", text="{}", wid="w1", attempt=1, lock_token=n) for n in (1, 2)]
    held.add(jobs)
    reports = [ack(jobs[0]), Failure(jid=jobs[1].jid, errtype="Error", message="", backtrace=())]
    for job, report in zip(jobs, reports, strict=True):
        held.take_next()
        held.finish(job, report, ran_s=0.1)
    assert not held.had_locks(["job-2"])
    assert held.had_locks(["job-1"])
    assert not held.had_locks(["job-1"])


def test_a_job_is_known_until_its_end_is_reported(held):
    """A job that ended while the database is down must not run again, so heartbeats keep it."""
    first, second = reserved(1), reserved(2)
    report = Ack(jid=first.jid, attempt=first.attempt)
    held.add([first, second])
    assert held.held_attempts() == {(first.jid, 1), (second.jid, 1)}
    held.finish(held.take_next(), report, ran_s=0.0)
    assert held.held_attempts() == {(first.jid, 1), (second.jid, 1)}
    held.forget_reports([report])
    assert held.held_attempts() == {(second.jid, 1)}
    held.finish(held.take_next(), None, ran_s=0.0)
    assert held.held_attempts() == set()


def test_a_job_that_was_not_begun_is_known_until_its_report_is_sent(held):
    suspect = reserved()
    held.add_alone(suspect, wait_s=0.0)
    assert held.take_overdue() is suspect
    report = Failure(jid=suspect.jid, attempt=suspect.attempt, errtype="Error", message="")
    held.report(report)
    assert held.held_attempts() == {(suspect.jid, 1)}
    held.forget_reports([report])
    assert held.held_attempts() == set()


def test_a_removed_job_is_no_longer_known(held):
    held.add([reserved(1)])
    held.take_waiting()
    assert held.held_attempts() == set()
