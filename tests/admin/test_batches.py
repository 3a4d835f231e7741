"""Test batches in the admin: lists, the tree, the members, and retrying failed jobs."""

import re
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_faktory import Batch, Discard, task
from django_faktory.admin.batches import MAX_BATCHES_SHOWN
from django_faktory.models import Batch as Row
from django_faktory.models import Job
from django_faktory.store.batches import batches
from django_faktory.store.store import Store
from django_faktory.testing import drain
from tests.admin.pages import words
from tests.factories import JobFactory, staff_user

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


@task
def step(number): ...


@task(max_attempts=1)
def fail():
    raise ValueError("no luck")


@task
def drop():
    raise Discard("not needed")


@pytest.fixture
def tree():
    with Batch(description="album 42", success=step.callback(0)) as outer:
        step.enqueue_many([(1,), (2,)])
        with Batch(description="its <prints>", complete=step.callback(9)):
            step.enqueue(3)
    return Row.objects.get(bid=outer.bid)


def page(client, name, *args, **query):
    return client.get(reverse(f"admin:django_faktory_batch_{name}", args=args), query).content.decode()


def test_the_list_shows_the_progress_of_each_batch(admin_client, tree):
    text = page(admin_client, "changelist", place="all")
    assert "album 42" in text
    assert "0 of 2 ended" in text
    assert "success: step: " in " ".join(re.sub("<[^>]*>", "", text).split())
    assert "its &lt;prints&gt;" in text


def test_the_page_of_a_batch_shows_its_tree_members_and_callbacks(admin_client, tree):
    text = page(admin_client, "change", tree.pk)
    assert "its &lt;prints&gt;" in text
    assert f"?bid={tree.bid}&amp;state=enqueued" in text or f"?bid={tree.bid}&state=enqueued" in text
    assert "not yet" in text
    child = Row.objects.get(parent_bid=tree.bid)
    assert "album 42" in page(admin_client, "change", child.pk)


def test_an_action_retries_all_failed_members_of_a_batch(admin_client, tree):
    Job.objects.filter(bid=tree.bid).update(
        state="dead", finished_at="2026-01-01T00:00:00Z", purge_at="2036-01-01T00:00:00Z"
    )
    asked = {"action": "retry_failed", "_selected_action": [tree.pk]}
    shown = admin_client.post(reverse("admin:django_faktory_batch_changelist"), asked, follow=True).content.decode()
    assert "Retried 2 jobs." in shown
    assert Job.objects.filter(bid=tree.bid, state="enqueued").count() == 2


def queries(client, name, *args):
    """Return the number of queries of a page, without queries that Django sends once per process."""
    page(client, name, *args)
    with CaptureQueriesContext(connection) as found:
        page(client, name, *args)
    return len(found)


def made(count, parent=None):
    """Create this number of uncommitted batches: children of `parent`, or roots."""
    bids = [f"b-{uuid4().hex}" for _ in range(count)]
    place = {"parent_bid": parent.bid, "depth": parent.depth + 1} if parent else {}
    Row.objects.bulk_create(
        [Row(bid=bid, success='{"jobtype":"J"}', expires_at=timezone.now(), **place) for bid in bids]
    )
    if parent:
        counts = dict.fromkeys(("children", "open_children", "unsucceeded_children"), count)
        Row.objects.filter(pk=parent.pk).update(**counts)
    return list(Row.objects.filter(bid__in=bids).order_by("pk"))


def test_the_page_of_a_batch_takes_one_query_per_tree_level(admin_client, tree):
    Row.objects.exclude(pk=tree.pk).delete()
    made(1, tree)
    few = queries(admin_client, "change", tree.pk)
    for child in made(10, tree):
        made(3, child)
    assert queries(admin_client, "change", tree.pk) == few + 1


def test_an_oversized_tree_is_cut_and_still_shows_the_current_batch(admin_client, tree):
    last = made(MAX_BATCHES_SHOWN + 5, tree)[-1]
    text = page(admin_client, "change", last.pk)
    assert f"Only {MAX_BATCHES_SHOWN + 1} of its batches are shown." in text
    assert f'aria-current="page" class="faktory-warn"><bdi>{last.bid}</bdi>' in text
    assert f"<bdi>{tree.description}</bdi>" in text


def test_the_list_shows_top_level_batches_unless_nested_ones_are_asked_for(admin_client, tree):
    for place, count in (("", 1), ("child", 1), ("all", 2)):
        text = page(admin_client, "changelist", **({"place": place} if place else {}))
        assert text.count('class="action-select"') == count


def test_a_failed_job_deep_in_a_tree_shows_on_each_batch_above_it(admin_client, tree):
    child = Row.objects.get(parent_bid=tree.bid)
    [grandchild] = made(1, child)
    Row.objects.filter(pk=grandchild.pk).update(
        failed=1, total=1, pending=1, committed_at=timezone.now(), expires_at=None
    )
    Row.objects.filter(pk__in=[tree.pk, child.pk]).update(committed_at=timezone.now(), expires_at=None)
    job = JobFactory(dead=True, bid=grandchild.bid, jobtype="shop.send", errtype="shop.Declined")
    for batch in (tree, child):
        text = page(admin_client, "change", batch.pk)
        assert "a nested batch is failing" in text
        assert "shop.Declined" in text
        assert f"/job/{job.pk}/change/" in text
    assert "a nested batch is failing" in page(admin_client, "changelist")
    failing = page(admin_client, "changelist", stage="failing")
    assert failing.count('class="action-select"') == 1
    assert "1 failed" in words(page(admin_client, "change", tree.pk))


def ended(member, success=step):
    with Batch(description="one", success=success.callback(*([0] if success is step else []))) as batch:
        member.enqueue(*([1] if member is step else []))
    drain()
    return Row.objects.get(bid=batch.bid)


@pytest.mark.parametrize(
    ("member", "success", "stage", "bar", "callback"),
    [
        (step, step, "succeeded", "1 of 1 ended", "step: done"),
        (fail, step, "failing", "0 of 1 ended, 1 failed", "step: not yet"),
        (drop, step, "cannot succeed", "1 of 1 ended", "step: not yet"),
        (step, fail, "a callback failed", "1 of 1 ended", "fail: failed"),
    ],
)
def test_list_and_page_show_how_a_batch_ended(admin_client, member, success, stage, bar, callback):
    row = ended(member, success)
    for text in (page(admin_client, "change", row.pk), page(admin_client, "changelist")):
        for expected in (stage, bar, callback):
            assert expected in words(text)


def test_the_page_of_an_expired_batch_shows_the_reason(admin_client):
    [row] = made(1)
    assert "not committed" in words(page(admin_client, "change", row.pk))
    Row.objects.update(expires_at="2020-01-01T00:00:00Z")
    batches.expire(Store())
    assert "expired: not committed in time" in words(page(admin_client, "change", row.pk))


def test_a_reopened_batch_is_shown_as_open(admin_client):
    [row] = made(1)
    moments = {"committed_at": "2020-01-01T00:00:00Z", "expires_at": None, "reopened_until": "2999-01-01T00:00:00Z"}
    Row.objects.update(**moments)
    assert "reopened" in words(page(admin_client, "change", row.pk))
    assert row.bid in page(admin_client, "changelist", stage="open")
    assert row.bid not in page(admin_client, "changelist", stage="running")


def test_deleted_members_are_counted_on_the_page_of_a_batch(admin_client, tree):
    Job.objects.filter(bid=tree.bid).first().delete()
    assert "1 enqueued" in words(page(admin_client, "change", tree.pk))
    assert "1 without a row" in words(page(admin_client, "change", tree.pk))


def test_an_enqueued_callback_links_to_its_job(admin_client):
    row = ended(step)
    assert f"?q={row.success_jid}" in page(admin_client, "change", row.pk)
    text = admin_client.get(reverse("admin:django_faktory_job_changelist"), {"q": row.success_jid}).content.decode()
    assert text.count('class="action-select"') == 1


def test_failed_callbacks_are_retried_too_and_the_retry_is_logged(admin_client):
    row = ended(step, fail)
    asked = {"action": "retry_failed", "_selected_action": [row.pk]}
    shown = admin_client.post(reverse("admin:django_faktory_batch_changelist"), asked, follow=True).content.decode()
    assert "Retried 1 job." in shown
    assert [(job.jobtype, job.state) for job in Job.objects.filter(callback_of=row.bid)] == [(fail.jobtype, "enqueued")]
    assert LogEntry.objects.get().get_change_message() == "Retried failed jobs."


def test_a_retry_of_a_batch_includes_nested_batches_once(admin_client, tree):
    nested = Row.objects.get(parent_bid=tree.bid)
    Job.objects.filter(bid=nested.bid).update(
        state="dead", finished_at="2026-01-01T00:00:00Z", purge_at="2036-01-01T00:00:00Z"
    )
    asked = {"action": "retry_failed", "_selected_action": [tree.pk, nested.pk]}
    shown = admin_client.post(reverse("admin:django_faktory_batch_changelist"), asked, follow=True).content.decode()
    assert "Retried 1 job." in shown
    assert Job.objects.filter(bid=nested.bid, state="enqueued").count() == 1


def test_retrying_a_batch_without_failures_changes_nothing(admin_client, tree):
    asked = {"action": "retry_failed", "_selected_action": [tree.pk]}
    shown = admin_client.post(reverse("admin:django_faktory_batch_changelist"), asked, follow=True).content.decode()
    assert "Nothing to retry: no job has failed." in shown
    assert Job.objects.filter(state="enqueued").count() == 3


def test_a_user_with_only_view_permission_is_offered_no_retry(client, tree):
    client.force_login(staff_user("view_batch"))
    text = page(client, "changelist")
    assert "album 42" in text
    assert "retry_failed" not in text
