"""Test locks in the admin: holders of keys are shown, and releasing a lock requires its permission (case L26)."""

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models import F
from django.urls import reverse
from django.utils.timezone import localtime

from django_faktory.models import Job, JobLock
from tests.admin.pages import words
from tests.store.locks.conftest import holders, jid, node, state_of  # noqa: F401  (a fixture)

pytestmark = pytest.mark.once_if_quick

LOCKS = "admin:django_faktory_joblock_changelist"
JOBS = "admin:django_faktory_job_changelist"


@pytest.fixture
def one(node):  # noqa: F811
    """A node where A runs for worker `old`, and A1 waits for its key."""
    one = node(key=lambda job: f"key of {job.args[0]}")
    one.push("A", "A1", "B")
    assert one.fetch(wid="old") == [jid("A")]
    return one


def job_page(client, name):
    pk = Job.objects.get(jid=jid(name)).pk
    return words(client.get(reverse("admin:django_faktory_job_change", args=[pk])))


def release(client, lock, **more):
    asked = {"action": "release", "_selected_action": [lock.pk]} | more
    return client.post(reverse(LOCKS), asked, follow=True)


def test_a_lock_is_listed_with_its_key_holder_and_times(admin_client, one):
    page = words(admin_client.get(reverse(LOCKS)))
    lock = JobLock.objects.get()
    assert all(text in page for text in ("key of A", jid("A"), "old", f"{localtime(lock.acquired_at):%Y-%m-%d}"))
    assert "(expired)" not in page
    JobLock.objects.update(expires_at=F("expires_at") - timedelta(hours=1))
    assert "(expired)" in words(admin_client.get(reverse(LOCKS)))


@pytest.mark.parametrize(("query", "is_found"), [("key of", True), (jid("A"), True), ("old", True), ("ld", False)])
def test_a_lock_is_found_by_key_jid_or_wid(admin_client, one, query, is_found):
    page = words(admin_client.get(reverse(LOCKS), {"q": query}))
    assert (jid("A") in page) is is_found


def test_the_page_of_a_lock_shows_its_token_and_waiting_jobs(admin_client, one):
    lock = JobLock.objects.get()
    page = words(admin_client.get(reverse("admin:django_faktory_joblock_change", args=[lock.pk])))
    assert f"Token: {lock.pk}" in page
    assert "Jobs that wait for it: 1" in page


def test_the_page_of_a_job_shows_the_holder_of_its_lock_key(admin_client, one):
    token = JobLock.objects.get().pk
    assert f"Lock held by this job, {jid('A')}" in job_page(admin_client, "A")
    assert f"Lock token {token} " in job_page(admin_client, "A")
    assert f"Lock held by another job, {jid('A')}" in job_page(admin_client, "A1")
    assert "Lock held by none" in job_page(admin_client, "B")
    JobLock.objects.update(expires_at=F("expires_at") - timedelta(hours=1))
    assert f"none: the lease of {jid('A')} expired at" in job_page(admin_client, "A")


def test_the_page_of_a_job_without_a_lock_key_shows_no_holder(admin_client, node):  # noqa: F811
    node([]).push("A")
    assert "Lock held by" not in job_page(admin_client, "A")


def test_the_old_holder_of_a_released_lock_cannot_affect_its_next_holder(admin_client, one):
    """L26: the old worker learns that its lock is gone, and its acknowledgement does not affect the new lock."""
    stale = JobLock.objects.get()
    page = words(release(admin_client, stale, confirmed="yes"))
    assert "Released 1 lock." in page
    assert one.fetch(wid="w2") == [jid("A1")]
    lock = JobLock.objects.get()
    assert (lock.jid, lock.pk > stale.pk) == (jid("A1"), True)
    assert one.broker.extend_locks([stale.pk]) == {stale.pk}, "its worker learns that the lock is lost"
    assert one.ack("A", wid="old") == [True]
    assert JobLock.objects.get().pk == lock.pk
    assert one.ack("A1", wid="w2") == [True]
    assert holders() == []


def test_releasing_a_lock_requires_confirmation(admin_client, one):
    lock = JobLock.objects.get()
    page = words(release(admin_client, lock))
    assert f"key of A, held by {jid('A')} of worker old" in page
    assert "Yes, release" in release(admin_client, lock).content.decode()
    assert holders() == [jid("A")]
    assert not LogEntry.objects.exists()


def test_releasing_a_lock_is_recorded_in_the_admin_log(admin_client, one):
    release(admin_client, JobLock.objects.get(), confirmed="yes")
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.get_change_message()) == ("admin", "Released manually.")
    assert "key of A" in entry.object_repr


def test_a_lock_acquired_by_another_job_meanwhile_is_not_released(admin_client, one):
    stale = JobLock.objects.get()
    one.ack("A", wid="old")
    one.fetch(wid="w2")
    release(admin_client, stale, confirmed="yes")
    assert holders() == [jid("A1")]
