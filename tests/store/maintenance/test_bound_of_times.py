"""Queries for pending work begin at a bound: they pass no entries of ended jobs, and find all work (ADR 0046).

Unless a test says otherwise, no query begins at the beginning of the indexes: what a bound hides stays hidden.
"""

from datetime import UTC, datetime, timedelta

import pytest

from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job
from django_faktory.store.dialects.bounds import Bounds
from django_faktory.store.jobs.claims import fetch
from django_faktory.store.jobs.exchanges import exchange
from django_faktory.store.jobs.pushes import push
from django_faktory.store.maintenance import due
from django_faktory.store.maintenance.pending_work import find_pending_work
from django_faktory.store.store import Store
from tests.factories import JobFactory, payload
from tests.held import entries_read, held_snapshot, session
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="only PostgreSQL keeps entries of ended jobs"),
]

NEVER = (1e9, 1e9)


class Node:
    """Queries of a node, with a bound."""

    def __init__(self, **options):
        self.bounds = Bounds(**{"period_s": 0, "slack": timedelta(0), "full_look_s": NEVER, "max_marks": 1} | options)
        self.find(times=3)

    def find(self, *, times=1):
        for _ in range(times):
            found = find_pending_work(using="default", worker_timeout_s=60, bounds=self.bounds)
        return found

    def bound(self):
        return datetime.fromisoformat(self.bounds.look([""]).values[2].rpartition(",")[2].strip('"}'))


def make_due(other, job):
    """Make a scheduled job due now, in the transaction of another session."""
    with other.cursor() as cursor:
        cursor.execute(
            "UPDATE django_faktory_job SET run_at = CLOCK_TIMESTAMP() FROM pg_current_xact_id() WHERE id = %s", [job.pk]
        )


def test_due_jobs_whose_transactions_commit_late_are_found_by_the_next_query_of_each_node():
    nodes = [Node(), Node()]
    early, late = (JobFactory(scheduled=True, run_at=datetime.now(UTC) + timedelta(hours=1)) for _ in range(2))
    with session() as first, session() as second:
        make_due(first, early)
        make_due(second, late)
        passed_at = datetime.now(UTC)
        for node in nodes:
            assert node.find(times=3).due_in_s > 3000
            assert node.bound() > passed_at
        for other, job in ((first, early), (second, late)):
            other.commit()
            for node in nodes:
                found = node.find()
                assert found.due_in_s < 0
                assert found.due_at == Job.objects.get(pk=job.pk).run_at
            assert due.enqueue_due(Store(), since=found.due_at) == {"default"}
            assert Job.objects.get(pk=job.pk).state == "enqueued"


def test_what_is_over_is_found_until_it_has_been_done():
    node = Node()
    soon = datetime.now(UTC) + timedelta(milliseconds=1)
    overdue = JobFactory(working=True, reserved_until=soon)
    JobFactory(expires_at=soon)
    for _ in range(4):
        found = node.find()
        assert found.has_expired_reservations
        assert found.has_expired_jobs
    Job.objects.filter(pk=overdue.pk).delete()
    assert due.expire(Store()) == 1
    assert not node.find().has_expired_reservations
    assert not node.find().has_expired_jobs


def test_work_that_a_user_inserts_at_an_old_time_is_found_by_the_next_query_from_the_beginning():
    now = [0.0]
    node = Node(clock=lambda: now[0], full_look_s=(1.0, 60.0))
    JobFactory(scheduled=True, run_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert node.find().due_in_s is None
    now[0] += 1.1
    assert node.find().due_in_s < 0


def test_reservations_of_ended_jobs_that_a_snapshot_keeps_are_not_read():
    store, node = Store(), Node()
    with held_snapshot():
        push(store, [payload() for _ in range(1000)])
        [jobs] = fetch(store, [FetchRequest(queues=("default",), wid="w1", count=1000)])
        Job.objects.all().update(reserved_until=datetime.now(UTC))
        exchange(store, [], [Ack(jid=job.jid, wid=job.wid) for job in jobs], [])
        # More for one query after the end of a transaction that was open before, perhaps in another database.
        wait_until(lambda: entries_read("faktory_reserved", node.find) < 20)
        assert entries_read("faktory_reserved", lambda: find_pending_work(using="default", worker_timeout_s=60)) >= 1000
