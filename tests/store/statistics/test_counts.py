"""The counts of INFO and metrics: one statement, or portions of one snapshot if sets are large (W22)."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_faktory.models import Batch, Counter, Job, Queue
from django_faktory.store import queues
from django_faktory.store.statistics import counts as statistics
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, WorkerFactory

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
SMALL = statistics.CountLimits(at_once=4, queues=2, portion=3)


def fill():
    """Create more rows of each kind than a statement counts; several jobs differ only in id."""
    now = timezone.now()
    for number in range(7):
        QueueFactory(name=f"q{number}", paused_at=now if number == 3 else None)
    for queue, count in {"q0": 11, "q5": 2, "unlisted": 6}.items():
        Job.objects.bulk_create(JobFactory.many(count, queue=queue, enqueued_at=now - timedelta(seconds=count)))
    JobFactory(queue="q0", enqueued_at=now - timedelta(hours=1), sort_priority=5)
    Job.objects.bulk_create(JobFactory.many(9, queue="q5", blocked=True, enqueued_at=now - timedelta(seconds=40)))
    for state, count in {"scheduled": 8, "retries": 6, "working": 7, "dead": 13, "succeeded": 5}.items():
        Job.objects.bulk_create(JobFactory.many(count, **{state: True}))
    for number in range(9):
        Batch.objects.create(bid=f"b{number}", committed_at=None if number < 4 else now)
    Batch.objects.filter(bid="b8").update(finished_at=now)
    Batch.objects.filter(bid="b7").update(reopened_until=now)
    WorkerFactory(wid="w1", beat_at=now)
    WorkerFactory(wid="w2", state="quiet", beat_at=now)
    Counter.objects.create(day=now.date(), slot=-1, processed=10, failed=3, late=1)
    Counter.objects.create(day=now.date(), slot=77, processed=5, failed=1, late=0)


def comparable(counts):
    return (counts.queues, counts.paused, counts.sets, counts.workers, counts.batches, counts.totals)


def reading(caught):
    """Return the statements that read tables; BEGIN and COMMIT read none."""
    return [query["sql"] for query in caught if "django_faktory_" in query["sql"]]


def test_portions_count_the_same_as_one_statement():
    fill()
    with CaptureQueriesContext(connection) as caught:
        whole = statistics.read_exact_counts(using=USING)
    assert len(reading(caught)) == 1
    assert comparable(whole) == (
        {"q0": 12, "q1": 0, "q2": 0, "q3": 0, "q4": 0, "q5": 11, "q6": 0, "unlisted": 6},
        {"q3"},
        {"blocked": 9, "dead": 13, "retries": 6, "scheduled": 8, "working": 7},
        {"running": 1, "quiet": 1, "terminate": 0},
        {"open": 5, "committed": 3},
        {"processed": 15, "failed": 4, "late": 1},
    )
    assert whole.is_complete
    assert (
        statistics.read_exact_counts(using=USING, sizes=statistics.CountLimits(at_once=13, queues=8, portion=1)).queues
        == whole.queues
    )
    with CaptureQueriesContext(connection) as caught:
        portions = statistics.read_exact_counts(using=USING, sizes=SMALL)
    assert len(caught) > 20
    assert comparable(portions) == comparable(whole)
    assert portions.is_complete
    ages = {"q0": 3600, "q5": 40, "unlisted": 6}
    assert portions.waiting.keys() == ages.keys()
    assert all(0 <= portions.waiting[name].latency_s - age + 1 < 300 for name, age in ages.items())


def test_all_portions_read_the_same_snapshot(monkeypatch):
    fill()
    before = comparable(statistics.read_exact_counts(using=USING))
    further = statistics._count_further_rows

    def further_while_jobs_move(*args):
        """Another connection commits between two portions."""
        run_elsewhere(lambda: Job.objects.filter(state="dead").update(state="enqueued", queue="a", enqueued_at=moment))
        return further(*args)

    moment = timezone.now()
    monkeypatch.setattr(statistics, "_count_further_rows", further_while_jobs_move)
    assert comparable(statistics.read_exact_counts(using=USING, sizes=SMALL)) == before


def run_elsewhere(work):
    def and_close():
        try:
            return work()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(and_close).result(60)


def test_a_snapshot_ends_its_transaction_even_after_an_error(monkeypatch):
    fill()
    statistics.read_exact_counts(using=USING, sizes=SMALL)
    Queue.objects.create(name="new")

    def fails(*_):
        raise ValueError("meanwhile")

    monkeypatch.setattr(statistics, "_count_further_rows", fails)
    with pytest.raises(ValueError, match="meanwhile"):
        statistics.read_exact_counts(using=USING, sizes=SMALL)
    Queue.objects.create(name="newer")  # neither refused nor lost
    assert run_elsewhere(lambda: Queue.objects.filter(name__startswith="new").count()) == 2


@pytest.mark.slow
def test_twenty_thousand_queues_are_counted_in_one_statement():
    """Measured: 20,000 queues with a job each are read in 0.05 to 0.08 s."""
    Queue.objects.bulk_create([Queue(name=f"q{number:05}") for number in range(20_000)], batch_size=1000)
    rows = JobFactory.many(500, enqueued_at=timezone.now() - timedelta(seconds=5))
    for number, row in enumerate(rows):
        row.queue = f"q{40 * number:05}"
    Job.objects.bulk_create(rows, batch_size=500)
    with CaptureQueriesContext(connection) as caught:
        found = statistics.read_exact_counts(using=USING)
    assert len(reading(caught)) == 1
    assert (len(found.queues), sum(found.queues.values()), len(found.waiting)) == (20_000, 500, 500)


def test_latencies_of_a_thousand_queues_are_read_in_one_statement():
    now = timezone.now()
    Job.objects.bulk_create(JobFactory.many(20, queue="q7", enqueued_at=now - timedelta(seconds=30)))
    JobFactory(queue="q7", sort_priority=9, enqueued_at=now - timedelta(hours=1))
    JobFactory(queue="q8", blocked=True, enqueued_at=now - timedelta(minutes=10))
    names = [f"q{number}" for number in range(1000)]
    with CaptureQueriesContext(connection) as caught:
        found = queues.latency(Store(USING), names)
    assert len(reading(caught)) == 1
    assert list(found) == names
    assert {name: round(age, -1) for name, age in found.items() if age} == {"q7": 3600, "q8": 600}


def test_requests_that_are_wrapped_in_transactions_share_a_result(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with transaction.atomic(), CaptureQueriesContext(connection) as caught:
        assert statistics.shared_bounded_counts(using=USING) is statistics.shared_bounded_counts(using=USING)
    assert sum("COUNT(" in query["sql"] for query in caught) == 1


def test_counts_read_in_a_transaction_include_its_own_changes():
    assert statistics.shared_counts(using=USING).queues == {}
    with transaction.atomic():
        QueueFactory(name="mine")
        assert statistics.shared_counts(using=USING).queues == {"mine": 0}
        transaction.set_rollback(True)
    assert statistics.shared_counts(using=USING).queues == {}
