"""Recognize jobs that may cause the trouble of their workers: those that lost a worker twice, or met much else.

A job that lost its worker twice runs alone, so that a third loss identifies one job (W20). Reads the job's history,
which a claim returns for jobs that have one, so that plain jobs cost nothing. Another Faktory server sends no history;
its jobs are never suspects.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core import payloads
from ..core.lifecycle import MAX_LOSSES, WORKER_LOST
from ..core.payloads import LATER, Failure, Reservation, parse_instant
from ..errors import InvalidPayload, WorkerTrouble
from ..tasks.results import Attempt, attempts_of, runs_of, since_progress


class SuspectLimits(NamedTuple):
    """Limits of the wait of a suspect for the other jobs of its process."""

    min_wait_s: float = 10.0
    """Minimum seconds that a suspect waits in its process for the other jobs; the process fetches nothing meanwhile."""
    wait_share: float = 0.5
    """The wait grows to this part of the time since the latest loss. Otherwise a suspect would never run if every
    process always has a job that takes a minute."""


DEFAULT_SUSPECT_LIMITS = SuspectLimits()
"""The limits of a worker in production; tests use shorter ones."""

MOST_INTERRUPTIONS = 10
"""Interruptions by one kind of trouble in the history of a job; the next one counts as a failure. A history keeps the
latest ten interruptions of all kinds."""

PAUSE_S = 5.0
"""Seconds until a deferred suspect is ready again; meanwhile the process fetches other jobs."""


def is_suspect(job: Reservation) -> bool:
    """Return whether the next loss of this job makes it dead."""
    # The substring test avoids parsing the histories of other failures.
    return WORKER_LOST in job.history and len(_losses(job)) >= MAX_LOSSES - 1


def has_often_met(job: Reservation, trouble: type[WorkerTrouble]) -> bool:
    """Return whether this trouble has interrupted the job so often that its task may be the cause.

    A statement that is too large for MariaDB, or that crashes the server, looks like an outage to its driver.
    """
    name = trouble.__name__
    if name not in job.history:
        return False
    runs = since_progress(runs_of(job.history))
    return sum(run.is_interruption and run.errtype == name for run in runs) >= MOST_INTERRUPTIONS


def wait_s(job: Reservation, *, limits: SuspectLimits = DEFAULT_SUSPECT_LIMITS) -> float:
    """Return the seconds that this suspect waits for the other jobs of its process to end."""
    losses = _losses(job)
    try:
        lost_at = parse_instant("failed_at", losses[-1].failed_at)
    except (IndexError, InvalidPayload):
        return limits.min_wait_s
    if job.started_at is None or lost_at is None:
        return limits.min_wait_s
    # Both times are from the database's clock: the clock of the node of the earlier attempt may differ.
    return max(limits.min_wait_s, limits.wait_share * (job.started_at - lost_at).total_seconds())


def defer_suspect(job: Reservation) -> Failure:
    """Return the report that releases a suspect for another process or a later time; it uses no retry."""
    return payloads.failure_of(
        job,
        errtype=WORKER_LOST,
        message="it runs alone, and other jobs of this process did not end in time",
        retry_in_s=PAUSE_S,
        verdict=LATER,
    )


def _losses(job: Reservation) -> list[Attempt]:
    return [attempt for attempt in attempts_of(job.history) if attempt.errtype == WORKER_LOST]
