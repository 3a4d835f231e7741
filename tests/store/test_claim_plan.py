"""How PostgreSQL carries out the claim: it must not read the table, whatever waits in it (ADR 0009)."""

import json

import pytest
from django.db import connection

from django_faktory.models import Job
from django_faktory.store.dialects.postgresql import CLAIM
from tests.factories import JobFactory

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the plan is PostgreSQL's"),
]


def scans(plan):
    """(kind, index) of each scan of the table of jobs."""
    found = [(plan["Node Type"], plan.get("Index Name"))] if plan.get("Relation Name") == Job._meta.db_table else []
    return found + [scan for part in plan.get("Plans", ()) for scan in scans(part)]


def test_a_claim_beside_a_large_backlog_looks_up_only_what_it_takes():
    Job.objects.bulk_create(JobFactory.build_batch(3000, queue="other"), batch_size=1000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_faktory_job")
        cursor.execute("SET plan_cache_mode = force_generic_plan")
        cursor.execute(f"PREPARE looked_at ({', '.join(CLAIM.types)}) AS {CLAIM.sql}")
        cursor.execute("EXPLAIN (FORMAT JSON) EXECUTE looked_at ('{default}', '{1}', 'w', 1, NULL)")
        told = cursor.fetchone()[0]
        cursor.execute("DEALLOCATE looked_at; RESET plan_cache_mode")
    plan = json.loads(told)[0]["Plan"] if isinstance(told, str) else told[0]["Plan"]
    assert set(scans(plan)) == {
        ("ModifyTable", None),
        ("Index Scan", "faktory_ready"),
        ("Index Scan", "django_faktory_job_pkey"),
    }
