"""The lookup of the ready jobs of keys on PostgreSQL: it must not walk over the jobs of other keys (ADR 0015)."""

import pytest
from django.db import connection

from django_faktory.models import Job
from django_faktory.store.dialects.postgresql.dialect import FIND_READY
from tests.factories import JobFactory

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the plan is PostgreSQL's"),
]


@pytest.mark.parametrize("state", ["blocked", "enqueued"])
def test_the_ready_jobs_of_a_key_are_found_by_the_index_of_keys(state):
    Job.objects.bulk_create(JobFactory.many(3000, state=state, lock_key="other"), batch_size=1000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_faktory_job")
        cursor.execute(f"EXPLAIN {FIND_READY}", [["hot"]])
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "faktory_by_lock_key" in plan
    assert "faktory_ready" not in plan
    assert "Seq Scan on django_faktory_job" not in plan
