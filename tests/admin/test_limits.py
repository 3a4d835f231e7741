"""Test limits in the admin: usage is shown, limits are edited while jobs run, and pausing a task needs a permission."""

import re

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_faktory.core.limits import Allowance
from django_faktory.models import Limit
from django_faktory.store.limits import definitions
from django_faktory.store.limits.definitions import LimitDefinition
from tests.admin.pages import words
from tests.factories import QueueFactory
from tests.store.limits.conftest import Node, limit, states

pytestmark = pytest.mark.once_if_quick

LIMITS = "admin:django_faktory_limit_changelist"
ADD = "admin:django_faktory_limit_add"


@pytest.fixture
def node(transactional_db):
    return Node()


def page_of(one):
    return reverse("admin:django_faktory_limit_change", args=[one.pk])


def act(client, one, verb):
    return client.post(reverse("admin:django_faktory_limit_act", args=[one.pk, verb]), follow=True)


def test_a_limit_is_listed_with_its_use_and_waiting_jobs(admin_client, node):
    limit("task", "noop", 2)
    node.push(*"abcde")
    assert len(node.fetch(4)) == 2
    page = words(admin_client.get(reverse(LIMITS)))
    assert re.search(r"noop task 2 at a time 2 3 – Admin", page), page


def test_a_limit_created_in_the_admin_is_enforced(admin_client, node):
    node.push(*"abc")
    form = {"scope": "task", "name": "noop", "concurrency": "2", "rate": "", "burst": ""}
    assert admin_client.post(reverse(ADD), form).status_code == 302
    assert LogEntry.objects.get().object_repr == "task noop: 2 at a time"
    assert node.fetch(5) == ["a", "b"]


def test_an_edited_limit_applies_at_once_and_overrides_code(admin_client, node):
    code = [LimitDefinition("task", "noop", definitions.Allowance(concurrency=1))]
    definitions.sync(code, using="default")
    node.push(*"abc")
    assert node.fetch(5) == ["a"]
    one = Limit.objects.get()
    assert 'name="concurrency" value="1"' in admin_client.get(page_of(one)).content.decode()
    form = {"concurrency": "2", "rate": "100/m", "burst": "7"}
    assert admin_client.post(page_of(one), form).status_code == 302
    definitions.sync(code, using="default")
    one.refresh_from_db()
    assert (one.allowance_text, one.origin) == ("2 at a time and 100/m, 7 at once", "edited")
    assert node.fetch(5) == ["b"]
    assert 'value="100/m"' in admin_client.get(page_of(one)).content.decode()
    act(admin_client, one, "as_in_code")
    definitions.sync(code, using="default")
    one.refresh_from_db()
    assert (one.allowance_text, one.origin) == ("1 at a time", "code")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"rate": "fast"}, "expected a number and a time"),
        ({}, "got neither"),
        ({"concurrency": "0"}, "concurrency: expected a whole number"),
        ({"burst": "3", "concurrency": "1"}, "expected a rate beside it"),
        ({"scope": "queue", "name": "a b", "concurrency": "1"}, "queue names must match"),
        ({"name": "known", "concurrency": "1"}, "a limit with this name exists"),
    ],
)
def test_an_invalid_limit_is_rejected_with_an_error_message(admin_client, node, form, message):
    limit("task", "known", 1)
    page = words(admin_client.post(reverse(ADD), {"scope": "task", "name": "noop"} | form))
    assert message in page
    assert Limit.objects.count() == 1


def test_deleting_a_limit_releases_its_waiting_jobs(admin_client, node):
    one = limit("task", "noop", 1)
    node.push(*"ab")
    node.fetch(2)
    where = reverse("admin:django_faktory_limit_delete", args=[one.pk])
    assert admin_client.post(where, {"post": "yes"}).status_code == 302
    assert states("b") == ["enqueued"]


@pytest.mark.parametrize(("origin", "returns"), [("admin", False), ("code", True), ("edited", True)])
def test_deleting_a_limit_of_code_says_before_and_after_that_it_returns(admin_client, origin, returns):
    one = limit("task", "noop", 1)
    Limit.objects.update(origin=origin)
    where = reverse("admin:django_faktory_limit_delete", args=[one.pk])
    assert ("returns when a node starts" in words(admin_client.get(where))) == returns
    assert ("returns when a node starts" in words(admin_client.post(where, {"post": "yes"}, follow=True))) == returns
    assert not Limit.objects.exists()


def test_a_task_is_paused_and_resumed_by_buttons(admin_client, node):
    one = limit("task", "noop", 1)
    node.push("a")
    assert "Pause" in words(admin_client.get(page_of(one)))
    assert "Noop: paused." in words(act(admin_client, one, "pause"))
    assert LogEntry.objects.latest("pk").change_message == "Paused."
    assert node.fetch() == []
    assert "Noop: was paused already." in words(act(admin_client, one, "pause"))
    assert "Noop: resumed." in words(act(admin_client, one, "resume"))
    assert node.fetch() == ["a"]


def test_resuming_a_task_without_a_limit_deletes_its_row(admin_client, node):
    definitions.pause(["noop"], using="default")
    page = act(admin_client, Limit.objects.get(), "resume")
    assert "Noop: resumed." in words(page)
    assert page.redirect_chain[-1][0] == reverse(LIMITS)
    assert not Limit.objects.exists()


def test_the_pause_action_rejects_limits_of_queues(admin_client, node):
    one = limit("queue", "mail", 1)
    page = admin_client.post(reverse(LIMITS), {"action": "pause", "_selected_action": [one.pk]}, follow=True)
    assert "only tasks are paused here" in words(page)
    assert Limit.objects.get().paused_at is None


def test_list_and_page_of_a_queue_show_and_link_its_limit(admin_client, node):
    QueueFactory(name="mail")
    QueueFactory(name="free")
    set_by_hand = definitions.save_limit("queue", "mail", Allowance(concurrency=20), using="default")
    listed = admin_client.get(reverse("admin:django_faktory_queue_changelist")).content.decode()
    assert listed.count("20 at a time") == 1
    page = admin_client.get(reverse("admin:django_faktory_queue_change", args=["mail"])).content.decode()
    assert f'<a href="{reverse("admin:django_faktory_limit_change", args=[set_by_hand.pk])}">20 at a time</a>' in page
    free = admin_client.get(reverse("admin:django_faktory_queue_change", args=["free"])).content.decode()
    assert "?scope=queue&amp;name=free" in free
    form = admin_client.get(reverse("admin:django_faktory_limit_add"), {"scope": "queue", "name": "free"})
    assert 'value="free"' in form.content.decode()
