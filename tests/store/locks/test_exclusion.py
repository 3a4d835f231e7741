"""One job of each key runs at a time, and none starves another: cases L01 to L11, L25 to L29."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections, transaction

from django_faktory.core.job_options import default_lock_key
from django_faktory.core.locket import locket
from django_faktory.models import Job, JobLock
from django_faktory.store.jobs import transitions
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from tests.factories import payload
from tests.store.locks.conftest import holders, jid, state_of

SECOND = timedelta(seconds=1)


def test_without_the_setting_twins_run_beside_each_other(plain):
    """Check that no lock is used unless LOCKET is set (L01)."""
    plain.push("A", "A1")
    assert plain.fetch(count=2) == [jid("A"), jid("A1")]
    assert holders() == []


def test_a_job_taken_holds_its_key_for_35_seconds(node):
    """Check the row of the lock: key, lease, holder and token (L02)."""
    one = node()
    one.push("A")
    job = one.reserve()
    lock = JobLock.objects.get()
    assert lock.key == default_lock_key("noop", '["A"]')
    assert abs(lock.expires_at - lock.acquired_at - 35 * SECOND) < SECOND
    assert (lock.jid, lock.wid, lock.pk) == (jid("A"), "w1", job.lock_token)


def test_a_twin_waits_at_its_place_and_nothing_is_counted(node):
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


def test_the_twin_is_ready_once_the_job_is_acknowledged(node):
    """Check that an ACK releases the lock to any worker (L04)."""
    one = node()
    one.push("A", "A1")
    assert one.fetch() == [jid("A")]
    one.ack("A")
    assert holders() == []
    assert one.fetch(wid="w2") == [jid("A1")]
    assert holders() == [jid("A1")]


def test_the_twin_is_ready_once_the_job_has_failed(node):
    """Check that a FAIL releases the lock before the retry is due (L05)."""
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.fail("A")
    assert state_of("A") == "retries"
    assert one.fetch() == [jid("A1")]
    assert holders() == [jid("A1")]


def test_others_overtake_what_is_locked(node):
    """Check that a blocked job does not delay jobs of other keys (L06)."""
    one = node()
    one.push("A", "A1", "B")
    assert [one.fetch(), one.fetch()] == [[jid("A")], [jid("B")]]


def test_one_claim_of_many_gets_one_of_each_key(node):
    one = node()
    one.push("A", "A1", "B", "B1", "C")
    assert one.fetch(count=5) == [jid("A"), jid("B"), jid("C")]


def test_the_next_queue_is_served_where_all_of_the_first_is_locked(node):
    """Check that FETCH skips a queue that has blocked jobs only (L07)."""
    one = node()
    one.push("A", "A1", queue="q1")
    one.push("C", queue="q2")
    assert one.fetch("q1", "q2") == [jid("A")]
    assert one.fetch("q1", "q2") == [jid("C")]


def test_a_thousand_locked_jobs_hide_no_free_one(node):
    """Check that 20 concurrent FETCHes find the free job once, behind 1000 blocked ones (L08)."""
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
    told = {
        "postgresql": "SELECT '', SUM(seq_tup_read + COALESCE(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables",
        "mysql": "SHOW SESSION STATUS LIKE 'Handler_read%'",
    }[connection.vendor]
    with transaction.atomic(), connection.cursor() as cursor:  # PostgreSQL counts by transaction
        cursor.execute(told)
        before = sum(int(count) for _, count in cursor.fetchall())
        verb()
        cursor.execute(told)
        return sum(int(count) for _, count in cursor.fetchall()) - before


def test_a_fetch_of_a_free_job_costs_the_same_behind_ten_locked_ones_and_a_thousand(node):
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


def test_a_key_is_one_in_all_locketed_queues(node):
    """Check that a key excludes twins in other queues (L09)."""
    one = node()
    one.push("A", queue="q1")
    one.push("A1", queue="q2")
    assert one.fetch("q1") == [jid("A")]
    assert one.fetch("q2") == []
    one.ack("A")
    assert one.fetch("q2") == [jid("A1")]


def test_a_queue_that_is_not_locketed_takes_no_part(node):
    """Check that a twin runs at the same time if its queue is not locketed (L10)."""
    one = node(["q1"])
    one.push("A", queue="q1")
    one.push("A1", queue="q2")
    assert one.fetch("q1") == [jid("A")]
    assert one.fetch("q2") == [jid("A1")]
    assert holders() == [jid("A")]


def test_without_queues_nothing_is_locked(node):
    """Check that an empty list of queues locks no job (L11)."""
    one = node([])
    one.push("A", "A1")
    assert one.fetch(count=2) == [jid("A"), jid("A1")]
    assert holders() == []


def test_a_removed_queue_takes_its_waiting_jobs_and_leaves_the_lock_to_its_holder(node):
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


def test_a_job_taken_from_its_worker_frees_its_lock_for_the_next_holder(node):
    """Check that a late ACK of the lost worker does not touch the new lock (L26)."""
    one = node()
    one.push("A", "A1")
    one.fetch(wid="lost")
    one.broker.bye(["lost"])
    assert one.fetch(wid="w2") == [jid("A")]
    token = JobLock.objects.get().pk
    assert one.ack("A", wid="lost") == [False]
    assert JobLock.objects.get().pk == token


def test_a_twin_that_falls_due_waits_and_runs_after(node):
    """Check that a scheduled twin is blocked when it is due (L27)."""
    one = node()
    one.push("A")
    one.push("A1", at=datetime.now(UTC) + timedelta(hours=1))
    one.fetch()
    assert due.enqueue_due(using="default", now=datetime.now(UTC) + timedelta(hours=2)) == {"default"}
    assert state_of("A1") == "blocked"
    assert one.fetch() == []
    one.ack("A")
    assert one.fetch() == [jid("A1")]


def test_a_retry_whose_twin_runs_waits_and_burns_no_attempt(node):
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.fail("A")
    one.fetch()
    due.enqueue_due(using="default", now=datetime.now(UTC) + timedelta(hours=2))
    assert one.fetch() == []
    retried = Job.objects.get(jid=jid("A"))
    assert (retried.state, retried.attempt, retried.failures) == ("blocked", 1, 1)


@pytest.mark.parametrize(("names", "taken", "told"), [(("A", "A1", "A2"), 1, (2, 2)), (("A", "A1", "B"), 1, (2, 1))])
def test_a_queue_is_locked_when_all_that_wait_are(node, names, taken, told):
    """Check the counts of waiting and locked jobs (L29)."""
    one = node()
    one.push(*names)
    one.fetch(count=1)
    state = locks.locket_state("default", using="default")
    assert (state.waiting, state.locked) == told
    assert state.is_locked is (told[0] == told[1])


def test_an_empty_queue_is_not_locked(node):
    """Check the state of a queue without jobs (L29)."""
    node()
    assert not locks.locket_state("default", using="default").is_locked


# --- order


def test_priority_and_age_decide_among_those_of_one_key(node):
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


def test_a_paused_queue_does_not_hold_up_the_key_elsewhere(node):
    one = node()
    one.push("A", queue="q1")
    one.push("A1", "A2", queue="q2")
    one.broker.pause(["q1"])
    assert one.fetch("q1", "q2") == [jid("A1")]
    one.ack("A1")
    assert one.fetch("q1", "q2") == [jid("A2")]


# --- a job leaves while it waits


@pytest.mark.parametrize("change", [transitions.kill, transitions.discard], ids=["kill", "discard"])
def test_the_next_is_ready_when_the_first_is_taken_away(node, change):
    one = node()
    one.push("A", "A1", "A2")
    assert change([Job.objects.get(jid=jid("A")).pk], using="default") == 1
    assert one.fetch() == [jid("A1")]


def test_the_next_is_ready_when_the_first_expires(node):
    one = node()
    one.push("A", custom={"expires_in": 1})
    one.push("A1")
    Job.objects.filter(jid=jid("A")).update(expires_at=datetime.now(UTC) - SECOND)
    assert due.expire(using="default") == 1
    assert one.fetch() == [jid("A1")]


def test_dead_twins_run_again_by_hand_one_after_the_other(node):
    one = node()
    one.push("A", "A1", "A2")
    ids = list(Job.objects.values_list("pk", flat=True))
    transitions.kill(ids, using="default")
    assert transitions.requeue(ids, using="default") == 3
    assert one.fetch(count=3) == [jid("A")]
    one.ack("A")
    assert one.fetch(count=3) == [jid("A1")]


def test_a_flush_forgets_locks(node):
    one = node()
    one.push("A", "A1")
    one.fetch()
    one.broker.flush()
    assert (Job.objects.count(), holders()) == (0, [])
    one.push("A2")
    assert one.fetch() == [jid("A2")]


def test_a_job_given_back_is_first_again(node):
    one = node()
    one.push("A", "A1")
    job = one.reserve()
    assert one.broker.release([job]) == 1
    assert holders() == []
    assert one.fetch() == [jid("A")]


# --- locks requested by the job


def test_a_client_asks_for_a_lock_by_custom(plain):
    plain.push("A", "B", custom={"lock": "shared"})
    plain.push("C", custom={"lock": True})
    plain.push("C1", custom={"lock": True})
    assert plain.fetch(count=5) == [jid("A"), jid("C")]


@pytest.mark.parametrize("wrong", ["", 7, [], {}, "a\0b"])
def test_a_wish_that_is_no_key_is_refused(plain, wrong):
    with pytest.raises(Exception, match=r"custom\.lock: expected a key"):
        payload(jid="A", custom={"lock": wrong})


def test_a_job_can_say_that_it_takes_no_part(node):
    one = node()
    one.push("A", "A1", custom={"lock": False})
    assert one.fetch(count=2) == [jid("A"), jid("A1")]


def test_the_readme_s_name_is_the_same():
    from django_faktory.core.locket import unique_queues

    assert unique_queues(["a"]) == locket(["a"])
