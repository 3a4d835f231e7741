"""One job of each key runs at a time, and none starves another: cases L01 to L11, L25 to L29."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections, transaction

from django_faktory.core.job_options import default_lock_key
from django_faktory.core.locket import locket
from django_faktory.models import Job, JobLock
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import payload
from tests.store import by_ids
from tests.store.locks.conftest import holders, jid, state_of

SECOND = timedelta(seconds=1)


def test_jobs_of_one_key_run_concurrently_without_the_locket_setting(plain):
    """Check that no lock is used unless LOCKET is set (L01)."""
    plain.push("A", "A1")
    assert plain.fetch(count=2) == [jid("A"), jid("A1")]
    assert holders() == []


def test_a_claimed_job_holds_its_lock_for_35_seconds(node):
    """Check the row of the lock: key, lease, holder and token (L02)."""
    one = node()
    one.push("A")
    job = one.reserve()
    lock = JobLock.objects.get()
    assert lock.key == default_lock_key("noop", '["A"]')
    assert abs(lock.expires_at - lock.acquired_at - 35 * SECOND) < SECOND
    assert (lock.jid, lock.wid, lock.pk) == (jid("A"), "w1", job.lock_token)


def test_a_blocked_job_keeps_its_place_and_counts_no_attempt_or_failure(node):
    """Check that a blocked twin keeps its place, and that no attempt or failure is counted (L03)."""
    one = node()
    one.push("A", "A1")
    before = Job.objects.get(jid=jid("A1"))
    processed = one.broker.info()["total_processed"]
    assert one.fetch() == [jid("A")]
    assert one.fetch() == []
    after = Job.objects.get(jid=jid("A1"))
    assert (after.enqueued_at, after.sort_priority, after.attempt, after.failures) == (before.enqueued_at, 0, 0, 0)
    info = one.broker.info()
    assert info["total_processed"] == processed
    assert info["queues"]["default"] == 1, "it counts as enqueued"


def test_an_ack_unblocks_the_next_job_of_the_key(node):
    """Check that an ACK releases the lock to any worker (L04)."""
    one = node()
    one.push("A", "A1")
    assert one.fetch() == [jid("A")]
    one.ack("A")
    assert holders() == []
    assert one.fetch(wid="w2") == [jid("A1")]
    assert holders() == [jid("A1")]


def test_a_failure_unblocks_the_next_job_of_the_key(node):
    """Check that a FAIL releases the lock before the retry is due (L05)."""
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.fail("A")
    assert state_of("A") == "retries"
    assert one.fetch() == [jid("A1")]
    assert holders() == [jid("A1")]


def test_one_fetch_of_several_jobs_gets_one_job_per_key(node):
    one = node()
    one.push("A", "A1", "B", "B1", "C")
    assert one.fetch(count=5) == [jid("A"), jid("B"), jid("C")]


def test_a_free_job_behind_a_thousand_blocked_ones_is_fetched_once(node):
    """Check that 20 concurrent FETCHes find the free job once, behind 1000 blocked ones (L06 to L08)."""
    one = node()
    one.push("A", *(f"A{number}" for number in range(1000)), queue="q1")
    one.push("C", queue="q2")
    assert one.fetch("q1") == [jid("A")]
    found, took = [], []

    def client(number):
        began = time.monotonic()
        found.extend(one.fetch("q1", "q2", wid=f"w{number}"))
        took.append(time.monotonic() - began)
        connections.close_all()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [jid("C")]


def cost(verb):
    """Return the database's own count of the work of `verb`: rows read, or on SQLite steps of its virtual machine."""
    if connection.vendor == "sqlite":
        steps = []
        connection.connection.set_progress_handler(lambda: steps.append(1), 1)
        try:
            verb()
        finally:
            connection.connection.set_progress_handler(None, 0)
        return len(steps)
    query = {
        "postgresql": "SELECT '', SUM(seq_tup_read + COALESCE(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables",
        "mysql": "SHOW SESSION STATUS LIKE 'Handler_read%'",
    }[connection.vendor]
    with transaction.atomic(), connection.cursor() as cursor:  # PostgreSQL counts by transaction
        cursor.execute(query)
        before = sum(int(count) for _, count in cursor.fetchall())
        verb()
        cursor.execute(query)
        return sum(int(count) for _, count in cursor.fetchall()) - before


def test_a_fetch_costs_the_same_behind_ten_or_a_thousand_blocked_jobs(node):
    """Check that a FETCH does not read the blocked jobs (L08)."""
    one = node()
    one.push("A", *(f"A{number}" for number in range(10)), queue="q1")
    one.push("B", "C", "D", queue="q2", custom={"lock": False})
    assert one.fetch("q1", "q2", count=2) == [jid("A"), jid("B")]
    few = cost(lambda: one.fetch("q1", "q2"))
    one.push(*(f"A{number}" for number in range(10, 1000)), queue="q1")
    with connection.cursor() as cursor:  # plan again for the larger table, as the server soon would
        cursor.execute({"mysql": "ANALYZE TABLE django_faktory_job"}.get(connection.vendor, "ANALYZE"))
    assert cost(lambda: one.fetch("q1", "q2")) < few + 100
    assert [state_of(name) for name in "ABCD"] == ["working"] * 4


def test_a_lock_key_excludes_jobs_across_all_locketed_queues(node):
    """Check that a key excludes twins in other queues (L09)."""
    one = node()
    one.push("A", queue="q1")
    one.push("A1", queue="q2")
    assert one.fetch("q1") == [jid("A")]
    assert one.fetch("q2") == []
    one.ack("A")
    assert one.fetch("q2") == [jid("A1")]


def test_jobs_of_a_queue_without_locket_are_not_locked(node):
    """Check that a twin runs at the same time if its queue is not locketed (L10)."""
    one = node(["q1"])
    one.push("A", queue="q1")
    one.push("A1", queue="q2")
    assert one.fetch("q1") == [jid("A")]
    assert one.fetch("q2") == [jid("A1")]
    assert holders() == [jid("A")]


def test_an_empty_list_of_queues_locks_no_job(node):
    """Check that an empty list of queues locks no job (L11)."""
    one = node([])
    one.push("A", "A1")
    assert one.fetch(count=2) == [jid("A"), jid("A1")]
    assert holders() == []


def test_removing_a_queue_keeps_a_lock_held_by_a_job_elsewhere(node):
    """Check that the removal of a queue keeps a lock that a job of another queue holds (L25)."""
    one = node()
    one.push("A", queue="q1")
    one.push("A1", "A2", queue="q2")
    one.fetch("q1")
    one.broker.remove(["q2"])
    assert Job.objects.count() == 1
    assert holders() == [jid("A")]
    one.ack("A")
    assert holders() == []


def test_a_late_ack_of_a_lost_worker_keeps_the_new_lock(node):
    """Check that a late ACK of the lost worker does not touch the new lock (L26)."""
    one = node()
    one.push("A", "A1")
    one.fetch(wid="lost")
    one.broker.bye(["lost"])
    assert one.fetch(wid="w2") == [jid("A")]
    token = JobLock.objects.get().pk
    assert one.ack("A", wid="lost") == [False]
    assert JobLock.objects.get().pk == token


def test_a_scheduled_job_is_blocked_when_due_while_its_key_is_locked(node):
    """Check that a scheduled twin is blocked when it is due (L27)."""
    one = node()
    one.push("A")
    one.push("A1", at=datetime.now(UTC) + timedelta(hours=1))
    one.fetch()
    assert due.enqueue_due(Store(now=datetime.now(UTC) + timedelta(hours=2))) == {"default"}
    assert state_of("A1") == "blocked"
    assert one.fetch() == []
    one.ack("A")
    assert one.fetch() == [jid("A1")]


def test_a_due_retry_of_a_locked_key_is_blocked_without_an_attempt(node):
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.fail("A")
    one.fetch()
    due.enqueue_due(Store(now=datetime.now(UTC) + timedelta(hours=2)))
    assert one.fetch() == []
    retried = Job.objects.get(jid=jid("A"))
    assert (retried.state, retried.claims, retried.failures) == ("blocked", 1, 1)


@pytest.mark.parametrize(("names", "taken", "counts"), [(("A", "A1", "A2"), 1, (2, 2)), (("A", "A1", "B"), 1, (2, 1))])
def test_a_queue_counts_as_locked_when_all_its_waiting_jobs_are(node, names, taken, counts):
    """Check the counts of waiting and locked jobs (L29)."""
    one = node()
    one.push(*names)
    one.fetch(count=1)
    state = locks.locket_state("default", using="default")
    assert (state.waiting, state.locked) == counts
    assert state.is_locked is (counts[0] == counts[1])


def test_an_empty_queue_is_not_locked(node):
    """Check the state of a queue without jobs (L29)."""
    node()
    assert not locks.locket_state("default", using="default").is_locked


# --- order


def test_jobs_of_one_key_run_by_priority_and_then_by_age(node):
    one = node()
    one.push("A")
    one.push("A1", priority=-50)
    one.push("A2", priority=50)
    one.push("A3")
    order = []
    while found := one.fetch():
        order += found
        assert one.ack(found[0].removeprefix("job-").rstrip(".")) == [True]
    assert order == [jid("A2"), jid("A"), jid("A3"), jid("A1")]


def test_a_paused_queue_does_not_block_its_key_in_other_queues(node):
    one = node()
    one.push("A", queue="q1")
    one.push("A1", "A2", queue="q2")
    one.broker.pause(["q1"])
    assert one.fetch("q1", "q2") == [jid("A1")]
    one.ack("A1")
    assert one.fetch("q1", "q2") == [jid("A2")]


# --- a job leaves while it waits


@pytest.mark.parametrize("change", [by_ids.kill, by_ids.discard], ids=["kill", "discard"])
def test_a_kill_or_discard_of_the_first_job_unblocks_the_next(node, change):
    one = node()
    one.push("A", "A1", "A2")
    assert change([Job.objects.get(jid=jid("A")).pk], using="default") == 1
    assert one.fetch() == [jid("A1")]


def test_expiry_of_the_first_job_unblocks_the_next(node):
    one = node()
    one.push("A", custom={"expires_in": 1})
    one.push("A1")
    Job.objects.filter(jid=jid("A")).update(expires_at=datetime.now(UTC) - SECOND)
    assert due.expire(Store()) == 1
    assert one.fetch() == [jid("A1")]


def test_requeued_dead_jobs_of_one_key_run_one_after_another(node):
    one = node()
    one.push("A", "A1", "A2")
    ids = list(Job.objects.values_list("pk", flat=True))
    by_ids.kill(ids, using="default")
    assert by_ids.requeue(ids, using="default") == 3
    assert one.fetch(count=3) == [jid("A")]
    one.ack("A")
    assert one.fetch(count=3) == [jid("A1")]


def test_a_flush_deletes_all_locks(node):
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.broker.flush()
    assert (Job.objects.count(), holders()) == (0, [])
    one.push("A2")
    assert one.fetch() == [jid("A2")]


def test_a_released_job_is_the_first_of_its_key_again(node):
    one = node()
    one.push("A", "A1")
    job = one.reserve()
    assert one.broker.release([job]) == 1
    assert holders() == []
    assert one.fetch() == [jid("A")]


# --- locks requested by the job


def test_a_client_requests_a_lock_by_the_custom_field(plain):
    plain.push("A", "B", custom={"lock": "shared"})
    plain.push("C", custom={"lock": True})
    plain.push("C1", custom={"lock": True})
    assert plain.fetch(count=5) == [jid("A"), jid("C")]


@pytest.mark.parametrize("wrong", ["", 7, [], {}, "a\0b"])
def test_a_custom_lock_that_is_not_a_valid_key_is_rejected(plain, wrong):
    with pytest.raises(Exception, match=r"custom\.lock: expected a key"):
        payload(jid="A", custom={"lock": wrong})


def test_a_job_with_lock_false_is_never_locked(node):
    one = node()
    one.push("A", "A1", custom={"lock": False})
    assert one.fetch(count=2) == [jid("A"), jid("A1")]


def test_unique_queues_is_an_alias_of_locket():
    from django_faktory.core.locket import unique_queues

    assert unique_queues(["a"]) == locket(["a"])
