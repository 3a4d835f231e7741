"""Batches while the programs that create, commit and settle them are killed at random: servers, workers, producers.

Each task writes its row in the transaction that ends it, so the rows count how often a task ran to its end.
"""

import itertools
import json
import os
import random
import signal
import threading
from collections import Counter
from datetime import timedelta

import pytest
from django.db.models import Sum
from django.utils import timezone

from django_faktory import Batch
from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Batch as Row
from django_faktory.models import Job
from django_faktory.store.batches import batches
from django_faktory.store.transactions import run
from tests.project.models import Mark
from tests.runtime.processes.test_nodes import kill
from tests.soak.tasks import completes, member, succeeds
from tests.soak.test_kill import forget_connections, forked
from tests.soak.test_nodes import WIDS, Consumer, Roamer
from tests.store import by_ids
from tests.waiting import wait_until

KILLS = int(os.environ.get("FAKTORY_SOAK_KILLS", "2"))
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + 30 * KILLS)]
CALLBACKS = {
    "complete": {"jobtype": "tests.soak.tasks.completes"},
    "success": {"jobtype": "tests.soak.tasks.succeeds"},
}
TASKS = {"environment": {"FAKTORY_TEST_APPS": "tests.soak"}, "WORKER_TIMEOUT": 8}


class WireProducer(Roamer):
    """Create batches with a child over the wire, some for tasks and some for consumers of `a`.

    Each command is repeated until it is answered. A NEW without an answer leaves a batch that is never committed.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.committed = []
        self._count = itertools.count()

    def live(self):
        queue = random.choice(["default", "a"])
        parent = self.new(queue)
        child = self.new(queue, parent_bid=parent)
        for bid, count in ((parent, 4), (child, 2)):
            for _ in range(count):
                self.push(bid, queue)
        for bid in (child, parent):
            assert self.insist(f"BATCH COMMIT {bid}") == b"+OK"
            self.committed.append(bid)

    def new(self, queue, **more):
        return self.insist("BATCH NEW " + json.dumps({"description": queue} | CALLBACKS | more)).decode()

    def push(self, bid, queue):
        number = next(self._count)
        job = {"jid": f"wire-{self.number}-{number:06d}", "queue": queue, "custom": {"bid": bid}}
        job |= {"jobtype": "tests.soak.tasks.member", "args": [f"{self.number}-{number}", number % 9 == 0]}
        self.insist("PUSH " + json.dumps(job))


def produce_until_killed():
    """Run a producer process: a tree of batches with a row of its own in each transaction."""
    forget_connections()
    for number in itertools.count():
        wait_until(lambda: Job.objects.filter(state="enqueued").count() < 40, 600)
        with Batch(description="default", complete=completes, success=succeeds) as parent:
            Mark.objects.create(text=f"made {parent.bid}")
            member.enqueue_many([(f"{os.getpid()}-{number}-{one}", one == 1) for one in range(3)])
            with Batch(description="default", success=succeeds):
                member.enqueue(f"{os.getpid()}-{number}-child")


class Fleet:
    """The programs to kill. Each is restarted at once."""

    def __init__(self, runfaktory, address):
        self._run, self._address = runfaktory, address
        self.programs = []
        self.nodes = [self._node(), self._node()]
        self.workers = [self._worker(), self._worker()]
        self.addresses = [at for at, _ in self.nodes]
        self.producer = forked(produce_until_killed)

    def _node(self):
        program = self._started("127.0.0.1:0", "--server-only", "--no-reload")
        return self._address(program), program

    def _worker(self):
        return self._started("--worker-only", "--processes", "1", "--concurrency", "3", "--no-reload")

    def _started(self, *args):
        self.programs.append(self._run(*args, **TASKS))
        return self.programs[-1]

    def kill_one_of_each(self):
        place = random.randrange(2)
        kill(self.nodes[place])
        kill((None, self.workers[place]))
        self.stop_producer()
        self.nodes[place], self.workers[place] = self._node(), self._worker()
        self.addresses[place] = self.nodes[place][0]
        self.producer = forked(produce_until_killed)

    def stop_producer(self):
        os.kill(self.producer.pid, signal.SIGKILL)
        self.producer.join(60)


def forget_losses():
    """Reset the losses, so that no job becomes a poison pill. Skip locked rows until the next call: no deadlock."""

    def forget(_):
        lost = Job.objects.filter(losses__gt=0).order_by("id").select_for_update(skip_locked=True)
        return Job.objects.filter(pk__in=list(lost.values_list("pk", flat=True))).update(losses=0)

    run("default", forget)


def is_all_done():
    """Return True if all jobs succeeded, after each call has requeued failed jobs.

    Resets losses, so that no job ends as a poison pill. Jobs claimed for a reply that a killed node did not deliver are
    released with their worker, and run again.
    """
    OrmBroker("default").lost(WIDS)
    forget_losses()
    failed = Job.objects.filter(state__in=["dead", "retries"]).values_list("pk", flat=True)
    by_ids.requeue(list(failed), using="default")
    return not Job.objects.exclude(state="succeeded").exists()


def test_batches_call_back_once_and_lose_no_member_while_programs_are_killed(runfaktory, address):
    fleet = Fleet(runfaktory, address)
    producers = [WireProducer(fleet.addresses, number) for number in range(2)]
    consumers = [Consumer(fleet.addresses, number) for number in range(2)]
    try:
        for client in (*producers, *consumers):
            client.start()
        for _ in range(KILLS):
            ended = Row.objects.filter(finished_at__isnull=False).count()
            wait_until(lambda ended=ended: Row.objects.filter(finished_at__isnull=False).count() > ended + 3, 150)
            threading.Event().wait(random.uniform(0, 0.3))
            fleet.kill_one_of_each()
            forget_losses()
    finally:
        fleet.stop_producer()
        for producer in producers:
            producer.enough.set()
            producer.join(60)
    wait_until(is_all_done, 180, every_s=0.5)
    for consumer in consumers:
        consumer.enough.set()
        consumer.join(60)
    assert [one.error for one in (*producers, *consumers)] == [None] * 4
    assert sum(len(one.committed) for one in producers) > KILLS
    all_is_as_it_must_be(fleet, {bid for one in producers for bid in one.committed})


def all_is_as_it_must_be(fleet, committed):
    assert batches.sweep(using="default") == 0
    assert [line for one in fleet.programs for line in one.lines if "overdue steps of batches" in line] == []
    forgotten = Row.objects.filter(committed_at=None)
    assert set(forgotten.values_list("bid", flat=True)).isdisjoint(committed)
    batches.expire(using="default", now=timezone.now() + timedelta(hours=1))
    wait_until(is_all_done, 60, every_s=0.5)  # a parent may call back now, because its forgotten child is given up
    rows = {row.bid: row for row in Row.objects.all()}
    assert committed <= rows.keys()
    assert [str(row) for row in rows.values() if not row.is_over] == []
    counted = {(row.pending, row.unrun, row.failed, row.open_children) for row in rows.values()}
    assert counted == {(0, 0, 0, 0)}
    marks = Counter(Mark.objects.values_list("text", flat=True))
    expected = Counter(
        f"{kind} {row.bid}"
        for row in rows.values()
        for kind in ("complete", "success")
        if row.is_committed and getattr(row, kind) and not (kind == "success" and row.is_broken)
    )
    assert Counter({text: marks[text] for text in marks if text.startswith(("complete", "success"))}) == expected
    by_python = {bid for bid, row in rows.items() if row.is_committed and not row.parent_bid} - committed
    assert {text.split()[1] for text in marks if text.startswith("made")} == by_python, (
        "a batch and its row, or neither"
    )
    ran = sum(times for text, times in marks.items() if text.startswith("member"))
    assert ran == Row.objects.exclude(description="a").aggregate(all=Sum("total"))["all"]
