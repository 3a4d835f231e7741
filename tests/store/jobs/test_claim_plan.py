"""The PostgreSQL plan of a claim: it must not scan the table, however large the backlog is (ADR 0009)."""

import json

import pytest
from django.db import connection, transaction

from django_faktory.models import Job
from django_faktory.store.dialects.postgresql.failures import FAILING, SAVE
from django_faktory.store.dialects.postgresql.locks import READY
from django_faktory.store.dialects.postgresql.reservations import CONFIRM, EXTEND
from tests.factories import JobFactory

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the plan is PostgreSQL's"),
]


def scans(plan):
    """Return (kind, index) of each scan of the job table."""
    found = [(plan["Node Type"], plan.get("Index Name"))] if plan.get("Relation Name") == Job._meta.db_table else []
    return found + [scan for part in plan.get("Plans", ()) for scan in scans(part)]


def plan(statement, values):
    """Return the generic plan of a prepared statement, the one PostgreSQL uses after some runs."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("ANALYZE django_faktory_job")
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute(f"PREPARE looked_at ({', '.join(statement.types)}) AS {statement.sql}")
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE looked_at ({values})")
        explanation = cursor.fetchone()[0]
        cursor.execute("DEALLOCATE looked_at")
    return (json.loads(explanation) if isinstance(explanation, str) else explanation)[0]["Plan"]


def kinds_of_scans(statements):
    """Return the kinds of scans of the job table in the plans of these statements, by their names."""
    return {
        name: {kind for kind, _ in scans(plan(*statement))} - {"ModifyTable"} for name, statement in statements.items()
    }


def unexpected(statements, allowed):
    """Return the kinds that are not allowed, for statements that have such a scan."""
    return {name: kinds - allowed for name, kinds in kinds_of_scans(statements).items() if kinds - allowed}


def test_failure_statements_do_not_scan_the_job_table():
    Job.objects.bulk_create(JobFactory.many(3000), batch_size=1000)
    statements = {
        "read": (FAILING, "'{some,others}'"),
        "write": (SAVE, f"'{{1,2}}'{', NULL' * (len(SAVE.types) - 1)}"),
    }
    assert unexpected(statements, {"Index Scan", "Bitmap Heap Scan"}) == {}


LOCKING = {
    "ready": (READY, "'{hot}'"),
}


@pytest.mark.parametrize("state", ["blocked", "enqueued"])
def test_lock_key_statements_do_not_scan_the_job_table(state):
    Job.objects.bulk_create(JobFactory.many(3000, state=state, lock_key="other"), batch_size=1000)
    assert unexpected(LOCKING, {"Index Scan", "Index Only Scan", "Bitmap Heap Scan", "LockRows"}) == {}


def test_extend_and_confirm_statements_do_not_scan_all_running_jobs():
    """The planner must not walk the partial index of running jobs, of which there are many."""
    Job.objects.bulk_create(JobFactory.many(3000, working=True, claim=-7), batch_size=1000)
    for statement, values in (
        (EXTEND, "'{some,others}', '{1,1}', '{w,w}', 120, NULL"),
        (CONFIRM, "'{some,others}', '{1,1}', '{w,w}', '{1,1}', NULL"),
    ):
        found = scans(plan(statement, values))
        assert {kind for kind, _ in found} <= {"ModifyTable", "Index Scan", "Bitmap Heap Scan", "LockRows"}
        assert "faktory_reserved" not in {index for _, index in found}
