"""Claims begin at a bound: they read no entries of claimed jobs, and find each ready job in its order (ADR 0046).

The nodes of these tests draw bounds with each claim and never read a queue from its beginning again, unless a test says
otherwise: whatever a bound hides would stay hidden.
"""

import random
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction

from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job, MaintenanceTurn
from django_faktory.operations.edit import Changes, edit
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.bounds import MAX_LATE, MAX_PRIORITIES, MAX_QUEUES, Bounds, Drawn
from django_faktory.store.dialects.postgresql.prepared import execute_on
from django_faktory.store.dialects.postgresql.push import push_call
from django_faktory.store.dialects.values import ClaimPlan, ClaimSlot
from django_faktory.store.jobs import failures, releases
from django_faktory.store.jobs.claims import fetch
from django_faktory.store.jobs.exchanges import exchange
from django_faktory.store.jobs.pushes import push
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.maintenance.turns import forget_readings
from django_faktory.store.store import Store
from tests.factories import JobFactory, payload
from tests.held import entries_read, held_snapshot, session
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        "connection.vendor != 'postgresql'", reason="only PostgreSQL keeps entries that claims must pass"
    ),
]

NEVER = (1e9, 1e9)


def node(**options):
    """Return the store of a node."""
    store = Store()
    store.bounds = Bounds(**{"period_s": 0, "slack": timedelta(0), "full_look_s": NEVER, "max_marks": 1} | options)
    return store


def take(store, *queues, count=1, wid="w1"):
    [jobs] = fetch(store, [FetchRequest(queues=queues or ("default",), wid=wid, count=count)])
    return jobs


def jids(jobs):
    return [job.jid for job in jobs]


def push_jobs(store, count, **fields):
    jobs = [payload(**fields) for _ in range(count)]
    assert push(store, jobs) == [None] * count
    return jids(jobs)


def advance(store, **fields):
    """Claim jobs until the bound is later than every job that was pushed before."""
    before = datetime.now(UTC)
    for _ in range(3):
        push_jobs(store, 1, **fields)
        assert take(store, fields.get("queue", "default"), wid="w0")
    bounds = store.bounds.look([fields.get("queue", "default")]).values[2]
    assert datetime.fromisoformat(bounds.rpartition(",")[2].strip('"}')) >= before


def push_in(other, **fields):
    job = payload(**fields)
    execute_on(other, [push_call([(0, job)], None, may_exist=True)])
    return job.jid


def test_entries_of_claimed_jobs_that_a_snapshot_keeps_are_not_read():
    store = node()
    with held_snapshot():
        for _ in range(4):
            push_jobs(store, 500)
            exchange(store, [], [Ack(jid=job.jid, wid=job.wid) for job in take(store, count=500)], [])

        def reads_few():
            # More for one claim after the end of a transaction that was open before, perhaps in another database.
            advance(store)
            push_jobs(store, 1)
            return entries_read("faktory_ready", lambda: take(store)) < 20

        wait_until(reads_few)
        push_jobs(store, 1)
        assert entries_read("faktory_ready", lambda: take(node())) > 2000


def test_jobs_of_other_priorities_are_claimed_in_their_order():
    store = node()
    low = push_jobs(store, 2, priority=1)
    advance(store, priority=5)
    first, second = push_jobs(store, 1, priority=9), push_jobs(store, 1, priority=5)
    assert jids(take(store, count=9)) == first + second + low


def test_a_push_that_commits_late_is_claimed_at_once_while_another_writer_stays_open():
    store, other_node = node(), node()
    with session() as first, session() as second:
        late, later = push_in(first), push_in(second)
        for one in (store, other_node):
            advance(one)
            assert take(one) == []
        first.commit()
        assert jids(take(other_node, count=5)) == [late]
        assert take(store) == []
        for one in (store, other_node):
            advance(one)
        second.commit()
        assert jids(take(store, count=5)) == [later]
        assert take(other_node) == []


def test_a_late_push_is_counted_at_once():
    store = node()
    with session() as other:
        push_in(other)
        advance(store)
        other.commit()
        counted, _ = store.dialect.count_ready(connection, ["default"], 9, [], None, bounds=store.bounds)
        assert counted == {"default": 1}


def test_of_several_late_jobs_each_is_claimed_before_newer_ones():
    store = node()
    with session() as other:
        late = [push_in(other) for _ in range(3)]
        advance(store)
        new = push_jobs(store, 1)
        other.commit()
        assert [take(store)[0].jid for _ in range(4)] == late + new


def test_a_push_that_had_to_wait_for_another_push_of_its_jid_is_claimed():
    store = node()
    job = payload()
    with session() as first:
        execute_on(first, [push_call([(0, job)], None, may_exist=True)])
        waiting = threading.Thread(target=_push_and_close, args=(job,))
        waiting.start()
        wait_until(_is_waiting)
        advance(store)
        first.rollback()
        waiting.join(60)
    assert jids(take(store)) == [job.jid]


def _push_and_close(job):
    push(Store(), [job])
    connection.close()


def _is_waiting():
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM pg_locks WHERE NOT granted")
        return cursor.fetchone()[0]


def test_jobs_of_a_claim_that_is_rolled_back_are_claimed_in_their_order():
    store = node()
    old = push_jobs(store, 3)
    advance(store, queue="other")  # the claim begins later than these jobs, as a late transaction
    with session() as other:
        claimed = dialect_of(other).claim(other, ClaimPlan([ClaimSlot("default", "w2", 2)], 2), None)
        assert jids(claimed) == old[:2]
        assert jids(take(store)) == old[2:]
        for _ in range(3):
            push_jobs(store, 1)
            take(store)
        new = push_jobs(store, 1)
        other.rollback()
        assert jids(take(store, count=9)) == old[:2] + new


def test_a_claim_in_a_transaction_that_is_rolled_back_moves_no_bound():
    store = node()
    advance(store)
    old = push_jobs(store, 3)
    with transaction.atomic():
        for _ in old:
            assert take(store)
        transaction.set_rollback(True)
    assert jids(take(store, count=9)) == old


def test_released_jobs_are_claimed_by_each_node_before_newer_ones():
    store, other_node = node(), node()
    old = push_jobs(store, 2)
    claimed = take(store, count=2)
    for one in (store, other_node):
        advance(one)
    new = push_jobs(store, 1)
    assert releases.release(store, claimed) == 2
    assert [take(other_node)[0].jid, take(store)[0].jid, take(other_node)[0].jid] == old + new


def test_a_job_of_a_lost_worker_is_claimed_before_newer_ones():
    store = node()
    [old] = push_jobs(store, 1)
    take(store)
    advance(store)
    new = push_jobs(store, 1)
    assert failures.reclaim_lost(store, ["w1"]) == 1
    assert jids(take(store, count=9)) == [old, *new]


def test_a_job_that_another_node_hands_the_lock_is_claimed_before_newer_ones():
    store, other_node = node(), node()
    _, waiting = push_jobs(store, 2, custom={"lock": "key"})
    [holder] = take(store)
    for one in (store, other_node):
        advance(one)
    new = push_jobs(store, 1)
    exchange(store, [], [Ack(jid=holder.jid, wid=holder.wid)], [])
    assert jids(take(other_node, count=9)) == [waiting, *new]


def test_a_job_that_gets_a_permit_is_claimed_before_newer_ones():
    definitions.save_limit("task", "limited", Allowance(concurrency=1), using="default")
    store, other_node = node(), node()
    _, waiting = push_jobs(store, 2, jobtype="limited")
    [holder] = take(store, count=2)
    for one in (store, other_node):
        advance(one)
    assert Job.objects.get(jid=waiting).state == "blocked"
    exchange(store, [], [Ack(jid=holder.jid, wid=holder.wid)], [])
    assert jids(take(other_node, count=9)) == [waiting]


def test_a_job_that_a_sweep_unblocks_is_claimed():
    limit = definitions.save_limit("task", "limited", Allowance(concurrency=1), using="default")
    store = node()
    _, waiting = push_jobs(store, 2, jobtype="limited")
    assert len(take(store, count=2)) == 1
    advance(store)
    definitions.remove(limit, using="default")
    limiters.sweep(using="default")
    assert jids(take(store, count=9)) == [waiting]


@pytest.mark.parametrize("change", [{"priority": 2}, {"queue": "other"}], ids=str)
def test_a_job_with_another_priority_or_queue_is_claimed(change):
    store, other_node = node(), node()
    queue = change.get("queue", "default")
    low = payload(priority=1)
    assert push(store, [low]) == [None]
    for one in (store, other_node):
        advance(one, priority=2, queue=queue)
    edit(low.jid, Changes(**change), using="default")
    assert jids(take(other_node, queue)) == [low.jid]


def test_a_job_that_a_user_inserts_at_an_old_place_is_found_by_the_next_reading_from_the_beginning():
    now = [0.0]
    store = node(clock=lambda: now[0], full_look_s=(1.0, 10.0))
    advance(store)
    straggler = JobFactory(enqueued_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert take(store) == []
    assert take(store) == []
    now[0] += 1.1
    assert jids(take(store)) == [straggler.jid]


def test_a_queue_whose_reading_takes_long_is_read_from_its_beginning_less_often():
    now = [0.0]
    bounds = Bounds(clock=lambda: now[0], takes_turns=False)
    for _ in range(2):
        look = bounds.look(["q"])
        now[0] += 0.05
        bounds.conclude(look, [("q", 0)], [])
    assert len(look.full) == 1
    now[0] += 4.9
    assert not bounds.look(["q"]).full
    now[0] += 0.2
    assert bounds.look(["q"]).full
    assert not bounds.look(["q"]).full, "another reading has begun"


def test_one_node_reads_a_queue_from_its_beginning_every_10_s_if_that_takes_long():
    now = [0.0]

    def straggler():
        now[0] += 60
        return JobFactory(enqueued_at=datetime(2020, 1, 1, tzinfo=UTC)).jid

    def slow_node():
        one = node(clock=lambda: now[0], full_look_s=(1.0, 10.0))
        advance(one)
        while one.bounds.look(["default"]).late:  # when it ends, the next claim reads from the beginning
            advance(one)
        now[0] += 60
        look = one.bounds.look(["default"])
        now[0] += 1
        one.bounds.conclude(look, [], [])
        return one

    nodes = [slow_node(), slow_node()]
    first = straggler()
    assert [jids(take(one)) for one in nodes * 2] == [[], [], [first], []]
    nodes[0] = slow_node()
    second = straggler()
    assert [jids(take(one)) for one in nodes * 2] == [[]] * 4, "another turn began less than 10 s ago"
    MaintenanceTurn.objects.update(next_at=datetime.now(UTC))
    now[0] += 60
    assert [jids(take(one)) for one in reversed(nodes * 2)] == [[], [], [second], []]
    forget_readings(using="default")
    assert MaintenanceTurn.objects.count() == 1
    MaintenanceTurn.objects.update(next_at=datetime.now(UTC) - timedelta(days=2))
    forget_readings(using="default")
    assert MaintenanceTurn.objects.count() == 0


@pytest.mark.parametrize("seed", range(8))
def test_the_order_stays_that_of_the_whole_queue_whatever_happens_at_once(seed):
    Random(seed).run(120)


class Random:
    """Two nodes and three other sessions do random things; each claim is compared with a reading of the whole queue."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.nodes = [node(), node()]
        self.claimed = []

    def run(self, steps):
        with session() as first, session() as second, session() as third:
            self.others = [first, second, third]
            for _ in range(steps):
                self.rng.choices(
                    [self.push, self.push_elsewhere, self.claim_elsewhere, self.end_elsewhere, self.claim, self.release,
                     self.end, self.edit],
                    [3, 3, 1, 3, 6, 1, 1, 1],
                )[0]()  # fmt: skip
            for other in self.others:
                other.rollback()
            for store in self.nodes:
                self.claim(store, count=500)

    def fields(self):
        return {"priority": self.rng.choice([1, 5, 9]), "queue": self.rng.choice(["a", "b"])}

    def push(self):
        push_jobs(self.rng.choice(self.nodes), self.rng.randint(1, 3), **self.fields())

    def push_elsewhere(self):
        push_in(self.rng.choice(self.others), **self.fields())

    def claim_elsewhere(self):
        other = self.rng.choice(self.others)
        dialect_of(other).claim(other, ClaimPlan([ClaimSlot(self.rng.choice("ab"), "w2", 2)], 2), None)

    def end_elsewhere(self):
        other = self.rng.choice(self.others)
        self.rng.choice([other.commit, other.rollback])()

    def claim(self, store=None, count=None):
        store, count = store or self.rng.choice(self.nodes), count or self.rng.randint(1, 4)
        queues = self.rng.choice([("a",), ("b",), ("a", "b"), ("b", "a")])
        expected = []
        with transaction.atomic():
            for queue in queues:
                rows = Job.objects.enqueued().filter(queue=queue).order_by("sort_priority", "enqueued_at", "id")
                expected += rows.select_for_update(skip_locked=True).values_list("jid", flat=True)
            transaction.set_rollback(True)
        claimed = take(store, *queues, count=count)
        assert jids(claimed) == expected[:count]
        self.claimed += claimed

    def one_claimed(self):
        return [self.claimed.pop(self.rng.randrange(len(self.claimed)))] if self.claimed else []

    def release(self):
        releases.release(self.rng.choice(self.nodes), self.one_claimed())

    def end(self):
        acks = [Ack(jid=job.jid, wid=job.wid, attempt=job.attempt) for job in self.one_claimed()]
        exchange(self.rng.choice(self.nodes), [], acks, [])

    def edit(self):
        with transaction.atomic():
            ready = list(Job.objects.enqueued().select_for_update(skip_locked=True).values_list("jid", flat=True)[:5])
            for jid in ready[:1]:
                edit(jid, Changes(**self.fields()), using="default")


def drawn(*ranks, queue="q", seen="1:1:", xid=10, first_at=None):
    now = datetime.now(UTC)
    return [Drawn(queue, rank, first_at, seen, xid, now) for rank in ranks]


def test_priorities_and_queues_above_the_maximum_get_no_bound():
    bounds = Bounds()
    bounds.conclude(bounds.look([]), [("q", rank) for rank in range(50)], [])
    assert len(bounds.look(["q"]).values[0]) == MAX_PRIORITIES + 1
    bounds.conclude(bounds.look([]), [(f"q{number}", 0) for number in range(MAX_QUEUES + 5)], [])
    assert [len(bounds.look([name]).values[0]) for name in ("q", "q9", f"q{MAX_QUEUES}")] == [1, 2, 2]


def test_no_bound_is_drawn_beside_too_many_late_transactions():
    bounds = Bounds(period_s=0, full_look_s=NEVER)
    bounds.conclude(bounds.look(["q"]), [("q", 0)], [])
    bounds.conclude(bounds.look(["q"]), [], drawn(0, xid=1000))
    many = ",".join(map(str, range(1, MAX_LATE + 2)))
    bounds.conclude(bounds.look(["q"]), [], drawn(0, seen=f"1:1001:{many}", xid=1001))
    assert bounds.look(["q"]).values[2] == "{-infinity,-infinity}"
    bounds.conclude(bounds.look(["q"]), [], drawn(0, seen="1:1002:1,2", xid=1002))
    look = bounds.look(["q"])
    assert look.values[2] != "{-infinity,-infinity}"
    assert set(look.late["q"]) == {1, 2}


def test_a_bound_stays_behind_the_newest_transaction_with_the_fewest_late_ones():
    now, began = [0.0], datetime(2026, 1, 1, tzinfo=UTC)
    bounds = Bounds(period_s=0.1, slack=timedelta(0), full_look_s=NEVER, clock=lambda: now[0])
    bounds.conclude(bounds.look(["q"]), [("q", 0)], [])

    def bound(second, open_xids="", xmax=1000):
        now[0] = second
        at = began + timedelta(seconds=second)
        row = Drawn("q", 0, None, f"1:{xmax}:{open_xids}", int(100 * second), at)
        bounds.conclude(bounds.look(["q"]), [], [row])
        text = bounds.look(["q"]).values[2].rpartition(",")[2].strip('"}')
        return text if text == "-infinity" else (datetime.fromisoformat(text) - began).total_seconds()

    assert bound(1) == "-infinity"
    assert bound(2) == 1
    assert bound(3, "350") == 2, "an open transaction that began later is not late"
    assert bound(4, "150,350") == 1
    assert bound(5, "50,350") == 3, "one that is late for each of them makes no difference"
    assert bound(6) == 5
    assert bound(7, xmax=400) == 3, "the snapshot does not list open transactions from xmax on"
