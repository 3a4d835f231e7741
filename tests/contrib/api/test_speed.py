"""Lists take as many statements for thirty rows as for one, count no table, and use an index."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.models import Batch, Job, Limit, WorkerProcess
from django_faktory.models.cron import CronRun
from tests.factories import T0, CronFactory, JobFactory, LockFactory, QueueFactory, WorkerFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


def make(count):
    """Add `count` rows of each kind."""
    for number in range(Job.objects.count(), Job.objects.count() + count):
        job = JobFactory(working=True, wid=f"wid{number:03}", queue=f"queue{number:03}", bid="root", errtype="E")
        JobFactory(queue=f"queue{number:03}")
        QueueFactory(name=f"queue{number:03}")
        WorkerFactory(wid=f"wid{number:03}")
        Batch.objects.create(bid=f"b{number:03}", parent_bid="root", depth=1)
        CronRun.objects.create(entry=CronFactory(), tick=T0, jid=job.jid, outcome="enqueued")
        Limit.objects.create(scope="task", name=f"task{number:03}", concurrency=1)
        LockFactory(jid=job.jid, wid=job.wid)


LISTS = [
    "jobs/",
    "jobs/?query=working error:E",
    "queues/",
    "workers/",
    "batches/",
    "batches/root/members/",
    "batches/root/children/",
    "batches/root/tree/",
    "cron/",
    "limits/",
    "locks/",
    "statistics/",
]


def test_thirty_rows_take_as_many_statements_as_one(as_root):
    Batch.objects.create(bid="root", children=1)
    make(1)
    with_one = {path: statements(as_root, path) for path in LISTS}
    make(29)
    for path, (first, one) in with_one.items():
        rest, thirty = statements(as_root, path)
        assert len(thirty) == len(one), (path, thirty)
        assert size(rest) >= 30 * min(size(first), 1), path


def size(answer):
    found = answer.data.get("results", answer.data.get("batches"))
    return len(found) if isinstance(found, list) else 0


def statements(ask, path):
    ask("GET", path)  # caches content types and the user's session
    with CaptureQueriesContext(connection) as caught:
        answer = ask("GET", path)
    assert answer.status == 200
    return answer, [query["sql"] for query in caught]


@pytest.mark.parametrize("path", LISTS)
def test_a_list_runs_no_unbounded_count(as_root, path):
    Batch.objects.create(bid="root", children=1)
    make(2)
    _, queries = statements(as_root, path)
    # Worker processes and unfinished batches are counted: they are few.
    counts = [sql for sql in queries if "COUNT(" in sql.upper() and "wid" not in sql and "finished_at" not in sql]
    unbounded = [sql for sql in counts if "LIMIT" not in sql]
    assert unbounded == []


PLANS = [
    ("jobs/", "django_faktory_job", "id"),
    ("jobs/?state=dead&error=E", "django_faktory_job", "faktory_failed"),
    ("jobs/?about=shop.order/1", "django_faktory_job", "faktory_about"),
    ("jobs/?batch=b-1", "django_faktory_job", "faktory_members"),
    ("batches/", "django_faktory_batch", "id"),
    ("batches/?stage=running", "django_faktory_batch", "faktory_batch_live"),
    ("batches/?parent=b-1", "django_faktory_batch", "faktory_children"),
    ("queues/", "django_faktory_queue", "pkey"),
    ("workers/", "django_faktory_workerprocess", "pkey"),
    ("cron/", "django_faktory_cronentry", "name"),
    ("limits/", "django_faktory_limit", "id"),
    ("locks/", "django_faktory_joblock", "id"),
]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="its plans are PostgreSQL's")
@pytest.mark.parametrize(("path", "table", "index"), PLANS, ids=[path for path, _, _ in PLANS])
def test_a_list_query_uses_an_index(as_root, path, table, index):
    """PostgreSQL would scan a small table, so sequential scans are switched off."""
    make(3)
    _, queries = statements(as_root, path)
    [sql] = [one for one in queries if one.startswith("SELECT") and f'FROM "{table}"' in one and "ORDER BY" in one][-1:]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {sql}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Seq Scan" not in plan, plan
    assert index in plan or "pkey" in plan, plan


def test_live_workers_are_listed_with_their_jobs(as_root):
    """Runs on each database, because sizes, latencies and holders are our own SQL."""
    make(2)
    WorkerProcess.objects.filter(wid="wid000").update(seen_at=T0)
    assert [one["jobs"] for one in as_root("GET", "workers/").data["results"]] == [1, 1]
    assert [(one["size"], one["latency_s"] > 0) for one in as_root("GET", "queues/").data["results"]] == [(1, True)] * 2
