"""@task's unique_for, unique_until, expires_in and track, from enqueue to result. Rule: W27."""

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.utils import timezone

from django_faktory import NotUnique, task
from django_faktory.core.json import jsontext
from django_faktory.errors import JobExpired
from django_faktory.models import Job
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from django_faktory.tasks.compat import TaskResultStatus, task_enqueued

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]


@task(unique_for=600)
def alone(number=0):
    return number


@task(unique_for=600, unique_until="start", track=True)
def alone_until_start():
    pass


@task(expires_in=60, track=True)
def soon():
    return "in time"


def custom_of(result):
    return jsontext.decode(Job.objects.get(jid=result.id).payload)["custom"]


def test_job_options_are_stored_in_the_custom_fields_of_the_protocol():
    assert custom_of(alone.enqueue()).items() >= {"unique_for": 600, "unique_until": "success"}.items()
    assert custom_of(alone_until_start.enqueue()).items() >= {"unique_until": "start", "track": 1}.items()
    assert custom_of(soon.enqueue()).items() >= {"expires_in": 60, "track": 1}.items()


def test_enqueue_raises_not_unique_while_a_duplicate_is_waiting():
    first = alone.enqueue(1)
    with pytest.raises(NotUnique, match="Job not unique"):
        alone.enqueue(1)
    with pytest.raises(NotUnique):
        async_to_sync(alone.aenqueue)(1)
    alone.enqueue(2)
    alone.using(queue_name="other").enqueue(1)
    assert Job.objects.count() == 3
    assert Job.objects.filter(jid=first.id).exists()


def test_not_unique_leaves_the_callers_transaction_usable():
    alone.enqueue(1)
    with transaction.atomic():
        with pytest.raises(NotUnique):
            alone.enqueue(1)
        alone.enqueue(2)
    assert Job.objects.count() == 2


def test_enqueue_many_stores_the_unique_jobs_and_reports_their_results():
    signalled = []

    def hear(task_result, **_):
        signalled.append(task_result.id)

    alone.enqueue(1)
    task_enqueued.connect(hear)
    try:
        with pytest.raises(NotUnique) as caught:
            alone.enqueue_many([(1,), (2,), (2,), (3,)])
    finally:
        task_enqueued.disconnect(hear)
    taken = [result and result.args for result in caught.value.results]
    assert taken == [None, [2], None, [3]]
    assert signalled == [result.id for result in caught.value.results if result]
    assert Job.objects.count() == 3


def test_an_expired_job_has_a_failed_result_with_the_reason():
    result = soon.enqueue()
    due.expire(Store(now=timezone.now() + timedelta(minutes=2)))
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    [error] = result.errors
    assert error.exception_class is JobExpired
    assert "it waited past its expires_in" in error.traceback
    assert result.finished_at is not None


def test_expires_in_counts_from_run_after():
    at = timezone.now() + timedelta(hours=1)
    result = soon.using(run_after=at).enqueue()
    assert Job.objects.get(jid=result.id).expires_at == at + timedelta(seconds=60)
