"""Jobs that were pushed before their queue was locketed get their keys while they wait."""

from datetime import UTC, datetime, timedelta

import pytest
from django.test import override_settings

from django_faktory.brokers import configured_locket
from django_faktory.core.locket import locket
from django_faktory.models import Job
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.store.locks import backfill
from tests.store.locks.conftest import jid, state_of


def give_keys(queues=None, *, key=None, limit=backfill.CHUNK):
    """Give keys, as maintenance does with these settings."""
    with override_settings(FAKTORY={"LOCKET": locket(queues, job_lock_key=key)}):
        found = configured_locket()
        options = {"using": "default", "limit": limit}
        after = backfill.give_keys(found.with_lock_key, found.queues, **options)
        while after is not None:
            after = backfill.give_keys(found.with_lock_key, found.queues, after=after, **options)


@pytest.mark.parametrize("limit", [1, 2, 500])
def test_waiting_jobs_exclude_each_other_after_the_backfill(plain, node, limit):
    plain.push("A", "A1", "B", "A2")
    give_keys(limit=limit)
    one = node()
    assert one.fetch(count=9) == [jid("A"), jid("B")]
    one.ack("A")
    assert one.fetch(count=9) == [jid("A1")]


def test_backfilled_jobs_exclude_jobs_that_are_pushed_later(plain, node):
    plain.push("A")
    give_keys()
    one = node()
    one.push("A1")
    assert one.fetch(count=9) == [jid("A")]


def test_backfilled_jobs_are_blocked_by_a_running_job_of_their_key(plain, node):
    plain.push("A")
    one = node()
    one.push("A1")
    Job.objects.filter(jid=jid("A1")).update(enqueued_at=datetime.now(UTC) - timedelta(days=1))
    assert one.fetch() == [jid("A1")]
    give_keys()
    assert state_of("A") == "blocked"
    one.ack("A1")
    assert one.fetch() == [jid("A")]


def test_scheduled_jobs_get_lock_keys_and_running_jobs_do_not(plain):
    plain.push("A", "B")
    plain.push("C", at=datetime.now(UTC) + timedelta(hours=1))
    plain.fetch()
    give_keys()
    assert {job.jid: bool(job.lock_key) for job in Job.objects.all()} == {
        jid("A"): False,
        jid("B"): True,
        jid("C"): True,
    }
    plain.fail("A")
    give_keys()
    assert Job.objects.get(jid=jid("A")).lock_key


def test_other_queues_and_jobs_with_lock_false_get_no_lock_key(plain):
    plain.push("A", queue="q1")
    plain.push("B", queue="q2")
    plain.push("C", queue="q1", custom={"lock": False})
    give_keys(["q1"])
    assert list(Job.objects.filter(lock_key__isnull=False).values_list("jid", flat=True)) == [jid("A")]


def no_key(job):
    raise KeyError(job.jid)


def test_a_job_gets_no_lock_key_if_the_key_function_raises(plain, caplog):
    plain.push("A")
    give_keys(key=no_key)
    assert "gets no key" in caplog.text
    assert plain.fetch() == [jid("A")]


def test_maintenance_backfills_lock_keys_only_if_queues_are_locketed(plain):
    plain.push("A", "A1")
    Maintenance("default").run_once()
    assert not Job.objects.filter(lock_key__isnull=False).exists()
    with override_settings(FAKTORY={"LOCKET": locket()}):
        Maintenance("default").run_once()
    assert [state_of("A"), state_of("A1")] == ["enqueued", "blocked"]
