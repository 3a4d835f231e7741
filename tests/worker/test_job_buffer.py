"""The job buffer of a worker: each job leaves it once."""

import threading

import pytest

from django_faktory.core.payloads import Ack, Failure, Reservation
from django_faktory.worker import job_buffer as held_module
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
    assert held.next() is job
    held.finish(job, ack(job), ran_s=1.0)


def test_room_is_for_the_threads_that_are_free(held):
    assert held.wait_for_room(0) == 2
    held.add([reserved(1)])
    assert held.wait_for_room(0) == 1
    held.add([reserved(2)])
    assert held.wait_for_room(0) == 0


def test_the_end_of_a_job_makes_room(held):
    job = reserved()
    held.add([job, reserved(2)])
    room = []
    waiting = threading.Thread(target=lambda: room.append(held.wait_for_room(30)))
    waiting.start()
    held.finish(job, ack(job), ran_s=1.0)
    waiting.join(5)
    assert room == [1]


def test_a_job_is_reported_once(held):
    job = reserved()
    held.add([job])
    assert held.finish(job, ack(job), ran_s=1.0) is True
    assert held.finish(job, ack(job), ran_s=1.0) is False
    assert held.finished.qsize() == 1


def test_what_was_abandoned_is_not_reported_by_its_thread(held):
    job = reserved()
    held.add([job])
    assert held.abandon() == [job]
    assert held.finish(job, ack(job), ran_s=1.0) is False
    assert held.finished.empty()


def test_after_giving_up_nothing_is_taken_in(held):
    held.abandon()
    assert held.add([reserved()]) is False
    assert held.wait_for_room(0) == 0
    assert held.is_empty()


def test_the_same_job_twice_is_two_attempts(held):
    first, second = reserved(), reserved()
    held.add([first, second])
    held.finish(first, ack(first), ran_s=1.0)
    assert not held.is_empty()


def test_what_no_thread_has_begun_can_be_taken_out(held):
    begun, waiting = reserved(1), reserved(2)
    held.add([begun, waiting])
    held.next()
    held.end(threads=2)
    assert held.take_waiting() == [waiting]
    assert [held.next(), held.next()] == [None, None]
    assert held.abandon() == [begun]


def test_waiting_jobs_are_stuck_only_when_no_thread_takes_one(held, monkeypatch):
    job = reserved()
    held.add([job])
    assert held.take_stuck() == []
    monkeypatch.setattr(held_module, "STUCK_S", 0.0)
    assert held.take_stuck() == [job]
    assert held.take_stuck() == []


def test_empty_is_waited_for(held):
    assert held.wait_empty(0) is True
    job = reserved()
    held.add([job])
    assert held.wait_empty(0.01) is False
    held.finish(job, ack(job), ran_s=1.0)
    assert held.wait_empty(30) is True


def test_while_too_much_is_unreported_nothing_is_begun(held):
    for _ in range(MAX_UNREPORTED + 1):
        held.finished.put(ack(reserved()))
    assert held.wait_for_room(0) == 0


def test_only_who_is_acknowledged_with_a_lock_is_remembered_until_it_is_told(held):
    """Check that no lock is remembered for a failure: it takes another path, and the entry would never be read."""
    jobs = [Reservation(jid=f"job-{n}", queue="q", text="{}", wid="w1", attempt=1, lock_token=n) for n in (1, 2)]
    held.add(jobs)
    reports = [ack(jobs[0]), Failure(jid=jobs[1].jid, errtype="Error", message="", backtrace=())]
    for job, report in zip(jobs, reports, strict=True):
        held.next()
        held.finish(job, report, ran_s=0.1)
    assert not held.held_locks(["job-2"])
    assert held.held_locks(["job-1"])
    assert not held.held_locks(["job-1"])


def test_a_job_is_known_until_its_end_is_reported(held):
    """A job that ended while the database is down must not run again, so heartbeats keep it."""
    first, second = reserved(1), reserved(2)
    report = Ack(jid=first.jid, attempt=first.attempt)
    held.add([first, second])
    assert held.known() == {(first.jid, 1), (second.jid, 1)}
    held.finish(held.next(), report, ran_s=0.0)
    assert held.known() == {(first.jid, 1), (second.jid, 1)}
    held.reported([report])
    assert held.known() == {(second.jid, 1)}
    held.finish(held.next(), None, ran_s=0.0)
    assert held.known() == set()


def test_a_job_that_is_taken_out_is_not_known(held):
    held.add([reserved(1)])
    held.take_waiting()
    assert held.known() == set()
