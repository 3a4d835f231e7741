"""How many jobs a worker holds."""

import pytest

from django_faktory.worker.pace import Pace
from django_faktory.worker.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, Patience

pytestmark = pytest.mark.core


def pace_after(*durations, concurrency=4, read_ahead=20):
    pace = Pace(concurrency=concurrency, read_ahead=read_ahead)
    for ran_s in durations:
        pace.ended(ran_s)
    return pace


def test_the_first_job_comes_alone():
    """So that one which kills its process is blamed alone (W20)."""
    assert pace_after().room(0) == 1


def test_it_doubles_from_job_to_job():
    assert [pace_after(*[9.0] * ended).room(0) for ended in (1, 2, 3)] == [2, 4, 4]


def test_slow_jobs_are_not_read_ahead():
    assert pace_after(*[0.5] * 200).room(0) == 4


def test_fast_jobs_are_read_ahead_as_many_as_end_in_a_moment():
    assert pace_after(*[0.019] * 200).room(0) == 4 + 10
    assert pace_after(*[0.0] * 200).room(0) == 4 + 20


def test_nothing_is_read_ahead_where_that_is_not_wanted():
    assert pace_after(*[0.0] * 200, read_ahead=0).room(0) == 4


def test_a_few_more_are_not_worth_a_fetch_unless_a_thread_is_idle():
    pace = pace_after(*[0.0] * 200)
    assert [pace.room(held) for held in (3, 14, 15, 24, 30)] == [21, 10, 0, 0, 0]


def test_jobs_that_got_stuck_end_the_reading_ahead():
    pace = pace_after(*[0.0] * 200)
    pace.got_stuck()
    assert pace.room(0) == 4


def test_pauses_grow_up_to_a_bound_and_begin_anew():
    patience = Patience("test")
    pauses = [patience.after(OSError("away")) for _ in range(20)]
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    patience.rewarded()
    assert patience.after(OSError("away")) <= FIRST_PAUSE_S


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(caplog):
    caplog.set_level("INFO", "django_faktory")
    patience = Patience("fetch")
    for _ in range(3):
        patience.after(OSError("away"))
    patience.rewarded()
    patience.rewarded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
