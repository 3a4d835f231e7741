"""Test the number of jobs that a worker holds."""

import pytest

from django_faktory.worker.outage_pause import FIRST_PAUSE_S, LONGEST_PAUSE_S, OutagePause
from django_faktory.worker.prefetch_window import CAUTIOUS_S, PrefetchWindow

pytestmark = pytest.mark.core


T0 = 100.0
"""Time when the worker received its first job."""


def pace_after(*durations, concurrency=4, max_prefetch=20):
    pace = PrefetchWindow(concurrency=concurrency, max_prefetch=max_prefetch)
    pace.record_fetch(T0)
    for ran_s in durations:
        pace.record_end(ran_s)
    return pace


def room_after(*durations, held=0, now=T0, **options):
    return pace_after(*durations, **options).room(held, now=now)


def test_the_first_fetch_requests_a_single_job():
    """Only then is a job that kills its process the only suspect (W20)."""
    assert PrefetchWindow(concurrency=4, max_prefetch=20).room(0, now=T0) == 1
    assert room_after(held=1, now=T0 + CAUTIOUS_S / 2) == 0


def test_the_window_doubles_with_each_completed_job():
    assert [room_after(*[9.0] * ended) for ended in (1, 2, 3)] == [2, 4, 4]


def test_slow_jobs_are_not_prefetched():
    assert room_after(*[0.5] * 200) == 4


def test_fast_jobs_are_prefetched_in_proportion_to_their_speed():
    assert room_after(*[0.019] * 200) == 4 + 10
    assert room_after(*[0.0] * 200) == 4 + 20


def test_nothing_is_prefetched_if_max_prefetch_is_zero():
    assert room_after(*[0.0] * 200, max_prefetch=0) == 4


def test_a_small_refill_is_fetched_only_if_a_thread_is_idle():
    assert [room_after(*[0.0] * 200, held=held) for held in (3, 14, 15, 24, 30)] == [21, 10, 0, 0, 0]


def test_a_stuck_job_stops_prefetching():
    pace = pace_after(*[0.0] * 200)
    pace.record_unbegun()
    assert pace.room(0, now=T0) == 4


def test_outage_pauses_grow_to_a_maximum_and_reset_after_success():
    outage_pause = OutagePause("test")
    pauses = [outage_pause.record_failure(OSError("away")) for _ in range(20)]
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    outage_pause.record_success()
    assert outage_pause.record_failure(OSError("away")) <= FIRST_PAUSE_S
