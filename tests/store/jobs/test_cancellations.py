"""Cancel: waiting jobs are dropped, running ones are marked; the mark counts until the job is enqueued again."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.brokers import get_broker
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.payloads import Ack, failure
from django_faktory.errors import FaktoryError
from django_faktory.models import Job
from django_faktory.store.jobs import transitions
from django_faktory.store.store import Store
from tests.project.tasks import noop, send_invoice
from tests.store import by_ids
from tests.tasks.work import fetched

pytestmark = pytest.mark.django_db(transaction=True)


def cancel(*results):
    return transitions.cancel(Store(), [result.id for result in results])


def state(result):
    return Job.objects.get(jid=result.id).state


def asked(*results):
    return get_broker().cancelled([result.id for result in results])


def test_cancelled_waiting_jobs_are_discarded():
    waits, other = noop.enqueue(), noop.enqueue()
    later = noop.using(run_after=timedelta(hours=1)).enqueue()
    assert cancel(waits, later) == 2
    assert [state(one) for one in (waits, later, other)] == ["discarded", "discarded", "enqueued"]


def test_a_running_job_is_marked_as_cancelled_and_reported_to_its_worker():
    result, other = noop.enqueue(), send_invoice.enqueue(1)
    fetched()
    fetched()
    assert cancel(result) == 1
    assert state(result) == "working"
    assert asked(result, other) == [result.id]


def test_cancelling_finished_or_unknown_jobs_changes_nothing():
    done = noop.enqueue()
    job = fetched()
    get_broker().ack([Ack(jid=job.jid, wid=job.wid, attempt=job.attempt)])
    assert transitions.cancel(Store(), [done.id, "nosuchjob", "\x00bad"]) == 0
    assert state(done) == "succeeded"


def test_more_jobs_than_one_chunk_are_cancelled():
    count = transitions.CHUNK + 1
    assert cancel(*noop.enqueue_many([()] * count)) == count


def test_a_cancelled_job_that_fails_is_not_retried():
    result = noop.enqueue()
    job = fetched()
    cancel(result)
    get_broker().fail([failure(jid=job.jid, wid=job.wid, attempt=job.attempt, errtype="E")])
    assert state(result) == "discarded"


def test_a_cancelled_job_of_a_lost_worker_is_discarded():
    result, other = noop.enqueue(), noop.enqueue()
    fetched("gone")
    fetched("gone")
    cancel(result)
    assert get_broker().lost(["gone"]) == 2
    assert (state(result), state(other)) == ("discarded", "enqueued")
    assert Job.objects.get(jid=result.id).errtype == "Cancelled"


def test_a_cancelled_job_without_result_ttl_is_deleted_with_its_lost_worker():
    result = noop.enqueue()
    Job.objects.update(result_ttl=None)
    fetched("gone")
    cancel(result)
    assert get_broker().lost(["gone"]) == 1
    assert not Job.objects.exists()


def test_a_cancellation_mark_survives_the_release_of_the_job():
    result = noop.enqueue()
    job = fetched()
    cancel(result)
    get_broker().release([job])
    assert fetched("w2").jid == result.id
    assert asked(result) == [result.id]


def test_a_requeue_clears_the_cancellation_mark():
    result = noop.enqueue()
    job = fetched()
    get_broker().fail([failure(jid=job.jid, wid=job.wid, attempt=job.attempt, verdict="kill")])
    # A mark of an earlier run: a person wants the job to run after all.
    Job.objects.update(cancel_requested_at=timezone.now())
    by_ids.requeue([Job.objects.get().pk], using="default")
    assert fetched("w2").jid == result.id
    assert asked(result) == []


def test_a_remote_broker_rejects_cancellation_with_a_hint():
    remote = RemoteBroker("tcp://127.0.0.1:1")
    assert not remote.cancels
    assert remote.cancelled(["0123456789"]) == []
    with pytest.raises(FaktoryError, match=r'only: FAKTORY\["BROKER"\] = "orm"'):
        remote.cancel(["0123456789"])


def test_the_query_for_cancelled_jobs_takes_one_statement(django_assert_num_queries):
    result = noop.enqueue()
    fetched()
    with django_assert_num_queries(1):
        asked(result)
