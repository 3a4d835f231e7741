"""Limit the jobs of a queue, task or key that run at a time. Blocked jobs do not delay others."""

import threading

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.models import Job, Limiter
from django_faktory.store.jobs import claims
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import payload
from tests.settings import VIA
from tests.store import by_ids
from tests.store.limits.conftest import at_once, blocked, counts_are_true, in_use, jid, limit, short, states
from tests.waiting import wait_until


@pytest.mark.parametrize(("scope", "name"), [("task", "noop"), ("queue", "default"), ("key", "mail")])
def test_a_fetch_claims_no_more_jobs_than_the_limit(node, scope, name):
    limit(scope, name, 2)
    node.push("a", "b", "c", custom={"limit": "mail"})
    assert node.fetch(5) == ["a", "b"]
    assert node.fetch(5, wid="w2") == []
    assert in_use(name) == 2


@pytest.mark.parametrize(("scope", "name"), [("task", "noop"), ("queue", "default"), ("key", "mail")])
@pytest.mark.parametrize("end", ["ack", "fail"])
def test_a_finished_job_releases_its_permit_to_the_next(node, scope, name, end):
    limit(scope, name, 2)
    node.push("a", "b", "c", "d", custom={"limit": "mail"})
    node.fetch(2)
    assert node.fetch(2) == []
    getattr(node, end)("b")
    assert node.fetch(2) == ["c"]
    assert in_use(name) == 2
    node.ack("a", "c")
    assert node.fetch(2) == ["d"]
    node.ack("d")
    assert in_use(name) == 0
    counts_are_true()


def test_the_second_fetch_gets_past_2999_blocked_jobs(node):
    limit("task", "noop", 1)
    node.push(*map(str, range(1, 3001)))
    node.push("x", jobtype="other")
    assert node.fetch() == ["1"]
    assert node.fetch() == ["x"]
    assert blocked() == 2999


def test_limited_jobs_start_in_order_of_priority_and_age(node):
    limit("task", "noop", 1)
    node.push("a")
    node.push("b", "c")
    node.push("high", priority=50)
    assert node.fetch() == ["high"]
    order = []
    for before in ("high", "a", "b"):
        assert node.fetch() == []
        node.ack(before)
        [next_one] = node.fetch()
        order.append(next_one)
    assert order == ["a", "b", "c"]


def test_a_later_job_with_a_higher_priority_starts_next(node):
    limit("task", "noop", 1)
    node.push("a", "b", "c")
    node.fetch()
    node.fetch()
    node.push("high", priority=50)
    assert node.fetch() == []
    node.ack("a")
    assert node.fetch() == ["high"]


def test_jobs_of_one_task_in_two_queues_share_its_limit(node):
    limit("task", "noop", 1)
    node.push("a")
    node.push("b", queue="other")
    assert node.fetch(2, queues=("default", "other")) == ["a"]
    assert node.fetch(2, queues=("other",)) == []
    node.ack("a")
    assert node.fetch(2, queues=("other",)) == ["b"]


def test_an_unserved_queue_does_not_block_other_queues_of_a_limiter(node):
    limit("task", "noop", 1)
    node.push("a", queue="served")
    node.push("u", "v", queue="unserved")
    node.push("b", "c", queue="served")
    assert node.fetch(queues=("served",)) == ["a"]
    assert node.fetch(5, queues=("served", "unserved"), wid="w2") == []
    for before, after in (("a", "b"), ("b", "c")):
        node.ack(before)
        assert node.fetch(queues=("served",)) == [after]


def test_a_job_acquires_permits_of_all_its_limits_or_none(node):
    limit("task", "noop", 1)
    limit("queue", "default", 2)
    limit("key", "mail", 5)
    node.push("a", "b", custom={"limit": "mail"})
    node.push("x", "y", jobtype="other")
    assert node.fetch(5) == ["a", "x"]
    assert [in_use("noop"), in_use("default"), in_use("mail")] == [1, 2, 1]
    node.ack("a", "x")
    assert node.fetch(5) == ["b", "y"]
    node.ack("b", "y")
    assert [in_use("noop"), in_use("default"), in_use("mail")] == [0, 0, 0]


def test_each_key_with_a_limited_prefix_has_its_own_permits(node):
    limit("key", "customer", 1)
    node.push("a", "b", custom={"limit": "customer:1"})
    node.push("c", custom={"limit": "customer:2"})
    node.push("d", custom={"limit": "stranger"})
    assert node.fetch(5) == ["a", "c", "d"]
    assert in_use("customer:1") == 1


def test_the_own_limit_of_a_key_overrides_its_prefix_limit(node):
    limit("key", "customer", 1)
    limit("key", "customer:1", 2)
    node.push("a", "b", "c", custom={"limit": "customer:1"})
    assert node.fetch(5) == ["a", "b"]


def test_jobs_over_a_queue_limit_stay_enqueued(node):
    limit("queue", "default", 1)
    node.push("a", "b")
    assert node.fetch(5) == ["a"]
    assert states("b") == ["enqueued"]
    assert Job.objects.get(jid=jid("b")).claims == 0


def test_blocking_a_job_counts_no_attempt_and_keeps_its_unique_key(node):
    limit("task", "noop", 1)
    node.push("a")
    node.broker.push([payload(jid="b", custom={"unique_for": 100, "unique_until": "start"})])
    assert node.fetch(2) == ["a"]
    row = Job.objects.get(jid=jid("b"))
    assert (row.claims, row.wid, row.started_at, row.reserved_until) == (0, "", None, None)
    assert row.unique_key is not None, "it has not begun"
    node.ack("a")
    node.fetch(2)
    assert Job.objects.get(jid=jid("b")).unique_key is None


def test_limits_of_other_jobs_add_no_statements_to_a_claim(node):
    node.push("a", "b")

    def statements():
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert len(node.fetch()) == 1
        return sum("PREPARE" not in one["sql"] for one in queries)

    without = statements()
    limit("task", "another", 1)
    limit("queue", "another", 1)
    assert statements() == without


def test_fetch_and_ack_of_40_limited_jobs_cost_the_statements_of_one(node):
    limit("task", "noop", 100)

    def statements(count):
        node.push(*(f"{count}-{number}" for number in range(count)))
        with CaptureQueriesContext(connection) as claimed:
            found = node.reserve(count)
        with CaptureQueriesContext(connection) as ended:
            node.broker.ack([Ack(jid=job.jid, wid="w1") for job in found])
        assert len(found) == count
        return [sum("PREPARE" not in one["sql"] for one in some) for some in (claimed, ended)]

    statements(1)  # statements that a connection sends once
    assert statements(1) == statements(40)


def test_a_fetch_does_not_update_blocked_jobs(node):
    limit("task", "noop", 1)
    node.push(*map(str, range(300)))
    node.fetch(2)
    assert blocked() == 299
    with CaptureQueriesContext(connection) as queries:
        assert node.fetch(5) == []
    assert not any("UPDATE" in one["sql"] and "blocked" in one["sql"] for one in queries)


def test_a_fetch_claims_no_job_of_a_queue_whose_limiter_is_paused(node):
    """A limiter is paused until its running jobs are counted: a claimed job would get no permit and be put back."""
    limit("queue", "default", 1)
    node.push("a")
    Limiter.objects.filter(scope="queue").update(is_paused=True)
    with CaptureQueriesContext(connection) as queries:
        assert node.fetch() == []
    assert len([one["sql"] for one in queries if "PREPARE" not in one["sql"]]) <= 4
    Limiter.objects.update(is_paused=False)
    assert node.fetch() == ["a"]


def test_waiting_fetches_are_notified_when_the_running_jobs_of_a_queue_are_counted(node, monkeypatch):
    """Claims skip the queue until then, so no other event wakes them."""
    limit("queue", "default", 1)
    Limiter.objects.filter(scope="queue").update(is_paused=True)
    node.push("a")
    notified = []
    monkeypatch.setattr(locks, "notify_ready", lambda _, queues: notified.extend(queues))
    limit("queue", "default", 1)
    assert notified == ["default"]
    assert node.fetch() == ["a"]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no rows")
def test_a_job_whose_row_is_locked_when_a_permit_is_released_becomes_ready_after_that(node):
    """No other job runs whose end could make it ready later, and MariaDB frees the locks of a commit one by one."""
    limit("task", "noop", 1)
    node.push("a", "b")
    assert node.fetch(2) == ["a"]
    assert states("b") == ["blocked"]
    is_locked, may_end = threading.Event(), threading.Event()

    def work(number):
        if number == 0:
            with transaction.atomic():
                assert len(Job.objects.select_for_update().filter(jid=jid("b"))) == 1
                is_locked.set()
                may_end.wait(60)
        else:
            is_locked.wait(60)
            threading.Thread(target=end_the_lock).start()
            assert node.ack("a") == [True]

    def end_the_lock():
        wait_until(lambda: states("a") == ["gone"])
        connection.close()
        may_end.set()

    at_once(2, work)
    assert states("a", "b") == ["gone", "enqueued"]
    assert node.fetch() == ["b"]
    counts_are_true()


def test_twenty_workers_never_exceed_a_limit_of_five(node):
    limit("task", "noop", 5)
    total = 50
    node.push(*map(str, range(total)))
    inside, most, done, guard = set(), [], [], threading.Lock()

    def work(number):
        wid, misses = f"w{number}", 0
        while misses < 400 and len(done) < total:
            if VIA == "pool":
                connection.close()  # returned to the pool: it has fewer connections than there are threads
            found = node.reserve(wid=wid)
            if not found:
                misses += 1
                threading.Event().wait(0.02)
                continue
            with guard:
                inside.add(found[0].jid)
                most.append(len(inside))
            running = Job.objects.filter(state="working").exclude(permits="").count()
            with guard:
                most.append(running)
                inside.discard(found[0].jid)
            assert node.broker.ack([Ack(jid=found[0].jid, wid=wid)]) == [True]
            with guard:
                done.append(found[0].jid)

    at_once(20, work)
    assert len(done) == len(set(done)) == total
    assert max(most) <= 5
    assert in_use("noop") == 0
    counts_are_true()


def test_one_fetch_for_many_workers_respects_the_limit(node):
    limit("task", "noop", 3)
    node.push(*map(str, range(10)))
    found = node.broker.fetch([FetchRequest(queues=("default",), wid=f"w{number}", count=2) for number in range(5)])
    assert sum(map(len, found)) == 3


def test_a_job_postponed_for_newer_workers_releases_its_permit(node):
    limit("queue", "default", 1)
    node.push("a", "b")
    assert node.fetch() == ["a"]
    later = failure(jid=jid("a"), wid="w1", errtype="UnknownJobType", verdict="later", retry_in_s=60)
    assert node.broker.fail([later]) == [True]
    assert states("a") == ["scheduled"]
    assert node.fetch() == ["b"]
    counts_are_true()


def test_a_released_job_releases_its_permit(node):
    limit("task", "noop", 1)
    node.push("a", "b")
    [job] = node.reserve()
    assert node.broker.release([job]) == 1
    assert in_use("noop") == 0
    assert node.fetch() == ["a"]


@pytest.mark.parametrize("change", ["kill", "discard", "expire"])
def test_removing_an_unblocked_job_unblocks_the_next(node, change):
    limit("task", "noop", 1)
    node.push("a")
    node.push("b", custom={"expires_in": 1e-6} if change == "expire" else {})
    node.push("c")
    assert node.fetch() == ["a"]
    Job.objects.filter(jid=jid("b")).update(state="blocked", limiter=Limiter.objects.get().pk)
    Limiter.objects.update(is_awaited=True)
    node.fetch()
    node.ack("a")
    assert states("b", "c") == ["enqueued", "blocked"]
    ids = [Job.objects.get(jid=jid("b")).pk]
    if change == "expire":
        assert due.expire(Store()) == 1
    else:
        getattr(by_ids, change)(ids, using="default")
    assert states("c") == ["enqueued"]
    assert node.fetch() == ["c"]


def test_blocked_jobs_can_be_killed_and_requeued(node):
    limit("task", "noop", 1)
    node.push("a", "b")
    node.fetch(2)
    ids = [Job.objects.get(jid=jid("b")).pk]
    assert by_ids.kill(ids, using="default") == 1
    assert by_ids.requeue(ids, using="default") == 1
    assert node.fetch() == []
    node.ack("a")
    assert node.fetch() == ["b"]


def test_removing_a_queue_and_flushing_delete_blocked_jobs_and_permits(node):
    limit("task", "noop", 1)
    node.push("a", "b")
    node.fetch(2)
    node.broker.remove(["default"])
    assert states("a", "b") == ["working", "gone"]
    node.push("c")
    node.broker.flush()
    assert in_use("noop") == 0
    node.push("d")
    assert node.fetch() == ["d"]


def test_a_lock_and_a_limit_apply_together(node):
    limit("task", "noop", 1)
    for name in ("a", "b"):
        node.push(name, custom={"lock": "same"})
    node.push("c", custom={"lock": "other"})
    assert node.fetch(5) == ["a"]
    node.ack("a")
    order = []
    while found := node.fetch(5):
        assert len(found) == 1
        order += found
        node.ack(*found)
    assert sorted(order) == ["b", "c"]
    assert in_use("noop") == 0
    counts_are_true()


def test_a_job_that_loses_its_lock_releases_its_permit(node):
    limit("task", "limited", 5)
    node.push("a", jobtype="limited", custom={"lock": "same"}, queue="one")
    node.push("b", jobtype="limited", custom={"lock": "same"}, queue="two")
    assert node.fetch(queues=("one",)) == ["a"]
    Job.objects.filter(jid=jid("b")).update(state="enqueued")  # the state that a race leaves
    assert node.fetch(queues=("two",)) == []
    assert in_use("limited") == 1
    node.ack("a")
    assert node.fetch(queues=("two",)) == ["b"]
    counts_are_true()


def test_an_edited_job_follows_the_limit_of_its_new_key(node):
    from django_faktory.core.job_parser import parse_job
    from django_faktory.store.jobs import edits

    limit("key", "one", 1)
    node.push("a", "b", custom={"limit": "one"})
    node.fetch(2)
    text = Job.objects.get(jid=jid("b")).payload.replace('"limit":"one"', '"limit":"two"')
    edits.edit(jid("b"), lambda row: edits.Edit(parse_job(text), 0, None), using="default")
    assert node.fetch() == ["b"]


def test_batch_members_respect_the_limit(node):
    from django_faktory.core.payloads import NewBatch

    limit("task", "noop", 1)
    bid = node.broker.new_batch(NewBatch(success=payload(jid="done", jobtype="other")))
    node.push("a", "b", custom={"bid": bid})
    node.broker.commit_batch(bid)
    assert node.fetch(5) == ["a"]
    node.ack("a")
    assert node.fetch(5) == ["b"]
    node.ack("b")
    assert node.fetch(5) == ["done"]
    assert in_use("noop") == 0


def test_claiming_in_an_exchange_respects_the_limit(node):
    limit("task", "noop", 1)
    node.push("a", "b")
    [first] = node.reserve()
    result = node.broker.exchange(
        [payload(jid="c")], [Ack(jid=first.jid, wid="w1")], [FetchRequest(queues=("default",), wid="w1", count=5)]
    )
    assert [short(job.jid) for job in result.fetched[0]] == ["b"]
    assert claims.MAX_ROUNDS > 1
    assert State.BLOCKED in states("c")
