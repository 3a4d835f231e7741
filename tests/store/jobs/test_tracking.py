"""TRACK in the store: which updates count, which times a row reports, and when it is deleted. Rule: W27."""

from datetime import timedelta

import pytest

from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import Ack, FetchRequest, Tracked, TrackUpdate, failure
from django_faktory.models import Job, Tracking
from django_faktory.store.jobs import acknowledgements, claims, failures, pushes
from django_faktory.store.jobs.tracking import PROTOCOL_STATES, purge_tracking, track_get, track_set
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, payload
from tests.store import by_ids

pytestmark = [pytest.mark.portable, pytest.mark.django_db]

USING = "default"
MINUTE = timedelta(minutes=1)


def track(jid, *, now=T0, **fields):
    track_set(Store(USING, now=now), [TrackUpdate(jid=jid, **fields)])


def get_tracked(jid):
    [one] = track_get(Store(USING), [jid])
    return one


@pytest.mark.parametrize("state", State, ids=str)
def test_every_job_state_maps_to_a_protocol_state(state):
    job = JobFactory(**{str(state): True} if state is not State.ENQUEUED else {})
    assert get_tracked(job.jid).state == PROTOCOL_STATES[state]
    assert PROTOCOL_STATES[state] in ("enqueued", "working", "success", "failed", "dead")


def test_track_get_returns_known_and_unknown_jobs_in_request_order():
    first, second = JobFactory(), JobFactory(working=True)
    found = track_get(Store(USING), [second.jid, "unknown-1", first.jid, "not\x00storable"])
    assert [one.state for one in found] == ["working", "unknown", "enqueued", "unknown"]


def test_a_tracking_update_for_a_jid_with_a_nul_byte_is_ignored():
    track("not\x00storable", percent=1)
    assert not Tracking.objects.exists()


def test_only_the_holder_or_an_update_without_a_wid_extends_the_reservation():
    job = JobFactory(working=True, wid="holder")
    start = job.reserved_until
    track(job.jid, wid="stranger", percent=1, reserve_until=start + MINUTE)
    assert Job.objects.get().reserved_until == start
    assert get_tracked(job.jid).percent == 1
    track(job.jid, wid="holder", reserve_until=start + MINUTE)
    assert Job.objects.get().reserved_until == start + MINUTE
    track(job.jid, reserve_until=start + 2 * MINUTE)
    assert Job.objects.get().reserved_until == start + 2 * MINUTE


def test_a_tracking_update_does_not_reserve_an_enqueued_job():
    job = JobFactory()
    track(job.jid, reserve_until=T0 + MINUTE)
    assert Job.objects.get().reserved_until is None


def test_an_extended_reservation_is_not_reaped_before_its_end():
    job = JobFactory(working=True, wid="holder")
    track(job.jid, wid="holder", reserve_until=job.reserved_until + 10 * MINUTE)
    assert failures.reap(Store(USING, now=job.reserved_until + 9 * MINUTE)) == 0
    assert failures.reap(Store(USING, now=job.reserved_until + 11 * MINUTE)) == 1


def test_tracking_data_is_kept_for_30_minutes_after_the_last_change():
    job = payload(custom={"track": 1})
    pushes.push(Store(USING, now=T0), [job])
    Job.objects.update(created_at=T0)
    claims.fetch(Store(USING, now=T0), [FetchRequest(queues=("default",), wid="w1")])
    track(job.jid, percent=90)
    acknowledgements.ack(Store(USING, now=T0 + MINUTE), [Ack(jid=job.jid)])
    due.purge(Store(USING, now=T0 + 31 * MINUTE))
    assert get_tracked(job.jid).state == "success"
    track(job.jid, percent=100, now=T0 + 30 * MINUTE)
    due.purge(Store(USING, now=T0 + 60 * MINUTE))
    assert get_tracked(job.jid) == Tracked(jid=job.jid, percent=100, state="success", updated_at=T0 + 30 * MINUTE)
    due.purge(Store(USING, now=T0 + 61 * MINUTE))
    assert purge_tracking(Store(USING, now=T0 + 61 * MINUTE)) == 1
    assert get_tracked(job.jid) == Tracked(jid=job.jid)


def test_a_tracking_update_does_not_shorten_the_result_ttl():
    job = JobFactory(succeeded=True)
    track(job.jid, percent=100)
    row = Job.objects.get()
    assert (row.result_ttl, row.purge_at) == (job.result_ttl, job.purge_at)


def test_tracking_data_of_a_live_job_is_never_purged():
    lives, dead = JobFactory(working=True), JobFactory(dead=True)
    for job in (lives, dead):
        track(job.jid, percent=1)
    assert purge_tracking(Store(USING, now=T0 + 30 * MINUTE)) == 0
    assert purge_tracking(Store(USING, now=T0 + 31 * MINUTE)) == 1
    assert set(Tracking.objects.values_list("jid", flat=True)) == {lives.jid}


def test_tracking_data_of_a_replaced_job_is_not_reported_for_its_successor():
    job = JobFactory(dead=True)
    track(job.jid, percent=80)
    pushes.push(Store(USING), [payload(job.jid)])
    Job.objects.update(created_at=T0 + MINUTE)
    assert get_tracked(job.jid).percent is None


def test_updated_at_reports_the_last_change_of_the_job_row():
    job = JobFactory(working=True, started_at=T0 + MINUTE)
    assert get_tracked(job.jid).updated_at == T0 + MINUTE
    failures.fail(Store(USING, now=T0 + 2 * MINUTE), [failure(jid=job.jid)])
    assert get_tracked(job.jid) == Tracked(jid=job.jid, state="failed", updated_at=T0 + 2 * MINUTE)
    due.enqueue_due(Store(USING, now=T0 + 60 * MINUTE))
    assert get_tracked(job.jid) == Tracked(jid=job.jid, state="enqueued", updated_at=T0 + 60 * MINUTE)


@pytest.mark.parametrize("history", ["spoilt", "[]", "[{}]", '[{"failed_at":5}]', '[{"failed_at":"late"}]'])
def test_a_corrupt_history_does_not_hide_the_job_state(history):
    job = JobFactory(retries=True, history=history, started_at=T0 + MINUTE)
    assert get_tracked(job.jid) == Tracked(jid=job.jid, state="failed", updated_at=T0 + MINUTE)


def test_a_discarded_tracked_job_is_reported_as_dead():
    job = payload(custom={"track": 1})
    pushes.push(Store(USING), [job])
    by_ids.discard([Job.objects.get().pk], using=USING)
    assert get_tracked(job.jid).state == "dead"
