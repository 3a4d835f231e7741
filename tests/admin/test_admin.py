"""Test the admin with Django's client: every page opens, each action works, and each requires its permission."""

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_faktory.models import Job, OutboxEntry, Tracking
from tests.factories import JobFactory, QueueFactory, WorkerFactory, staff_user

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

STATES = ("scheduled", "enqueued", "working", "retries", "dead", "succeeded", "discarded", "expired")
JOBS = "admin:django_faktory_job_changelist"
WORKERS = "admin:django_faktory_workerprocess_changelist"


def job_in(state, **fields):
    return JobFactory(**({state: True} if state != "enqueued" else {}), **fields)


def act(client, page, action, *objects, **more):
    """Run an action of a list, and confirm it where the admin asks for confirmation."""
    asked = {"action": action, "_selected_action": [o.pk for o in objects], "confirmed": "yes", **more}
    return client.post(reverse(page), asked, follow=True)


@pytest.mark.parametrize("state", STATES)
def test_a_job_in_any_state_is_listed_and_opens(admin_client, state):
    job = job_in(state, failures=1, history='[{"attempt":1,"errtype":"E","message":"no luck","backtrace":["line 1"]}]')
    page = admin_client.get(reverse(JOBS), {"state": state}).content.decode()
    assert job.jid in page
    detail = admin_client.get(reverse("admin:django_faktory_job_change", args=[job.pk]))
    assert detail.status_code == 200
    for text in ("no luck", "line 1", "Attempt 1 failed"):
        assert text in detail.content.decode()


def test_filters_narrow_the_list_by_state_and_queue(admin_client):
    QueueFactory(name="mail")
    mail, other, dead = job_in("enqueued", queue="mail"), job_in("enqueued"), job_in("dead", queue="mail")
    page = admin_client.get(reverse(JOBS), {"state": "enqueued", "queue": "mail"}).content.decode()
    assert mail.jid in page
    assert other.jid not in page
    assert dead.jid not in page


@pytest.mark.parametrize(
    ("action", "state", "becomes"),
    [
        ("retry", "dead", "enqueued"),
        ("retry", "scheduled", "scheduled"),
        ("retry", "retries", "enqueued"),
        ("requeue", "scheduled", "enqueued"),
        ("restart", "dead", "enqueued"),
        ("retry", "succeeded", "succeeded"),
        ("kill", "retries", "dead"),
        ("retry", "working", "working"),
        ("kill", "working", "working"),
        ("discard", "dead", None),
        ("discard", "working", "working"),
        ("cancel", "succeeded", "succeeded"),
        ("cancel", "dead", "dead"),
        ("cancel", "scheduled", None),
        ("prune", "succeeded", None),
        ("prune", "enqueued", "enqueued"),
    ],
)
def test_an_action_changes_jobs_in_permitted_states_and_reports_the_number(admin_client, action, state, becomes):
    job = job_in(state)
    page = act(admin_client, JOBS, action, job).content.decode()
    row = Job.objects.filter(pk=job.pk).first()
    assert (row.state if row else None) == becomes
    assert ("0 jobs." if state == becomes else "1 job.") in page
    logged = [entry.object_repr for entry in LogEntry.objects.all()]
    assert logged == ([] if state == becomes else [str(job)])


def test_a_running_job_is_marked_as_cancelled_and_its_progress_is_shown(admin_client):
    job = job_in("working")
    page = act(admin_client, JOBS, "cancel", job).content.decode()
    assert "Cancelled 1 job." in page
    job.refresh_from_db()
    assert job.is_cancelled
    assert job.state == "working", "its worker stops it"
    Tracking.objects.create(jid=job.jid, percent=40, desc="<b>two of five</b>")
    page = admin_client.get(f"/admin/django_faktory/job/{job.pk}/change/").content.decode()
    assert "40 % &lt;b&gt;two of five" in page


def test_a_user_with_only_view_permission_is_offered_no_action(client):
    client.force_login(staff_user("view_job"))
    job = job_in("dead")
    page = client.get(reverse(JOBS)).content.decode()
    assert job.jid in page
    assert 'value="retry"' not in page
    assert "/act/" not in client.get(reverse("admin:django_faktory_job_change", args=[job.pk])).content.decode()


def test_list_and_page_of_a_worker_show_its_queues_and_busy_threads(admin_client):
    worker = WorkerFactory(wid="w1", queues=["mail", "<b>slow</b>"], threads=5)
    other = WorkerFactory(wid="w2")
    JobFactory(working=True, wid="w1")
    listed = admin_client.get(reverse(WORKERS)).content.decode()
    assert "1 of 5" in listed
    assert "mail, &lt;b&gt;slow&lt;/b&gt;" in listed
    page = "admin:django_faktory_workerprocess_change"
    shown = admin_client.get(reverse(page, args=[worker.pk])).content.decode()
    assert "<dd>1 of 5</dd>" in shown
    assert "<bdi>mail</bdi>, <bdi>&lt;b&gt;slow&lt;/b&gt;</bdi>" in shown
    assert "<dd>0</dd>" in admin_client.get(reverse(page, args=[other.pk])).content.decode()


def test_a_rejected_outbox_job_is_shown_retried_and_deleted(admin_client):
    page = "admin:django_faktory_outboxentry_changelist"
    refused = OutboxEntry.objects.create(jid="refused-job", queue="mail", job="{}", error="no room for it")
    waits = OutboxEntry.objects.create(jid="waiting-job", queue="mail", job="{}")
    shown = admin_client.get(reverse(page)).content.decode()
    assert "no room for it" in shown
    assert waits.jid in shown
    assert "1 job will be sent again" in act(admin_client, page, "try_again", refused, waits).content.decode()
    assert not OutboxEntry.objects.exclude(error="").exists()
    admin_client.post(reverse(page), {"action": "delete_selected", "_selected_action": [refused.pk], "post": "yes"})
    assert list(OutboxEntry.objects.all()) == [waits]


@pytest.mark.parametrize(("page", "factory"), [("job", JobFactory), ("workerprocess", WorkerFactory)])
def test_a_page_links_to_its_history_once(admin_client, page, factory):
    path = f"/admin/django_faktory/{page}/{factory().pk}/"
    found = admin_client.get(f"{path}change/").content.decode()
    assert found.count(f'href="{path}history/"') == 1
