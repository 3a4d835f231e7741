"""The state table of jobs: every (state, event) pair, every outcome of a failure, and the bounds of the backoff."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.lifecycle import (
    DELAYED,
    FINISHED,
    GONE,
    UNFINISHED,
    Event,
    State,
    outcome_of_failure,
    outcome_of_loss,
    retry_delay_s,
    sources,
    targets,
)
from django_faktory.errors import InvalidTransition

pytestmark = pytest.mark.core

FAILED = {State.RETRIES, State.DEAD, State.DISCARDED, GONE}
BORN = {State.SCHEDULED, State.ENQUEUED, State.BLOCKED}
READY = {State.ENQUEUED, State.BLOCKED}
DROPPED = {State.DISCARDED, GONE}
LATE = {State.EXPIRED, GONE}

# A second copy, written manually, so that a change of the table must be deliberate.
LEGAL = {
    (GONE, "push"): BORN,
    (GONE, "import"): {*BORN, "retries", "dead"},
    ("scheduled", "export"): {GONE},
    ("enqueued", "export"): {GONE},
    ("blocked", "export"): {GONE},
    ("retries", "export"): {GONE},
    ("dead", "export"): {GONE},
    ("scheduled", "due"): READY,
    ("scheduled", "requeue"): READY,
    ("scheduled", "kill"): {"dead"},
    ("scheduled", "discard"): DROPPED,
    ("scheduled", "expire"): LATE,
    ("enqueued", "block"): {"blocked"},
    ("blocked", "ready"): {"enqueued"},
    ("blocked", "kill"): {"dead"},
    ("blocked", "discard"): DROPPED,
    ("blocked", "expire"): LATE,
    ("enqueued", "fetch"): {"working"},
    ("enqueued", "kill"): {"dead"},
    ("enqueued", "discard"): DROPPED,
    ("enqueued", "expire"): LATE,
    ("working", "ack"): {"succeeded", GONE},
    ("working", "fail"): FAILED,
    ("working", "reap"): FAILED,
    ("working", "lose"): {"enqueued", "dead"},
    ("working", "release"): {*READY, "scheduled"},
    ("retries", "due"): READY,
    ("retries", "requeue"): READY,
    ("retries", "defer"): {"retries"},
    ("retries", "kill"): {"dead"},
    ("retries", "discard"): DROPPED,
    ("retries", "expire"): LATE,
    ("dead", "push"): BORN,
    ("dead", "requeue"): READY,
    ("dead", "defer"): {"retries"},
    ("dead", "kill"): {"dead"},
    ("dead", "discard"): DROPPED,
    ("dead", "purge"): {GONE},
    ("succeeded", "purge"): {GONE},
    ("discarded", "purge"): {GONE},
    ("expired", "purge"): {GONE},
}


@pytest.mark.parametrize("event", Event, ids=str)
@pytest.mark.parametrize("state", [GONE, *State], ids=str)
def test_each_state_and_event_pair_is_allowed_or_refused_as_listed(state, event):
    if (state, event) in LEGAL:
        assert targets(state, event) == LEGAL[state, event]
        assert state is GONE or state in sources(event)
    else:
        assert state not in sources(event)
        with pytest.raises(InvalidTransition, match=f"a job that is {state or 'not stored'} cannot {event}"):
            targets(state, event)


def test_state_names_match_the_protocol():
    assert [str(state) for state in State] == [
        "scheduled", "enqueued", "blocked", "working", "retries", "dead", "succeeded", "discarded", "expired",
    ]  # fmt: skip


def test_every_state_is_live_or_finished_and_waiting_ones_are_live():
    assert set(State) == UNFINISHED | FINISHED
    assert not UNFINISHED & FINISHED
    assert DELAYED <= UNFINISHED


@pytest.mark.parametrize(
    ("retry", "failures", "keep", "verdict", "state"),
    [
        # the task's verdict takes precedence over retry counts
        (25, 0, False, "kill", State.DEAD),
        (0, 0, False, "kill", State.DEAD),
        (25, 0, False, "discard", GONE),
        (25, 0, True, "discard", State.DISCARDED),
        (-1, 0, True, "discard", State.DISCARDED),
        # 0: dropped, or kept if its end must stay readable
        (0, 0, False, "", GONE),
        (0, 0, True, "", State.DEAD),
        # negative: dead at once
        (-1, 0, False, "", State.DEAD),
        (-9, 0, True, "", State.DEAD),
        # counted: one failure more than retries
        (1, 0, False, "", State.RETRIES),
        (1, 1, False, "", State.DEAD),
        (1, 2, False, "", State.DEAD),
        (25, 24, True, "", State.RETRIES),
        (25, 25, True, "", State.DEAD),
    ],
)
def test_a_failure_leads_to_the_state_set_by_retry_count_and_verdict(retry, failures, keep, verdict, state):
    """W18: state after a failure, and whether a retry is scheduled."""
    outcome = outcome_of_failure(retry=retry, failures=failures, keep=keep, verdict=verdict, rng=Random(1))
    assert outcome.state == state
    assert (outcome.retry_in_s is not None) is (state is State.RETRIES)
    assert state in targets(State.WORKING, Event.FAIL)


@pytest.mark.parametrize("delay_s", [0.0, 0.25, 86_400.0])
def test_a_task_can_choose_the_retry_delay_but_not_an_extra_retry(delay_s):
    first = outcome_of_failure(retry=1, failures=0, keep=True, delay_s=delay_s, rng=Random(1))
    last = outcome_of_failure(retry=1, failures=1, keep=True, delay_s=delay_s, rng=Random(1))
    assert (first, last) == ((State.RETRIES, delay_s), (State.DEAD, None))


class Chance(Random):
    """A random generator that always returns the same end of the range."""

    def __init__(self, *, is_high):
        super().__init__()
        self.is_high = is_high

    def randrange(self, stop):
        return stop - 1 if self.is_high else 0


@pytest.mark.parametrize(
    ("failures", "soonest", "latest"),
    [
        (0, 15, 15 + 29),
        (1, 16, 16 + 29 * 2),
        (2, 31, 31 + 29 * 3),
        (5, 640, 640 + 29 * 6),
        (10, 10_015, 10_015 + 29 * 11),
        (24, 331_791, 331_791 + 29 * 25),
    ],
)
def test_the_backoff_matches_the_original_server(failures, soonest, latest):
    """W18: bounds as measured on the original server."""
    assert retry_delay_s(failures, Chance(is_high=False)) == soonest
    assert retry_delay_s(failures, Chance(is_high=True)) == latest
    drawn = {retry_delay_s(failures, Random(seed)) for seed in range(1000)}
    assert (min(drawn), max(drawn), len(drawn)) == (soonest, latest, 30)


@given(st.integers(0, 10_000))
def test_the_backoff_never_shrinks_and_is_capped_at_30_days(failures):
    now = retry_delay_s(failures, Chance(is_high=False))
    assert now <= retry_delay_s(failures + 1, Chance(is_high=False)) <= 30 * 86_400
    assert retry_delay_s(failures, Chance(is_high=True)) <= 30 * 86_400
    assert (now == 30 * 86_400) is (failures >= 41)


@pytest.mark.parametrize(("losses", "state"), [(1, "enqueued"), (2, "enqueued"), (3, "dead"), (4, "dead")])
def test_a_job_is_dead_after_losing_its_worker_three_times(losses, state):
    """W20: a job that loses its worker a third time is dead."""
    assert outcome_of_loss(losses) == state
    assert state in targets(State.WORKING, Event.LOSE)
