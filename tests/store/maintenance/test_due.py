"""Jobs that fall due: the cost of a look at them, the order of their enqueueing, and two nodes. Rules: W13, W18."""

import threading
from datetime import timedelta

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from django_faktory.core.lifecycle import FINISHED, KEPT, State
from django_faktory.core.payloads import FetchRequest
from django_faktory.models import History, Job
from django_faktory.store.dialects.partitions import DAY
from django_faktory.store.jobs import claims
from django_faktory.store.maintenance import due
from django_faktory.store.maintenance.pending_work import find_pending_work
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory

IN_HISTORY = "purge_at_idx" if connection.vendor == "postgresql" else "faktory_history_purge"
"""The index of a partition has a name of its own."""

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"


def waiting(count, run_at, state="scheduled"):
    return Job.objects.bulk_create(JobFactory.many(count, **{state: True}, run_at=run_at))


def test_the_next_due_time_is_the_earliest_of_scheduled_and_retries():
    assert find_pending_work(using=USING, now=T0).due_in_s is None
    waiting(1, T0 + timedelta(seconds=90))
    assert find_pending_work(using=USING, now=T0).due_in_s == 90
    waiting(1, T0 + timedelta(seconds=30), "retries")
    assert find_pending_work(using=USING, now=T0).due_in_s == 30
    waiting(1, T0 - timedelta(seconds=5))
    assert find_pending_work(using=USING, now=T0).due_in_s == -5


def test_the_database_clock_decides_which_jobs_are_due():
    waiting(1, timezone.now() + timedelta(minutes=1))
    assert 50 < find_pending_work(using=USING).due_in_s <= 61
    assert due.enqueue_due(Store(USING)) == set()


def test_the_earliest_due_jobs_are_enqueued_first_up_to_the_limit():
    last, first = waiting(1, T0 + timedelta(seconds=9)) + waiting(1, T0 + timedelta(seconds=1))
    due.enqueue_due(Store(USING, now=T0 + timedelta(minutes=1)), limit=1)
    assert dict(Job.objects.values_list("jid", "state")) == {last.jid: "scheduled", first.jid: "enqueued"}


def test_the_enqueue_limit_covers_scheduled_and_retries_together():
    waiting(3, T0)
    waiting(3, T0, "retries")
    due.enqueue_due(Store(USING, now=T0), limit=4)
    assert Job.objects.filter(state="enqueued").count() == 4
    due.enqueue_due(Store(USING, now=T0), limit=4)
    assert Job.objects.filter(state="enqueued").count() == 6


def test_a_second_node_enqueues_due_jobs_not_locked_by_the_first():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time: the second waits for the first")
    waiting(30, T0)
    waiting(30, T0, "retries")
    seen = []

    def second():
        due.enqueue_due(Store(USING, now=T0))
        seen.append(Job.objects.filter(state="enqueued").count())
        connections.close_all()

    with transaction.atomic():
        due.enqueue_due(Store(USING, now=T0), limit=20)
        node = threading.Thread(target=second)
        node.start()
        node.join(30)
        assert seen == [40]
    assert Job.objects.filter(state="enqueued").count() == 60


@pytest.mark.parametrize(
    ("jobs", "index"),
    [
        (lambda: Job.objects.in_state(*due.DELAYED).order_by("run_at")[:1], "faktory_due"),
        (lambda: Job.live.in_state(*FINISHED).filter(purge_at__lt=T0).order_by("purge_at")[:9], "faktory_purge"),
        (lambda: History.objects.filter(day__lt=KEPT + DAY, purge_at__lt=T0).order_by("purge_at")[:9], IN_HISTORY),
        (lambda: Job.objects.in_state(State.WORKING).filter(reserved_until__lt=T0), "faktory_reserved"),
    ],
    ids=["due", "dead", "history", "overdue"],
)
def test_polled_jobs_are_read_in_index_order(jobs, index):
    if not connection.features.supports_partial_indexes:
        pytest.skip("the index begins with the state there, and is read once per state")
    waiting(5, T0 + timedelta(hours=1))
    with transaction.atomic(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        plan = jobs().explain()
    assert index in plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan


def test_on_mariadb_only_the_head_of_the_index_is_read():
    if connection.features.supports_partial_indexes:
        pytest.skip("the test above checks its plan")
    waiting(300, T0 + timedelta(hours=1))
    waiting(300, T0 + timedelta(hours=1), "retries")
    with connection.cursor() as cursor:
        cursor.execute("FLUSH STATUS")
        find_pending_work(using=USING)
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        read = sum(int(count) for name, count in cursor.fetchall() if name != "Handler_read_rnd_next")
    assert read < 20


def expiring(count, **fields):
    return Job.objects.bulk_create(JobFactory.many(count, expires_at=T0 - timedelta(seconds=1), **fields))


def has_expired_jobs():
    return find_pending_work(using=USING, now=T0, worker_timeout_s=60).has_expired_jobs


def test_waiting_jobs_expire_but_dead_jobs_do_not():
    expiring(3, dead=True)
    assert has_expired_jobs() is not connection.features.supports_partial_indexes
    assert due.expire(Store(USING, now=T0)) == 0
    assert has_expired_jobs() is False
    assert Job.objects.dead().count() == 3
    expiring(2)
    assert has_expired_jobs() is True
    assert due.expire(Store(USING, now=T0)) == 2
    assert has_expired_jobs() is False


def test_a_running_job_past_its_expiry_expires_only_when_it_waits_again():
    [job] = expiring(1, working=True, reserved_until=timezone.now() + timedelta(hours=1))
    assert has_expired_jobs() is False
    assert due.expire(Store(USING, now=T0)) == 0
    Job.objects.filter(jid=job.jid).update(state="retries", run_at=T0 + timedelta(hours=1))
    assert has_expired_jobs() is True
    assert due.expire(Store(USING, now=T0)) == 1


@pytest.mark.skipif(connection.features.supports_partial_indexes, reason="the index has no dead jobs")
def test_expiries_of_dead_jobs_are_cleared_a_bounded_number_at_a_time():
    expiring(10, dead=True)
    due._clear_expiries(Store(USING, now=T0), chunk_size=3, max_chunks=2)
    assert Job.objects.filter(expires_at__isnull=False).count() == 4
    due.expire(Store(USING, now=T0))
    assert not Job.objects.filter(expires_at__isnull=False).exists()


def test_a_purge_with_nothing_due_locks_no_job_that_waits():
    """Check that a FETCH returns the oldest job during a purge (W13). MariaDB locked that job's row."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("it has no row locks")
    for number in range(3):
        JobFactory(jid=f"waits-{number}", queue="mail")
    JobFactory(succeeded=True, purge_at=T0 + timedelta(days=1))
    seen = []

    def fetch():
        [[job]] = claims.fetch(Store(USING), [FetchRequest(queues=("mail",), wid="w1")])
        seen.append(job.jid)
        connections.close_all()

    with transaction.atomic():
        assert due.purge(Store(USING, now=T0)) == 0
        node = threading.Thread(target=fetch)
        node.start()
        node.join(30)
    assert seen == ["waits-0"]


@pytest.mark.skipif(connection.vendor != "mysql", reason="the plan is MariaDB's")
def test_a_purge_follows_the_index_without_sorting():
    for state in ("dead", "succeeded"):
        rows = JobFactory.many(2000, **{state: True}, purge_at=T0 - timedelta(seconds=1))
        Job.objects.bulk_create(rows, batch_size=1000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE django_faktory_job")
        cursor.fetchall()
        cursor.execute("FLUSH STATUS")
        assert due.purge(Store(USING, now=T0)) == due.CHUNK
        cursor.execute("SHOW STATUS WHERE variable_name IN ('Sort_rows', 'Handler_read_next')")
        counted = {name: int(count) for name, count in cursor.fetchall()}
    assert counted["Sort_rows"] == 0
    assert counted["Handler_read_next"] < 3 * due.CHUNK  # the key of the history is (id, day)
