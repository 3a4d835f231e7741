"""The state machine of jobs: states, events, legal transitions, and the outcome of a failure.

Pure: callers pass the clock's time and the randomness. `TRANSITIONS` has every legal pair; any other pair is rejected.
No other module defines a transition. Source: the protocol specification, "Work unit state diagram"; W14 to W20.
"""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from random import Random
from typing import NamedTuple

from ..errors import InvalidTransition

DEAD_FOR_S = 180 * 86_400
"""Seconds a dead job is kept: 180 days."""
KEPT = date(1970, 1, 1)
"""Day of ended jobs that are deleted one by one: those that stay much longer than others of their day (ADR 0049)."""
CLAIMS_OF_ROW = 1 << 20
"""Distance between the attempts of two rows: the first claim of a row has its id times this, plus one.

So no two runs of a jid have an attempt in common, and a PUSH need not read the earlier ones (ADR 0048).
"""
MAX_LOSSES = 3
"""Losses of its worker after which a job becomes dead (W20)."""

WORKER_LOST = "WorkerLost"
"""Error type of a lost worker in a job's history."""


class State(StrEnum):
    """State of a job; spelled like the protocol's sets."""

    SCHEDULED = "scheduled"
    ENQUEUED = "enqueued"
    BLOCKED = "blocked"
    """Enqueued, but not claimable: a lock (ADR 0015), an earlier job of its key or a limiter (ADR 0016) blocks it."""
    WORKING = "working"
    RETRIES = "retries"
    DEAD = "dead"
    SUCCEEDED = "succeeded"
    DISCARDED = "discarded"
    EXPIRED = "expired"


class Event(StrEnum):
    """Every event that can change a stored job."""

    PUSH = "push"  # a client pushes the jid, again or for the first time
    DUE = "due"  # its `run_at` is reached
    BLOCK = "block"  # a lock, an earlier job of its key or a limiter blocks it
    READY = "ready"  # it is the next job for its lock or limiter
    FETCH = "fetch"  # claimed for a worker
    ACK = "ack"  # the worker reports success
    FAIL = "fail"  # the worker reports a failure
    REAP = "reap"  # its reservation expired: counts as a failure
    LOSE = "lose"  # its worker was lost: uses no retry
    RELEASE = "release"  # released: not begun (run now or later), or interrupted by its worker's stop
    REQUEUE = "requeue"  # a user or client wants it to run now
    DEFER = "defer"  # a user wants it to run again at a given time
    KILL = "kill"  # a user or client moves it to the dead set
    DISCARD = "discard"  # a user or client drops it
    EXPIRE = "expire"  # no worker took it in time
    PURGE = "purge"  # its retention time is over
    IMPORT = "import"  # received from another server, with its history
    EXPORT = "export"  # moved to another server


GONE = None
"""Target state of a deleted row; the state of a job that is not stored."""

# A job that ends is also listed as GONE: its row is kept only if it has a result to keep (`outcome_of_failure`).
_failed = frozenset({State.RETRIES, State.DEAD, State.DISCARDED, GONE})
_dropped = frozenset({State.DISCARDED, GONE})
_expired = frozenset({State.EXPIRED, GONE})
_after_push = frozenset({State.SCHEDULED, State.ENQUEUED, State.BLOCKED})
_runnable = frozenset({State.ENQUEUED, State.BLOCKED})

TRANSITIONS: dict[State | None, dict[Event, frozenset[State | None]]] = {
    GONE: {Event.PUSH: _after_push, Event.IMPORT: _after_push | {State.RETRIES, State.DEAD}},
    State.SCHEDULED: {
        Event.DUE: _runnable,
        Event.REQUEUE: _runnable,
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.ENQUEUED: {
        Event.BLOCK: frozenset({State.BLOCKED}),
        Event.FETCH: frozenset({State.WORKING}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.BLOCKED: {
        Event.READY: frozenset({State.ENQUEUED}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.WORKING: {
        Event.ACK: frozenset({State.SUCCEEDED, GONE}),
        Event.FAIL: _failed,
        Event.REAP: _failed,
        Event.LOSE: frozenset({State.ENQUEUED, State.DEAD}),
        Event.RELEASE: _runnable | {State.SCHEDULED},
    },
    State.RETRIES: {
        Event.DUE: _runnable,
        Event.REQUEUE: _runnable,
        Event.DEFER: frozenset({State.RETRIES}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.DEAD: {
        Event.PUSH: _after_push,
        Event.REQUEUE: _runnable,
        Event.DEFER: frozenset({State.RETRIES}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.PURGE: frozenset({GONE}),
        Event.EXPORT: frozenset({GONE}),
    },
    # A PUSH of the jid stores a new job, and leaves the ended one where it is.
    State.SUCCEEDED: {Event.PURGE: frozenset({GONE})},
    State.DISCARDED: {Event.PURGE: frozenset({GONE})},
    State.EXPIRED: {Event.PURGE: frozenset({GONE})},
}

DELAYED = frozenset({State.SCHEDULED, State.RETRIES})
"""States of jobs that wait for their time; jobs that wait for a worker are `enqueued`."""

FAILED = (State.RETRIES, State.DEAD)
"""States of jobs whose latest run failed, or that were killed: their rows have the time of it."""

UNFINISHED = frozenset({State.SCHEDULED, State.ENQUEUED, State.BLOCKED, State.WORKING, State.RETRIES})
FINISHED = frozenset(State) - UNFINISHED
ENDED = FINISHED - {State.DEAD}
"""States of jobs that have ended for good: nothing but their retention follows, and their rows are history."""


def sources(event: Event) -> frozenset[State]:
    """Return the states in which `event` is legal: a guarded UPDATE names them in its WHERE clause."""
    return frozenset(state for state, events in TRANSITIONS.items() if state is not GONE and event in events)


def targets(state: State | None, event: Event) -> frozenset[State | None]:
    """Return the states to which `event` may lead from `state`. Raises InvalidTransition for an illegal pair."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise InvalidTransition(
            "a job that is %(state)s cannot %(event)s", state=state or "not stored", event=event
        ) from None


class FailureOutcome(NamedTuple):
    """Result of a failure; `retry_in_s` is set if the state is `retries`."""

    state: State | None
    retry_in_s: float | None = None


def outcome_of_failure(
    *, retry: int, failures: int, keep: bool, verdict: str = "", delay_s: float | None = None, rng: Random
) -> FailureOutcome:
    """Return the new state of a failed job (W18).

    `failures` counts the failures before this one. `keep` is true for jobs with results (Django tasks):
    they become dead or discarded rows where other jobs are deleted. `verdict` is the task's own decision ("kill",
    "discard"), `delay_s` its own delay.
    """
    if verdict == "kill":
        return FailureOutcome(State.DEAD)
    if verdict == "discard":
        return FailureOutcome(State.DISCARDED if keep else GONE)
    if retry == 0:
        return FailureOutcome(State.DEAD if keep else GONE)
    if retry < 0 or failures >= retry:
        return FailureOutcome(State.DEAD)
    return FailureOutcome(State.RETRIES, retry_delay_s(failures, rng) if delay_s is None else delay_s)


def retry_delay_s(failures: int, rng: Random) -> float:
    """Return the seconds until the next attempt: failures⁴ + 15 + rand(0..29)·(failures+1) (W18).

    `failures` counts the earlier ones. Capped at 30 days, which 41 failures reach: a longer delay could overflow dates.
    """
    return float(min(failures**4 + 15 + rng.randrange(30) * (failures + 1), 30 * 86_400))


def count_claims(attempt: int) -> int:
    """Return the number of claims of a row that has this `attempt`."""
    return attempt % CLAIMS_OF_ROW


def outcome_of_loss(losses: int) -> State:
    """Return the new state of a job after its worker was lost; `losses` includes this loss.

    After the third loss the job is dead, because it may be the cause of the losses (W20).
    """
    return State.DEAD if losses >= MAX_LOSSES else State.ENQUEUED
