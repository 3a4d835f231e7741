"""TRACK in the store: which updates count, which times a row reports, and when it is deleted. Rule: W27."""

from datetime import timedelta

import pytest

from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import Ack, FetchRequest, Tracked, TrackUpdate, failure
from django_faktory.models import Job, Tracking
from django_faktory.store.jobs import acknowledgements, claims, failures, pushes, transitions
from django_faktory.store.jobs.tracking import PROTOCOL_STATES, purge_tracking, track_get, track_set
from django_faktory.store.maintenance import due
from tests.factories import T0, JobFactory, payload

pytestmark = pytest.mark.django_db

USING = "default"
MINUTE = timedelta(minutes=1)


def say(jid, *, now=T0, **said):
    track_set([TrackUpdate(jid=jid, **said)], using=USING, now=now)


def told(jid):
    [one] = track_get([jid], using=USING)
    return one


@pytest.mark.parametrize("state", State, ids=str)
def test_every_state_has_a_word_of_the_protocol(state):
    job = JobFactory(**{str(state): True} if state is not State.ENQUEUED else {})
    assert told(job.jid).state == PROTOCOL_STATES[state]
    assert PROTOCOL_STATES[state] in ("enqueued", "working", "success", "failed", "dead")


def test_jobs_are_told_in_the_order_asked_known_or_not():
    first, second = JobFactory(), JobFactory(working=True)
    found = track_get([second.jid, "nobody-knows", first.jid, "not\x00storable"], using=USING)
    assert [one.state for one in found] == ["working", "unknown", "enqueued", "unknown"]


def test_a_jid_that_no_database_can_hold_is_let_be():
    say("not\x00storable", percent=1)
    assert not Tracking.objects.exists()


def test_only_the_holder_or_one_without_a_wid_lengthens_a_reservation():
    job = JobFactory(working=True, wid="holder")
    start = job.reserved_until
    say(job.jid, wid="stranger", percent=1, reserve_until=start + MINUTE)
    assert Job.objects.get().reserved_until == start
    assert told(job.jid).percent == 1
    say(job.jid, wid="holder", reserve_until=start + MINUTE)
    assert Job.objects.get().reserved_until == start + MINUTE
    say(job.jid, reserve_until=start + 2 * MINUTE)
    assert Job.objects.get().reserved_until == start + 2 * MINUTE


def test_a_job_that_nobody_holds_has_no_reservation_to_lengthen():
    job = JobFactory()
    say(job.jid, reserve_until=T0 + MINUTE)
    assert Job.objects.get().reserved_until is None


def test_a_longer_reservation_is_not_reaped_before_its_end():
    job = JobFactory(working=True, wid="holder")
    say(job.jid, wid="holder", reserve_until=job.reserved_until + 10 * MINUTE)
    assert failures.reap(using=USING, now=job.reserved_until + 9 * MINUTE) == 0
    assert failures.reap(using=USING, now=job.reserved_until + 11 * MINUTE) == 1


def test_the_last_word_is_kept_for_half_an_hour_after_the_end():
    job = payload(custom={"track": 1})
    pushes.push([job], using=USING, now=T0)
    Job.objects.update(created_at=T0)
    claims.fetch([FetchRequest(queues=("default",), wid="w1")], using=USING, now=T0)
    say(job.jid, percent=90)
    acknowledgements.ack([Ack(jid=job.jid)], using=USING, now=T0 + MINUTE)
    due.purge(using=USING, now=T0 + 31 * MINUTE)
    assert told(job.jid).state == "success"
    say(job.jid, percent=100, now=T0 + 30 * MINUTE)
    due.purge(using=USING, now=T0 + 60 * MINUTE)
    assert told(job.jid) == Tracked(jid=job.jid, percent=100, state="success", updated_at=T0 + 30 * MINUTE)
    due.purge(using=USING, now=T0 + 61 * MINUTE)
    assert purge_tracking(using=USING, now=T0 + 61 * MINUTE) == 1
    assert told(job.jid) == Tracked(jid=job.jid)


def test_a_result_that_is_kept_longer_is_not_shortened():
    job = JobFactory(succeeded=True)
    say(job.jid, percent=100)
    row = Job.objects.get()
    assert (row.result_ttl, row.purge_at) == (job.result_ttl, job.purge_at)


def test_a_word_on_a_job_that_still_lives_is_never_forgotten():
    lives, dead = JobFactory(working=True), JobFactory(dead=True)
    for job in (lives, dead):
        say(job.jid, percent=1)
    assert purge_tracking(using=USING, now=T0 + 30 * MINUTE) == 0
    assert purge_tracking(using=USING, now=T0 + 31 * MINUTE) == 1
    assert set(Tracking.objects.values_list("jid", flat=True)) == {lives.jid}


def test_what_was_said_of_an_earlier_job_of_that_jid_is_not_told_of_the_next():
    job = JobFactory(dead=True)
    say(job.jid, percent=80)
    pushes.push([payload(job.jid)], using=USING)
    Job.objects.update(created_at=T0 + MINUTE)
    assert told(job.jid).percent is None


def test_a_row_tells_when_it_last_changed():
    job = JobFactory(working=True, started_at=T0 + MINUTE)
    assert told(job.jid).updated_at == T0 + MINUTE
    failures.fail([failure(jid=job.jid)], using=USING, now=T0 + 2 * MINUTE)
    assert told(job.jid) == Tracked(jid=job.jid, state="failed", updated_at=T0 + 2 * MINUTE)
    due.enqueue_due(using=USING, now=T0 + 60 * MINUTE)
    assert told(job.jid) == Tracked(jid=job.jid, state="enqueued", updated_at=T0 + 60 * MINUTE)


@pytest.mark.parametrize("history", ["spoilt", "[]", "[{}]", '[{"failed_at":5}]', '[{"failed_at":"late"}]'])
def test_a_history_that_somebody_spoilt_hides_no_state(history):
    job = JobFactory(retries=True, history=history, started_at=T0 + MINUTE)
    assert told(job.jid) == Tracked(jid=job.jid, state="failed", updated_at=T0 + MINUTE)


def test_a_tracked_job_that_is_dropped_tells_it():
    job = payload(custom={"track": 1})
    pushes.push([job], using=USING)
    transitions.discard([Job.objects.get().pk], using=USING)
    assert told(job.jid).state == "dead"
