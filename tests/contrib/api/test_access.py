"""Permissions of each endpoint, for five users.

The users: anonymous, with all permissions but the endpoint's, with that permission only, with view permissions only,
and the superuser.
"""

import json

import pytest
from django.contrib.admin.models import LogEntry
from django.core import serializers
from django.db import OperationalError
from django.test import Client

from django_faktory import models
from django_faktory.contrib.api.urls import RESOURCES
from django_faktory.core.queries import Query
from django_faktory.models import Batch, JobLock, Limit
from django_faktory.models.cron import CronEntry
from django_faktory.models.permissions import PUBLIC_QUERY_FIELDS
from tests.factories import T0, JobFactory, QueueFactory, WorkerFactory
from tests.project.tasks import add

pytestmark = pytest.mark.django_db

CRON = {"name": "new", "schedule": "* * * * *", "zone": "UTC", "jobtype": add.jobtype, "args": [1, 2]}
ENDPOINTS = [
    ("GET", "jobs/", None, "view_job"),
    ("POST", "jobs/", {"task": add.jobtype, "args": [1, 2]}, "add_job"),
    ("GET", "jobs/job-dead/", None, "view_job"),
    ("PATCH", "jobs/job-dead/", {"queue": "low"}, "change_job"),
    ("POST", "jobs/job-dead/retry/", {}, "retry_job"),
    ("POST", "jobs/job-dead/requeue/", {}, "requeue_job"),
    ("POST", "jobs/job-dead/kill/", {}, "kill_job"),
    ("POST", "jobs/job-dead/discard/", {}, "discard_job"),
    ("POST", "jobs/job-dead/prune/", {}, "prune_job"),
    ("POST", "jobs/job-ready/cancel/", {}, "cancel_job"),
    ("POST", "jobs/bulk/retry/", {"query": "dead"}, "retry_job"),
    ("POST", "jobs/bulk/requeue/", {"query": "dead"}, "requeue_job"),
    ("POST", "jobs/bulk/cancel/", {"query": "enqueued"}, "cancel_job"),
    ("POST", "jobs/bulk/kill/", {"query": "dead"}, "kill_job"),
    ("POST", "jobs/bulk/discard/", {"query": "dead"}, "discard_job"),
    ("POST", "jobs/bulk/prune/", {"query": "dead"}, "prune_job"),
    ("GET", "queues/", None, "view_queue"),
    ("GET", "queues/default/", None, "view_queue"),
    ("POST", "queues/default/pause/", {}, "pause_queue"),
    ("POST", "queues/default/resume/", {}, "resume_queue"),
    ("POST", "queues/default/clear/", {}, "clear_queue"),
    ("GET", "workers/", None, "view_workerprocess"),
    ("GET", "workers/w1/", None, "view_workerprocess"),
    ("POST", "workers/w1/quiet/", {}, "quiet_workerprocess"),
    ("POST", "workers/w1/terminate/", {}, "terminate_workerprocess"),
    ("GET", "batches/", None, "view_batch"),
    ("GET", "batches/b-1/", None, "view_batch"),
    ("GET", "batches/b-1/members/", None, "view_job"),
    ("GET", "batches/b-1/children/", None, "view_batch"),
    ("GET", "batches/b-1/tree/", None, "view_batch"),
    ("POST", "batches/b-1/retry/", {}, "retry_batch"),
    ("GET", "cron/", None, "view_cronentry"),
    ("POST", "cron/", CRON, "add_cronentry"),
    ("GET", "cron/nightly/", None, "view_cronentry"),
    ("PATCH", "cron/nightly/", {"schedule": "1 2 * * *"}, "change_cronentry"),
    ("DELETE", "cron/nightly/", None, "delete_cronentry"),
    ("POST", "cron/nightly/pause/", {}, "pause_cronentry"),
    ("POST", "cron/nightly/resume/", {}, "resume_cronentry"),
    ("POST", "cron/nightly/run/", {}, "run_cronentry"),
    ("GET", "locks/", None, "view_joblock"),
    ("GET", "locks/1/", None, "view_joblock"),
    ("POST", "locks/1/release/", {}, "release_joblock"),
    ("GET", "limits/", None, "view_limit"),
    ("POST", "limits/", {"scope": "task", "name": "other", "concurrency": 2}, "add_limit"),
    ("POST", "limits/pause/", {"tasks": ["other"]}, "pause_limit"),
    ("POST", "limits/resume/", {"tasks": ["noop"]}, "resume_limit"),
    ("GET", "limits/900/", None, "view_limit"),
    ("PUT", "limits/900/", {"concurrency": 3}, "change_limit"),
    ("DELETE", "limits/900/", None, "delete_limit"),
    ("GET", "statistics/", None, "view_statistics"),
    ("GET", "alarms/", None, "view_statistics"),
]
VIEWS = (
    "view_job",
    "view_queue",
    "view_workerprocess",
    "view_batch",
    "view_cronentry",
    "view_joblock",
    "view_limit",
    "view_statistics",
)
IDS = [f"{method} {path}" for method, path, _, _ in ENDPOINTS]


@pytest.fixture
def rows(db):
    """Store one row of each kind, under the names that ENDPOINTS uses."""
    JobFactory(jid="job-dead", dead=True, jobtype=add.jobtype)
    JobFactory(jid="job-ready")
    QueueFactory(name="default")
    WorkerFactory(wid="w1")
    Batch.objects.create(bid="b-1")
    CronEntry.objects.create(
        name="nightly", schedule="0 2 * * *", zone="UTC", jobtype=add.jobtype, args="[1,2]", next_at=T0
    )
    lock = {"jid": "job-ready", "attempt": 1, "wid": "w1", "lease": T0 - T0, "acquired_at": T0, "expires_at": T0}
    JobLock.objects.create(pk=1, key="k", **lock)
    Limit.objects.create(pk=900, scope="task", name="noop", concurrency=1, paused_at=T0)


def stored():
    """Return all rows of this app."""
    tables = [
        CronEntry,
        models.CronRun,
        models.Job,
        models.Queue,
        models.WorkerProcess,
        Batch,
        JobLock,
        Limit,
        LogEntry,
    ]
    return json.loads(serializers.serialize("json", [row for table in tables for row in table.objects.order_by("pk")]))


def test_every_endpoint_is_in_the_permission_matrix(as_root):
    """ENDPOINTS lists each operation of the OpenAPI document; a new action without a line there fails this test."""
    paths = as_root("GET", "schema/", format="json").data["paths"]
    described = {
        (method.upper(), path) for path, methods in paths.items() for method in methods if method != "parameters"
    }
    assert len(described) == len(ENDPOINTS)
    assert {path.split("/")[1] for _, path in described} == set(RESOURCES)


@pytest.mark.parametrize(("method", "path", "body", "_"), ENDPOINTS, ids=IDS)
def test_anonymous_requests_are_refused_and_change_nothing(api, rows, method, path, body, _):
    before = stored()
    answer = api(method, path, body)
    assert (answer.status, answer.headers["Content-Type"]) == (403, "application/problem+json")
    assert set(answer.data) == {"type", "title", "status", "detail", "instance"}
    assert stored() == before


@pytest.mark.parametrize("path", ["", "schema/", "no-such-thing/"])
def test_anonymous_requests_cannot_list_resources(api, path):
    assert api("GET", path).status in (403, 404)


@pytest.mark.parametrize(("method", "path", "body", "permission"), ENDPOINTS, ids=IDS)
def test_a_user_with_every_other_permission_is_refused(api, rows, user, method, path, body, permission):
    others = {one for _, _, _, one in ENDPOINTS} - {permission}
    before = stored()
    answer = api(method, path, body, by=user(*others, is_staff=True))
    assert answer.status == 403
    assert stored() == before


@pytest.mark.parametrize(("method", "path", "body", "permission"), ENDPOINTS, ids=IDS)
def test_a_user_with_only_the_required_permission_is_accepted(api, rows, user, method, path, body, permission):
    answer = api(method, path, body, by=user(permission))
    assert answer.status in (200, 201, 204), answer.data
    assert LogEntry.objects.count() == (method != "GET"), "each change adds a log entry"


@pytest.mark.parametrize(("method", "path", "body", "permission"), ENDPOINTS, ids=IDS)
def test_a_user_with_view_permissions_can_only_read(api, rows, user, method, path, body, permission):
    before = stored()
    answer = api(method, path, body, by=user(*VIEWS))
    assert answer.status == (200 if method == "GET" else 403)
    assert stored() == before


def test_a_superuser_can_read_everything_and_reading_changes_nothing(as_root, rows):
    before = stored()
    for method, path, _, _ in ENDPOINTS:
        for asked in {"GET", "HEAD", "OPTIONS"} if method == "GET" else {"OPTIONS"}:
            assert as_root(asked, path).status == 200, (asked, path)
        if method != "GET":
            assert as_root("GET", path).status in (200, 405), path
    assert stored() == before


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

    monkeypatch.setattr("django_faktory.contrib.api.queues.store_queues.read_waiting", unavailable)
    answer = as_root("GET", "queues/")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert b"secret" not in answer.text
    assert b"10.0.0.7" not in answer.text
