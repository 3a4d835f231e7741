"""Every pair (state, event) on the database under test: legal transitions happen, and other events change nothing."""

from datetime import timedelta

import pytest

from django_faktory.brokers import get_broker
from django_faktory.contrib.transfer.import_jobs import store_arrivals
from django_faktory.contrib.transfer.job_format import Arrival
from django_faktory.core.job_parser import parse_job
from django_faktory.core.lifecycle import ENDED, GONE, TRANSITIONS, Event, State
from django_faktory.core.payloads import Ack, FetchRequest, Reservation, failure
from django_faktory.models import Job
from django_faktory.store import transfer
from django_faktory.store.jobs import acknowledgements, claims, failures, pushes, releases, transitions
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory
from tests.store import by_ids

pytestmark = [pytest.mark.portable, pytest.mark.django_db]

USING = "default"
LATER = T0 + timedelta(days=365)
PAIRS = [(state, event) for state in State for event in Event]


def push(job):
    text = f'{{"jid":"{job.jid}","jobtype":"newer","args":[]}}'
    pushes.push(Store(USING), [parse_job(text)])


def fetch(job):
    claims.fetch(Store(USING), [FetchRequest(queues=(job.queue,), wid=job.wid)])


def release(job):
    held = Reservation(jid=job.jid, queue=job.queue, text=job.payload, wid=job.wid, attempt=job.attempt)
    releases.release(Store(USING), [held])


def expire(job):
    Job.objects.filter(pk=job.pk).update(expires_at=T0)
    due.expire(Store(USING, now=LATER))


def block(job):
    """Block the job: another job of its key is claimed, and holds the lock."""
    Job.objects.filter(pk=job.pk).update(lock_key="key")
    sibling = JobFactory(queue="elsewhere", lock_key="key")
    assert claims.fetch(Store(USING), [FetchRequest(queues=("elsewhere",), wid="w2")])[0][0].jid == sibling.jid
    Job.objects.filter(pk=sibling.pk).delete()


def ready(job):
    Job.objects.filter(pk=job.pk).update(lock_key="key")
    locks.promote_waiters(["key"], using=USING)


def import_again(job):
    text = f'{{"jid":"{job.jid}","jobtype":"newer","args":[]}}'
    store_arrivals([Arrival(parse_job(text), State.ENQUEUED)], get_broker(), USING)
    Job.objects.filter(jobtype=transfer.RECEIPT).delete()


HAPPEN = {
    Event.PUSH: push,
    Event.BLOCK: block,
    Event.READY: ready,
    Event.DUE: lambda job: due.enqueue_due(Store(USING, now=LATER)),
    Event.FETCH: fetch,
    Event.ACK: lambda job: acknowledgements.ack(Store(USING), [Ack(jid=job.jid, wid=job.wid)]),
    Event.FAIL: lambda job: failures.fail(Store(USING), [failure(jid=job.jid, wid=job.wid)]),
    Event.REAP: lambda job: failures.reap(Store(USING, now=LATER)),
    Event.LOSE: lambda job: failures.reclaim_lost(Store(USING), [job.wid or "w1"]),
    Event.RELEASE: release,
    Event.REQUEUE: lambda job: by_ids.requeue([job.pk], using=USING),
    Event.DEFER: lambda job: transitions.defer({job.pk: LATER}, using=USING),
    Event.KILL: lambda job: by_ids.kill([job.pk], using=USING),
    Event.DISCARD: lambda job: by_ids.discard([job.pk], using=USING),
    Event.EXPIRE: expire,
    Event.PURGE: lambda job: due.purge(Store(USING, now=LATER)),
    Event.IMPORT: import_again,
    Event.EXPORT: lambda job: transfer.hand_over(
        transfer.find_exportable(job.state, using=USING), list, using=USING, limit=9
    ),
}


def state_of(job):
    return State(row.state) if (row := Job.objects.filter(jid=job.jid).first()) else GONE


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["plain", "kept"])
def test_each_event_causes_only_the_transitions_in_the_table(state, event, kept):
    job = JobFactory(**{str(state): True} if state is not State.ENQUEUED else {})
    Job.objects.filter(pk=job.pk).update(result_ttl=60 if kept else None)
    HAPPEN[event](job)
    allowed = TRANSITIONS[state].get(event)
    if event is Event.PUSH and state in ENDED:
        assert set(Job.objects.values_list("state", "jobtype")) == {(state, "noop"), ("enqueued", "newer")}
    elif allowed is None:
        assert state_of(job) is state
        assert Job.objects.get().jobtype == "noop"
    else:
        assert state_of(job) in allowed


@pytest.mark.parametrize(("kept", "end"), [(False, GONE), (True, State.SUCCEEDED)])
def test_an_acked_job_is_kept_only_if_it_has_a_result_ttl(kept, end):
    job = JobFactory(working=True, result_ttl=60 if kept else None)
    HAPPEN[Event.ACK](job)
    assert state_of(job) is end


@pytest.mark.parametrize(
    ("retry", "failed_before", "kept", "end"),
    [
        (25, 0, False, State.RETRIES),
        (25, 25, False, State.DEAD),
        (0, 0, False, GONE),
        (0, 0, True, State.DEAD),
        (-1, 0, False, State.DEAD),
    ],
)
@pytest.mark.parametrize("event", [Event.FAIL, Event.REAP])
def test_the_state_after_a_failure_depends_on_the_retries_left(event, retry, failed_before, kept, end):
    """W18, W19: a failure and an expired reservation have the same result."""
    job = JobFactory(working=True, retry=retry, failures=failed_before, result_ttl=60 if kept else None)
    HAPPEN[event](job)
    assert state_of(job) is end


@pytest.mark.parametrize(("losses", "end"), [(0, State.ENQUEUED), (1, State.ENQUEUED), (2, State.DEAD)])
def test_a_job_is_dead_after_its_third_lost_worker(losses, end):
    """W20: the third loss ends it, and no failure is counted."""
    job = JobFactory(working=True, losses=losses)
    HAPPEN[Event.LOSE](job)
    assert state_of(job) is end
    assert Job.objects.get().failures == 0


@pytest.mark.parametrize("event", [Event.FAIL, Event.REAP, Event.LOSE, Event.KILL, Event.DEFER, Event.REQUEUE])
def test_a_failed_job_has_the_time_of_its_latest_failure(event):
    states = {Event.KILL: "scheduled", Event.DEFER: "dead", Event.REQUEUE: "dead"}
    job = JobFactory(**{states.get(event, "working"): True}, losses=2)
    HAPPEN[event](job)
    row = Job.objects.get()
    # T0 is the time of the failure that DEFER and REQUEUE keep.
    expected = T0 if event in (Event.DEFER, Event.REQUEUE) else row.finished_at
    if event in (Event.FAIL, Event.REAP):
        assert row.failed_at < row.run_at, "a retry is later than its failure"
    else:
        assert row.failed_at == expected


def test_a_replaced_job_resets_everything():
    """W10."""
    job = JobFactory(dead=True, history="[]", failure="{}", errtype="E", losses=2)
    push(job)
    row = Job.objects.get()
    assert (row.state, row.jobtype, row.failures, row.losses, row.errtype) == ("enqueued", "newer", 0, 0, "")
    assert (row.history, row.failure, row.finished_at, row.purge_at, row.failed_at) == ("", "", None, None, None)
