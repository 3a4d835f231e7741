"""Statements that only the SQLite dialect has."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.models import Job
from django_faktory.store.dialects.job_columns import PLAIN, UNKEYED
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.factories import payload
from tests.settings import KIND

pytestmark = [pytest.mark.skipif(KIND != "sqlite", reason="about SQLite"), pytest.mark.django_db]


@pytest.mark.parametrize(("custom", "columns"), [({}, PLAIN), ({"expires_in": 60}, UNKEYED)])
def test_a_large_push_is_split_at_the_parameter_limit(custom, columns):
    most = connection.features.max_query_params // columns
    many = [payload(custom=custom) for _ in range(2 * most)] + [payload()]
    with CaptureQueriesContext(connection) as queries:
        pushes.push(Store(), many)
    assert sum(query["sql"].startswith("INSERT") for query in queries) == 3
    assert list(Job.objects.order_by("enqueued_at", "id").values_list("jid", flat=True)) == [job.jid for job in many]
