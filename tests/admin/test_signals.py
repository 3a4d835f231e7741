"""Signals from the page of a job: the form, the permission, the reason in the log, and what the page says of a wait."""

import json
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from django.utils import timezone

from django_faktory.core.steps import FOREVER
from django_faktory.models import Job, JobSignal
from tests.admin.test_errors import page
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


def parked(**fields):
    return JobFactory(state="scheduled", run_at=FOREVER, enqueued_at=None, waits_for="approved", **fields)


def post(client, job, **form):
    return client.post(reverse("admin:django_faktory_job_signal", args=[job.pk]), form, follow=True)


def test_the_page_of_a_job_says_for_what_it_waits_and_until_when(admin_client):
    job = parked()
    shown = page(admin_client, "change", "", job.pk)
    assert "Waits for signal approved" in shown
    assert "9999" not in shown
    Job.objects.update(run_at=timezone.now() + timedelta(days=3))
    assert "Waits for signal approved until " in page(admin_client, "change", "", job.pk)
    Job.objects.update(state="enqueued", enqueued_at=timezone.now())
    assert "Waits for signal" not in page(admin_client, "change", "", job.pk)


def test_the_form_sends_a_signal_with_payload_and_reason(admin_client):
    job = parked()
    address = reverse("admin:django_faktory_job_signal", args=[job.pk])
    assert address in page(admin_client, "change", "", job.pk)
    assert 'value="approved"' in admin_client.get(address).content.decode()
    assert (
        "Signal sent."
        in post(admin_client, job, name="approved", payload='{"by": "ann"}', why="asked me").content.decode()
    )
    assert json.loads(JobSignal.objects.get().payload) == {"by": "ann"}
    assert LogEntry.objects.get().get_change_message() == "Sent signal approved: asked me"


@pytest.mark.parametrize(
    ("form", "problem"), [({"name": ""}, "expected a name of 1 to 100"), ({"name": "a", "payload": "{"}, "JSON")]
)
def test_a_wrong_signal_is_shown_with_its_problem_and_the_input(admin_client, form, problem):
    shown = post(admin_client, parked(), **form).content.decode()
    assert problem in shown
    assert JobSignal.objects.count() == 0


def test_an_ended_job_has_no_button_and_takes_no_signal(admin_client):
    job = JobFactory(succeeded=True)
    assert f"{job.pk}/signal/" not in page(admin_client, "change", "", job.pk)
    assert "cannot take a signal" in post(admin_client, job, name="a").content.decode()


def test_a_signal_needs_its_permission(client, django_user_model):
    user = django_user_model.objects.create_user("viewer", is_staff=True)
    from django.contrib.auth.models import Permission

    user.user_permissions.add(Permission.objects.get(codename="view_job"))
    client.force_login(user)
    job = parked()
    assert f"{job.pk}/signal/" not in page(client, "change", "", job.pk)
    assert post(client, job, name="approved").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="signal_job"))
    assert post(client, job, name="approved").status_code == 200
    assert JobSignal.objects.count() == 1
