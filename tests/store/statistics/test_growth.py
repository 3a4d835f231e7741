"""Costs that must not grow with the stored jobs: purge. Source: ADR 0009."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.core.lifecycle import FINISHED
from django_faktory.models import Job
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from django_faktory.store.transactions import run
from tests.factories import T0, JobFactory

pytestmark = pytest.mark.django_db(transaction=True)

USING = "default"
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="the plans are PostgreSQL's")


def plans(call):
    """Return the PostgreSQL plans of the queries of `call`, as text."""
    with CaptureQueriesContext(connection) as captured:
        call()
    with connection.cursor() as cursor:
        lines = []
        for query in captured:
            if query["sql"].startswith(("SELECT", "(SELECT", "DELETE")):
                cursor.execute("EXPLAIN " + query["sql"].replace("%", "%%"))
                lines += [line for (line,) in cursor.fetchall()]
    return "\n".join(lines)


@pytest.fixture
def backlog():
    """Create enough rows for the planner to avoid a full scan."""
    Job.objects.bulk_create(JobFactory.many(3000), batch_size=1000)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_faktory_job")


def test_a_purge_deletes_the_oldest_jobs_up_to_its_limit():
    rows = [JobFactory.build(dead=True, purge_at=T0 - timedelta(hours=age)) for age in range(7)]
    Job.objects.bulk_create(rows)
    assert due.purge(Store(USING, now=T0), limit=4) == 4
    assert set(Job.objects.values_list("jid", flat=True)) == {row.jid for row in rows[:3]}


def test_a_purge_is_three_looks_and_two_statements_in_one_transaction(django_assert_max_num_queries):
    more = 0 if connection.features.supports_partial_indexes else len(FINISHED)  # a look at each finished state
    Job.objects.bulk_create(JobFactory.build_batch(20, dead=True, purge_at=T0 - timedelta(seconds=5)))
    run(USING, lambda _: None)  # resets the lock timeout that an earlier test may have left in this session
    with django_assert_max_num_queries(7 + more):
        assert due.purge(Store(USING, now=T0)) == 20


@on_postgresql
def test_a_purge_finds_its_jobs_by_index_without_a_table_scan(backlog):
    Job.objects.bulk_create(JobFactory.build_batch(20, dead=True, purge_at=T0 - timedelta(seconds=5)))
    explanation = plans(lambda: due.purge(Store(USING, now=T0)))
    assert "faktory_purge" in explanation
    assert "Seq Scan on django_faktory_job" not in explanation
