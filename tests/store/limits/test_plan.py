"""The PostgreSQL plans for parked jobs: they are found by their limiter, and a claim reads none of them (ADR 0016)."""

import pytest
from django.db import connection

from django_faktory.models import Job
from django_faktory.store.dialects.postgresql.jobs import CLAIM
from django_faktory.store.dialects.postgresql.limits import ACQUIRE_PERMITS, END_WITH_PERMITS
from tests.factories import JobFactory
from tests.store.jobs.test_claim_plan import plan, scans, unexpected

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the plan is PostgreSQL's"),
]


TRAITS = {"blocked": {"state": "blocked", "limiter": 1}, "working": {"working": True, "permits": ",1,"}}


def explained(sql, values):
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_faktory_job")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", values)
        [explanation] = cursor.fetchone()
    return explanation[0]["Plan"]


def read(node):
    """Return the number of job rows that a plan read."""
    own = node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0)
    is_scan = node.get("Relation Name") == Job._meta.db_table and "Scan" in node["Node Type"]
    return (own if is_scan else 0) + sum(read(part) for part in node.get("Plans", ()))


def test_a_claim_reads_no_blocked_jobs():
    Job.objects.bulk_create(JobFactory.many(3000, state="blocked", limiter=1), batch_size=1000)
    free = JobFactory()
    assert ("Index Scan", "faktory_ready") in scans(plan(CLAIM, "'{default}', '{1}', 'w', 1, NULL, 1, NULL, 60"))
    sql = CLAIM.sql
    for place, value in (
        ("$1", "'{default}'::text[]"),
        ("$2", "'{1}'::int[]"),
        ("$3", "'w'"),
        ("$4", "1"),
        ("$5", "NULL"),
        ("$6", "1"),
        ("$7", "NULL"),
        ("$8", "60"),
    ):
        sql = sql.replace(place, value)
    executed_plan = explained(sql, None)
    assert read(executed_plan) <= 4
    free.refresh_from_db()
    assert free.state == "working"


PASSING = {"pass": (ACQUIRE_PERMITS, "'[]', NULL"), "end": (END_WITH_PERMITS, "NULL, '[]', 0")}


@pytest.mark.parametrize("state", ["blocked", "working"])
def test_limiter_statements_find_their_jobs_by_index(state):
    Job.objects.bulk_create(JobFactory.many(3000, **TRAITS[state]), batch_size=1000)
    assert unexpected(PASSING, {"Index Scan", "Index Only Scan", "Bitmap Heap Scan", "LockRows"}) == {}


IN_ORDER = "ORDER BY sort_priority, enqueued_at, id"


UNBLOCKING = {
    "let go": (
        f"SELECT id, state FROM {{}} WHERE limiter = %s AND queue = %s {IN_ORDER} LIMIT 3 FOR UPDATE",
        [7, "default"],
    ),
    "next queue": ("SELECT queue FROM {} WHERE limiter = %s AND queue > %s ORDER BY queue LIMIT 1", [7, ""]),
    "next limiter": ("SELECT limiter FROM {} WHERE limiter > %s ORDER BY limiter LIMIT 1", [0]),
}


def test_unblocking_reads_only_the_jobs_it_unblocks():
    for limiter in (7, 8):
        Job.objects.bulk_create(JobFactory.many(2000, state="blocked", limiter=limiter), batch_size=1000)
    rows_read = {
        name: read(explained(sql.format(Job._meta.db_table), values)) for name, (sql, values) in UNBLOCKING.items()
    }
    assert {name: count for name, count in rows_read.items() if count > 6} == {}
