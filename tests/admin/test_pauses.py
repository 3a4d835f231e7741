"""Who paused a queue or a task, when and why: recorded by each way to pause, and shown where the pause is shown."""

import os
import re
import socket

import pytest
from django.urls import reverse

from django_faktory.admin.overview import data
from django_faktory.models import Limit, Queue
from django_faktory.store.limits import definitions
from django_faktory.tasks import limits
from tests.admin.pages import words
from tests.factories import JobFactory, QueueFactory
from tests.management.cli.conftest import faktory  # noqa: F401  (a fixture)
from tests.project.tasks import add

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

WHY = "gateway down, ticket 77"


def by_admin_queue(client, _command):
    client.post(
        reverse("admin:django_faktory_queue_changelist"),
        {"action": "pause", "_selected_action": "mail", "index": "0", "why": WHY},
    )
    return "admin"


def by_api_queue(client, _command):
    assert client.post("/api/queues/mail/pause/", {"reason": WHY}, "application/json").status_code == 200
    return "admin"


def by_cli_queue(_client, command):
    assert command("pause", "mail", "--reason", WHY).code == 0
    return rf".+@{re.escape(socket.gethostname())}"


def by_python_queue(_client, _command):
    Queue.objects.filter(name="mail").pause(reason=WHY)
    return re.escape(f"{socket.gethostname()}:{os.getpid()}")


def by_admin_task(client, _command):
    client.post(reverse("admin:django_faktory_task_pause"), {"task": add.jobtype, "verb": "pause", "why": WHY})
    return "admin"


def by_admin_limit(client, _command):
    limit = limits.set_limit("task", add.jobtype, 3)
    client.post(reverse("admin:django_faktory_limit_act", args=[limit.pk, "pause"]), {"why": WHY})
    return "admin"


def by_api_task(client, _command):
    form = {"tasks": [add.jobtype], "reason": WHY}
    assert client.post("/api/limits/pause/", form, "application/json").status_code == 200
    return "admin"


def by_cli_task(_client, command):
    assert command("limits", "pause", add.jobtype, "--reason", WHY).code == 0
    return rf".+@{re.escape(socket.gethostname())}"


def by_python_task(_client, _command):
    limits.pause(add, reason=WHY)
    return re.escape(f"{socket.gethostname()}:{os.getpid()}")


@pytest.mark.parametrize("pause", [by_admin_queue, by_api_queue, by_cli_queue, by_python_queue])
def test_page_and_alarm_of_a_queue_name_author_and_reason_of_its_pause(admin_client, faktory, pause):  # noqa: F811
    JobFactory(queue=QueueFactory(name="mail").name)
    by = pause(admin_client, faktory)
    page = words(admin_client.get(reverse("admin:django_faktory_queue_change", args=["mail"])).content.decode())
    assert re.search(rf"paused since \d.* by {by}: {WHY}", page)
    overview = words(admin_client.get(reverse("admin:django_faktory_overview_changelist")).content.decode())
    assert re.search(f"Paused by {by}: {WHY}", overview)


@pytest.mark.parametrize("pause", [by_admin_task, by_admin_limit, by_api_task, by_cli_task, by_python_task])
def test_page_and_alarm_of_a_task_name_author_and_reason_of_its_pause(admin_client, faktory, pause):  # noqa: F811
    by = pause(admin_client, faktory)
    definition = Limit.objects.get(scope="task", name=add.jobtype)
    JobFactory(blocked=True, jobtype=add.jobtype, lock_key=None, limiter=definition.limiters.get().pk)
    page = words(admin_client.get(f"{reverse('admin:django_faktory_task')}?task={add.jobtype}").content.decode())
    assert re.search(rf"paused since \d.* by {by}: {WHY}", page)
    overview = words(admin_client.get(reverse("admin:django_faktory_overview_changelist")).content.decode())
    assert re.search(f"Paused by {by}: {WHY}", overview)


def test_the_page_of_a_task_shows_its_pauses_after_their_limit_is_deleted(admin_client):
    by_admin_task(admin_client, None)
    admin_client.post(reverse("admin:django_faktory_task_pause"), {"task": add.jobtype, "verb": "resume"})
    by_api_task(admin_client, None)
    definitions.resume([add.jobtype], using="default")
    assert not Limit.objects.exists()
    page = words(admin_client.get(f"{reverse('admin:django_faktory_task')}?task={add.jobtype}").content.decode())
    for entry in (f"admin: Paused: {WHY}", "admin: Resumed.", f"admin: Paused, through the API: {WHY}"):
        assert entry in page


def test_the_message_about_a_paused_task_names_the_task_first(admin_client):
    form = {"task": add.jobtype, "verb": "pause", "why": WHY}
    page = admin_client.post(reverse("admin:django_faktory_task_pause"), form, follow=True)
    assert f"Task {add.jobtype} is paused: its jobs wait." in words(page.content.decode())


@pytest.mark.parametrize(("back", "target"), [("page", "page"), ("//evil.example", "list"), ("", "list")])
def test_a_pause_on_the_page_of_a_queue_returns_to_that_page(admin_client, back, target):
    QueueFactory(name="mail")
    urls = {
        "page": reverse("admin:django_faktory_queue_change", args=["mail"]),
        "list": reverse("admin:django_faktory_queue_changelist"),
    }
    form = {"action": "pause", "_selected_action": "mail", "index": "0", "back": urls.get(back, back)}
    assert admin_client.post(urls["list"], form).url == urls[target]
    assert Queue.objects.get().paused_at


@pytest.mark.parametrize(("permission", "is_shown"), [("queue", True), ("statistics", False)])
def test_only_viewers_of_queues_see_the_reason_of_a_pause(permission, is_shown):
    JobFactory(queue=QueueFactory(name="mail").name)
    Queue.objects.all().pause(by="anna", reason=WHY)
    [line] = data.read(may=lambda action: permission in action, using="default").alarms
    assert (line.alarm.note == f"by anna: {WHY}") is is_shown
