"""Leases: how they are extended, how they expire, and that a stale holder has no effect: cases L18 to L24."""

import threading
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.db.models import F

from django_faktory.core.payloads import Beat, WorkerIdentity
from django_faktory.models import Job, JobLock
from django_faktory.store.jobs import failures, releases
from django_faktory.store.locks import locks
from django_faktory.store.store import Store
from tests.store.locks.conftest import holders, jid, state_of


def passes(seconds):
    """Move the expiry of all locks, as if this time had passed."""
    JobLock.objects.update(expires_at=F("expires_at") - timedelta(seconds=seconds))


def test_a_beat_extends_the_locks_of_its_worker_and_of_no_other(node):
    """Check 12 intervals of 10 s, after which only the lock of w1 is alive (L20)."""
    one = node()
    one.broker.hello(WorkerIdentity(wid="w1"))
    one.broker.hello(WorkerIdentity(wid="w2"))
    one.push("A", "B")
    one.fetch(wid="w1")
    one.fetch(wid="w2")
    for _ in range(12):
        passes(10)
        one.broker.beat([Beat(wid="w1")])
    assert locks.mark_expired(using="default") == 1
    assert list(JobLock.objects.filter(is_lapsed=False).values_list("jid", flat=True)) == [jid("A")]


def test_the_next_job_of_the_key_is_ready_when_the_lease_expires(node):
    """Check that a lock expires after 35 s and not after 34 s (L20, L23)."""
    one = node()
    one.push("A", "A1")
    one.fetch()
    passes(34)
    assert locks.mark_expired(using="default") == 0
    assert one.fetch() == []
    passes(1)
    assert locks.mark_expired(using="default") == 1
    assert one.fetch(wid="w2") == [jid("A1")]
    assert holders() == [jid("A1")]


def test_a_stale_holder_neither_extends_nor_releases_the_new_lock(node):
    """Check that the token of the stale holder is reported as lost, and its late ACK keeps the new lock (L22)."""
    one = node()
    one.push("A", "A1")
    stale = one.reserve(wid="stopped")
    passes(36)
    locks.mark_expired(using="default")
    held = one.reserve(wid="w2")
    assert held.lock_token > stale.lock_token
    assert one.broker.extend_locks([stale.lock_token]) == {stale.lock_token}
    assert one.broker.extend_locks([held.lock_token]) == set()
    assert one.ack("A", wid="stopped") == [True]
    assert JobLock.objects.get().pk == held.lock_token


def test_an_expired_lock_that_was_not_reacquired_can_be_extended(node):
    one = node()
    one.push("A", "A1")
    job = one.reserve()
    passes(36)
    locks.mark_expired(using="default")
    assert one.broker.extend_locks([job.lock_token]) == set()
    assert one.fetch(wid="w2") == []
    assert state_of("A1") == "blocked"
    one.ack("A")
    assert one.fetch(wid="w2") == [jid("A1")]


def test_a_reaped_job_is_retried_and_leaves_the_lock_to_its_holder(node):
    """Check that no key has two locks after the loss (L23)."""
    one = node()
    one.push("A", "A1")
    one.fetch(wid="dead")
    passes(36)
    locks.mark_expired(using="default")
    assert one.fetch(wid="w2") == [jid("A1")]
    Job.objects.filter(jid=jid("A")).update(reserved_until=F("reserved_until") - timedelta(days=1))
    assert failures.reap(Store()) == 1
    assert state_of("A") == "retries"
    assert holders() == [jid("A1")]


def test_the_locks_of_a_lost_worker_are_released(node):
    one = node()
    one.push("A", "A1")
    one.fetch(wid="lost")
    assert failures.reclaim_lost(Store(), ["lost"]) == 1
    assert holders() == []
    assert one.fetch(wid="w2") == [jid("A")]


def test_a_lost_worker_job_is_blocked_if_another_job_holds_its_lock(node):
    one = node()
    one.push("A", "A1")
    one.fetch(wid="lost")
    passes(36)
    locks.mark_expired(using="default")
    one.fetch(wid="w2")
    assert failures.reclaim_lost(Store(), ["lost"]) == 1
    assert (state_of("A"), holders()) == ("blocked", [jid("A1")])
    one.ack("A1", wid="w2")
    assert one.fetch() == [jid("A")]


# --- crashes


def test_a_claim_that_crashed_before_acquiring_its_lock_is_released(node):
    one = node()
    one.push("A", "A1")
    one.fetch()
    JobLock.objects.all().delete()
    Job.objects.filter(jid=jid("A")).update(lock_token=None, started_at=F("started_at") - timedelta(minutes=1))
    assert releases.release_stranded(Store(), 10) == (1, {"default"})
    assert one.fetch() == [jid("A")]


def test_a_sweep_repairs_keys_without_a_ready_job(node):
    one = node()
    one.push("A", "A1", "B", "B1")
    Job.objects.filter(jid__in=[jid("A"), jid("B")]).delete()  # the state that a crash between commit and hook leaves
    one.push("B2")
    assert one.fetch(count=9) == [jid("B2")]
    assert locks.sweep(using="default").repaired == 1
    assert one.fetch(count=9) == [jid("A1")]
    assert locks.sweep(using="default").repaired == 0


def test_a_sweep_does_not_repair_a_key_that_another_process_settles(node):
    """Another process may commit between the end of a job and the release of the next one."""
    one = node()
    one.push("A", "A1")
    key = Job.objects.get(jid=jid("A1")).lock_key
    Job.objects.filter(jid=jid("A")).delete()
    swept = locks.sweep(using="default", pause=lambda _: locks.promote_waiters([key], using="default"))
    assert swept.repaired == 0
    assert one.fetch(count=9) == [jid("A1")]


# --- keys


@pytest.mark.parametrize(
    ("key", "both"),
    [(lambda job: job.jobtype, False), (lambda job: str(job.created_at), True), (lambda _: None, True)],
    ids=["jobtype", "created_at", "None"],
)
def test_the_job_lock_key_callable_decides_which_jobs_exclude_each_other(node, key, both):
    """Check JOB_LOCK_KEY with a shared key, a key for each job, and None (L16, L17, L18)."""
    one = node(key=key)
    one.push("A")
    one.push("B")
    assert len(one.fetch(count=2)) == 1 + both


def test_a_long_lock_key_is_stored_as_its_hash(node):
    """Check that two jobs of one long key exclude each other (L18)."""
    one = node(key=lambda job: "x" * 300)
    one.push("A", "B")
    assert one.fetch(count=2) == [jid("A")]
    assert len(JobLock.objects.get().key) == 71


def _raises(job):
    raise KeyError("shop")


@pytest.mark.parametrize("key", [_raises, lambda _: "", lambda _: 7], ids=["raises", "empty", "no string"])
def test_a_push_rejects_only_the_job_with_an_invalid_lock_key(node, key):
    """Check that an error in JOB_LOCK_KEY refuses only the job concerned (L18)."""
    from django_faktory.errors import InvalidPayload
    from tests.factories import payload

    one = node(key=lambda job: key(job) if job.jobtype == "odd" else None)
    answers = one.broker.push([payload(jid="A"), payload(jid="B", jobtype="odd"), payload(jid="C")])
    assert [type(answer) for answer in answers] == [type(None), InvalidPayload, type(None)]
    assert "JOB_LOCK_KEY: " in str(answers[1])
    assert sorted(Job.objects.values_list("jid", flat=True)) == [jid("A"), jid("C")]


def test_invalid_lock_settings_fail_a_fetch_before_any_job_is_claimed(node):
    """Check that a lease shorter than the heartbeat interval is an error (L14)."""
    one = node(heartbeat_frequency=60, job_lock_duration=40)
    one.push("A")
    with pytest.raises(Exception, match="JOB_LOCK_DURATION"):
        one.fetch()
    assert state_of("A") == "enqueued"
    assert holders() == []


# --- several at once


def test_one_of_eight_concurrent_claims_of_a_key_acquires_the_lock(node):
    one = node()
    queues = [f"q{number}" for number in range(8)]
    for queue in queues:
        one.push(f"A{queue}", queue=queue)
    found, start = [], threading.Barrier(8)

    def client(queue):
        from django.db import connections

        start.wait()
        found.extend(one.fetch(queue, wid=queue))
        connections.close_all()

    threads = [threading.Thread(target=client, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert holders() == found


def test_lock_renewal_continues_after_broker_and_database_errors(node):
    """Check that errors of the broker and of the database are survived (L21)."""
    from queue import SimpleQueue

    from django_faktory.errors import BrokerUnavailable
    from django_faktory.worker.job_buffer import JobBuffer
    from django_faktory.worker.lock_renewal import LockRenewer
    from tests.waiting import wait_until

    one = node(heartbeat_frequency=0.05, job_lock_duration=1)
    one.push("A")
    job = one.reserve()
    troubles = SimpleQueue()
    for trouble in (BrokerUnavailable("away"), OperationalError("gone")):
        troubles.put(trouble)
    extended = []
    real = one.broker.extend_locks

    def sometimes(tokens):
        if not troubles.empty():
            raise troubles.get()
        extended.append(real(tokens))
        return extended[-1]

    one.broker.extend_locks = sometimes
    held = JobBuffer(concurrency=1, max_prefetch=0)
    held.add([job])
    keeper = LockRenewer(one.broker, held)
    thread = threading.Thread(target=keeper.run)
    thread.start()
    wait_until(lambda: len(extended) > 3)
    JobLock.objects.all().delete()
    wait_until(lambda: held.lost_locks == {job.lock_token})
    keeper.stop()
    thread.join(30)
    assert not thread.is_alive()
