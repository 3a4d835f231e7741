"""The PostgreSQL plans for parked jobs: they are found by their limiter, and a claim reads none of them (ADR 0016)."""

import pytest
from django.db import connection

from django_faktory.models import Job
from tests.factories import JobFactory

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the plan is PostgreSQL's"),
]


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
