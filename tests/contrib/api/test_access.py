"""Refusals of the API other than missing permissions, which tests/security/test_permission_matrix.py checks."""

import pytest
from django.db import OperationalError
from django.test import Client

from django_faktory import models
from django_faktory.core.queries import Query
from django_faktory.models.permissions import PUBLIC_QUERY_FIELDS
from tests.security.matrix.rows import plant

pytestmark = [pytest.mark.once, pytest.mark.django_db]


@pytest.fixture
def rows(db):
    """Store one row of each kind."""
    plant()


def test_anonymous_requests_are_answered_with_a_problem(api, rows):
    answer = api("GET", "jobs/")
    assert (answer.status, answer.headers["Content-Type"]) == (403, "application/problem+json")
    assert set(answer.data) == {"type", "title", "status", "detail", "instance"}


@pytest.mark.parametrize("path", ["jobs/", "queues/default/", "statistics/"])
def test_an_unsupported_method_returns_405(as_root, rows, path):
    answer = as_root("PUT", path, {})
    assert (answer.status, answer.data["title"]) == (405, "Method not allowed")


def test_a_session_without_a_csrf_token_changes_nothing(rows, root):
    """A cross-site request carries the session cookie, but not the CSRF token."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(root)
    answer = client.post("/api/queues/default/pause/", "{}", content_type="application/json")
    assert answer.status_code == 403
    assert not models.Queue.objects.paused().exists()


TERMS = {
    "states": "dead",
    "queues": "queue:mail",
    "tasks": "task:shop.send",
    "errors": "error:Timeout",
    "about": "about:shop.order/42",
    "batches": "batch:b-1",
    "jids": "jid:job-dead",
    "older": "older:1d",
    "newer": "newer:1d",
    "failed_before": "failed_before:1d",
    "failed_after": "failed_after:1d",
    "args": "args:[1]",
    "texts": "text:x",
    "messages": "message:x",
    "words": "word:x",
    "among": "dead among:10",
}
"""A query with each field."""


@pytest.mark.parametrize("field", Query.__struct_fields__)
def test_without_view_job_jobs_are_selected_by_public_fields_only(api, rows, user, field):
    answer = api("POST", "jobs/bulk/discard/", {"query": TERMS[field]}, by=user("discard_job"))
    if field in PUBLIC_QUERY_FIELDS:
        assert answer.status == 200
    else:
        key = TERMS[field].partition(":")[0]
        detail = f"query: queries with these keys require the permission to view jobs: {key}:"
        assert (answer.status, answer.data["detail"]) == (403, detail)


def test_an_inactive_user_is_refused(api, user):
    locked_out = user("view_job", is_active=False)
    assert api("GET", "jobs/", by=locked_out).status == 403


def test_reads_and_writes_have_separate_rate_limits(api, rows, user, settings):
    settings.FAKTORY = {"API_READS": "2/minute", "API_WRITES": "1/minute"}
    operator = user("view_queue", "pause_queue")
    assert [api("GET", "queues/", by=operator).status for _ in range(3)] == [200, 200, 429]
    assert [api("POST", "queues/default/pause/", {}).status for _ in range(2)] == [200, 429]
    answer = api("GET", "queues/")
    assert (answer.data["type"], int(answer.headers["Retry-After"]) > 0) == (
        "urn:django-faktory:problem:too-many",
        True,
    )
    assert api("GET", "queues/", by=user("view_queue")).status == 200


def test_an_empty_rate_setting_means_no_rate_limit(api, rows, user, settings):
    settings.FAKTORY = {"API_READS": ""}
    viewer = user("view_queue")
    assert {api("GET", "queues/", by=viewer).status for _ in range(5)} == {200}


def test_the_api_returns_501_if_jobs_are_stored_on_a_remote_server(as_root, settings):
    settings.FAKTORY = {"BROKER": "remote"}
    answer = as_root("GET", "jobs/")
    assert (answer.status, answer.data["type"]) == (501, "urn:django-faktory:problem:jobs-elsewhere")


def test_a_database_error_returns_503_without_the_driver_message(as_root, monkeypatch):
    def unavailable(*_, **__):
        raise OperationalError('connection to "10.0.0.7" failed: password authentication failed for user "secret"')

    monkeypatch.setattr("django_faktory.contrib.api.queues.queue_sizes.read", unavailable)
    answer = as_root("GET", "queues/")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert b"secret" not in answer.text
    assert b"10.0.0.7" not in answer.text
