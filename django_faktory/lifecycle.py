"""A job's life: every state, every event, and what a failure leads to. The only place that knows.

Pure: callers pass the clock's time and the randomness. `TRANSITIONS` is total over the legal pairs;
what is not in it is refused. Source: the protocol specification, "Work unit state diagram"; W14 to W20.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple

from .errors import InvalidTransition

DEAD_FOR_S = 180 * 86_400
MAX_LOSSES = 3

WORKER_LOST = "WorkerLost"
"""Error type of a loss in a job's history."""


class State(StrEnum):
    """Where a job is; spelled as the protocol's own sets are."""

    SCHEDULED = "scheduled"
    ENQUEUED = "enqueued"
    BLOCKED = "blocked"
    """Enqueued, and out of the claims' way: another job holds its lock, or comes before it (ADR 0015)."""
    WORKING = "working"
    RETRIES = "retries"
    DEAD = "dead"
    SUCCEEDED = "succeeded"
    DISCARDED = "discarded"
    EXPIRED = "expired"


class Event(StrEnum):
    """What can happen to a stored job."""

    PUSH = "push"  # a client sends the jid again
    DUE = "due"  # its time has come
    PARK = "park"  # another job holds its lock, or comes before it
    READY = "ready"  # its lock is free, and it is the next
    FETCH = "fetch"  # handed to a worker
    ACK = "ack"  # done, says the worker
    FAIL = "fail"  # failed, says the worker
    REAP = "reap"  # its reservation ran out: counts as a failure
    LOSE = "lose"  # its worker is gone: not its fault
    RELEASE = "release"  # given back: not begun (for now or for later), or interrupted by its worker's stop
    REQUEUE = "requeue"  # a person wants it to run now
    DEFER = "defer"  # a person wants it to run again, at a time of its own
    KILL = "kill"  # a person gives it up
    DISCARD = "discard"  # a person drops it
    EXPIRE = "expire"  # nobody took it in time
    PURGE = "purge"  # kept long enough
    IMPORT = "import"  # comes from another server, with its past
    EXPORT = "export"  # goes to another server


GONE = None
"""The row is deleted; the state of a job nobody stores."""

_failed = frozenset({State.RETRIES, State.DEAD, State.DISCARDED, GONE})
_dropped = frozenset({State.DISCARDED, GONE})
_expired = frozenset({State.EXPIRED, GONE})
_born = frozenset({State.SCHEDULED, State.ENQUEUED, State.BLOCKED})
_ready = frozenset({State.ENQUEUED, State.BLOCKED})

TRANSITIONS: dict[State | None, dict[Event, frozenset[State | None]]] = {
    GONE: {Event.PUSH: _born, Event.IMPORT: _born | {State.RETRIES, State.DEAD}},
    State.SCHEDULED: {
        Event.DUE: _ready,
        Event.REQUEUE: _ready,
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.ENQUEUED: {
        Event.PARK: frozenset({State.BLOCKED}),
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
        Event.RELEASE: _ready | {State.SCHEDULED},
    },
    State.RETRIES: {
        Event.DUE: _ready,
        Event.REQUEUE: _ready,
        Event.DEFER: frozenset({State.RETRIES}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.EXPIRE: _expired,
        Event.EXPORT: frozenset({GONE}),
    },
    State.DEAD: {
        Event.PUSH: _born,
        Event.REQUEUE: _ready,
        Event.DEFER: frozenset({State.RETRIES}),
        Event.KILL: frozenset({State.DEAD}),
        Event.DISCARD: _dropped,
        Event.PURGE: frozenset({GONE}),
        Event.EXPORT: frozenset({GONE}),
    },
    State.SUCCEEDED: {Event.PUSH: _born, Event.PURGE: frozenset({GONE})},
    State.DISCARDED: {Event.PUSH: _born, Event.PURGE: frozenset({GONE})},
    State.EXPIRED: {Event.PUSH: _born, Event.PURGE: frozenset({GONE})},
}

WAITING = frozenset({State.SCHEDULED, State.RETRIES})
LIVE = frozenset({State.SCHEDULED, State.ENQUEUED, State.BLOCKED, State.WORKING, State.RETRIES})
FINISHED = frozenset(State) - LIVE


def sources(event: Event) -> frozenset[State]:
    """The states in which `event` is legal: what a guarded UPDATE names in its WHERE."""
    return frozenset(state for state, events in TRANSITIONS.items() if state is not GONE and event in events)


def targets(state: State | None, event: Event) -> frozenset[State | None]:
    """Where `event` may lead from `state`. Raises InvalidTransition for a pair the table does not have."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise InvalidTransition(f"a job that is {state or 'not stored'} cannot {event}") from None


class Outcome(NamedTuple):
    """What a failure leads to; `retry_in_s` is set where the state is `retries`."""

    state: State | None
    retry_in_s: float | None = None


def outcome_of_failure(
    *, retry: int, failures: int, keep: bool, verdict: str = "", wish_s: float | None = None, rng: Random
) -> Outcome:
    """Decide where a failing job goes (W18).

    `failures` counts those before this one; `keep` is true for jobs whose end must stay readable
    (Django tasks): they become dead or discarded rows where others vanish. `verdict` is the task's
    own ("kill", "discard"), `wish_s` its own delay.
    """
    if verdict == "kill":
        return Outcome(State.DEAD)
    if verdict == "discard":
        return Outcome(State.DISCARDED if keep else GONE)
    if retry == 0:
        return Outcome(State.DEAD if keep else GONE)
    if retry < 0 or failures >= retry:
        return Outcome(State.DEAD)
    return Outcome(State.RETRIES, backoff(failures, rng) if wish_s is None else wish_s)


def backoff(failures: int, rng: Random) -> float:
    """Seconds until the next try after `failures` earlier ones: count⁴ + 15 + rand(0..29)·(count+1) (W18).

    Capped at 30 days, which count 40 reaches: a longer wait helps nobody and overflows dates.
    """
    return float(min(failures**4 + 15 + rng.randrange(30) * (failures + 1), 30 * 86_400))


def outcome_of_loss(losses: int) -> State:
    """Where a job goes whose worker was lost; `losses` counts this one. The third is a poison pill (W20)."""
    return State.DEAD if losses >= MAX_LOSSES else State.ENQUEUED
