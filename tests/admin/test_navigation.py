"""The navigation bar: pages that the user may see, numbers of jobs, and the current page."""

import re

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_faktory.models import OutboxEntry
from tests.factories import JobFactory, WorkerFactory, staff_user

pytestmark = [pytest.mark.once, pytest.mark.django_db]


def entries(client, name, *args):
    """Return label, number and whether it is the current page, of each link of the bar on a page."""
    page = client.get(reverse(f"admin:django_faktory_{name}", args=args))
    return [(one.label, one.number, one.is_current) for one in page.context["faktory_nav"]]


def test_the_bar_shows_failed_and_waiting_jobs_and_workers(admin_client):
    JobFactory.create_batch(2, dead=True)
    JobFactory(retries=True)
    JobFactory.create_batch(4)
    WorkerFactory()
    numbers = {label: number for label, number, _ in entries(admin_client, "overview_changelist")}
    assert (numbers["Errors"], numbers["Queues"], numbers["Workers"], numbers["Jobs"]) == ("3", "4", "1", "")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("overview_changelist", "Overview"), ("tasks", "Tasks"), ("job_changelist", "Jobs"), ("job_errors", "Errors"),
        ("queue_changelist", "Queues"), ("limit_add", "Limits"), ("cronentry_changelist", "Cron"),
    ],
)  # fmt: skip
def test_the_bar_marks_the_current_page(admin_client, name, label):
    assert [one for one, _, is_current in entries(admin_client, name) if is_current] == [label]


def test_each_page_of_a_row_has_the_bar(admin_client):
    job = JobFactory(dead=True)
    for name in ("job_change", "job_history", "job_edit"):
        assert [one for one, _, is_current in entries(admin_client, name, job.pk) if is_current] == ["Jobs"]


def test_the_bar_leaves_out_what_the_user_may_not_see(client):
    client.force_login(staff_user("view_queue", "view_batch"))
    assert entries(client, "queue_changelist") == [("Queues", "", True), ("Batches", "", False)]


def test_a_part_that_is_reloaded_has_no_bar(admin_client):
    text = admin_client.get(reverse("admin:django_faktory_overview_part")).content.decode()
    assert not re.search("faktory-nav", text)


@pytest.mark.django_db(databases=["default", "other"])
@override_settings(FAKTORY={"DATABASE": "other"})
def test_the_bar_shows_the_outbox_of_another_database_than_that_of_the_jobs(admin_client):
    OutboxEntry.objects.create(jid="refused-job", queue="mail", job="{}", error="no room")
    assert "Outbox" in [label for label, _, _ in entries(admin_client, "limit_changelist")]


def test_an_action_that_redirects_does_not_build_the_bar(admin_client):
    dead = JobFactory(dead=True)
    chosen = {"action": "retry", "_selected_action": [dead.pk], "confirmed": "yes"}
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.post(reverse("admin:django_faktory_job_changelist"), chosen).status_code == 302
    # The bar looks for a row of the outbox.
    assert not [query["sql"] for query in queries if "outboxentry" in query["sql"]]
