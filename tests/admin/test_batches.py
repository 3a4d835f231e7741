"""Batches in the admin: lists, the tree, the members, and retrying what failed."""

import pytest
from django.urls import reverse

from django_faktory import Batch, task
from django_faktory.models import Batch as Row
from django_faktory.models import Job

pytestmark = pytest.mark.django_db


@task
def step(number): ...


@pytest.fixture
def tree():
    with Batch(description="album 42", success=step.callback(0)) as outer:
        step.enqueue_many([(1,), (2,)])
        with Batch(description="its <prints>", complete=step.callback(9)):
            step.enqueue(3)
    return Row.objects.get(bid=outer.bid)


def page(client, name, *args, **query):
    return client.get(reverse(f"admin:django_faktory_batch_{name}", args=args), query).content.decode()


def test_the_list_shows_how_far_each_is(admin_client, tree):
    text = page(admin_client, "changelist")
    assert "album 42" in text
    assert "0 of 2" in text
    assert "its &lt;prints&gt;" in text


@pytest.mark.parametrize(("stage", "count"), [("open", 0), ("running", 2), ("broken", 0), ("over", 0), ("", 2)])
def test_batches_are_found_by_stage(admin_client, tree, stage, count):
    text = page(admin_client, "changelist", **({"stage": stage} if stage else {}))
    assert text.count("<progress") == count


def test_a_page_shows_tree_members_and_callbacks(admin_client, tree):
    text = page(admin_client, "change", tree.pk)
    assert "its &lt;prints&gt;" in text
    assert f"?bid={tree.bid}&amp;state=enqueued" in text or f"?bid={tree.bid}&state=enqueued" in text
    assert "not yet" in text
    child = Row.objects.get(parent_bid=tree.bid)
    assert "album 42" in page(admin_client, "change", child.pk)


def test_the_members_link_leads_to_them(admin_client, tree):
    text = admin_client.get(
        reverse("admin:django_faktory_job_changelist"), {"bid": tree.bid, "state": "enqueued"}
    ).content.decode()
    assert text.count('class="action-select"') == 2


def test_failed_members_are_retried_together(admin_client, tree):
    Job.objects.filter(bid=tree.bid).update(
        state="dead", finished_at="2026-01-01T00:00:00Z", purge_at="2036-01-01T00:00:00Z"
    )
    asked = {"action": "retry_failed", "_selected_action": [tree.pk]}
    told = admin_client.post(reverse("admin:django_faktory_batch_changelist"), asked, follow=True).content.decode()
    assert "Retried 2 jobs." in told
    assert Job.objects.filter(bid=tree.bid, state="enqueued").count() == 2
