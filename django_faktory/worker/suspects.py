"""Recognize jobs whose worker was lost twice. Each runs alone, so that a third loss blames one job (W20).

The losses are read from the job's history, which a claim carries for jobs that have one: plain jobs cost nothing. A
Faktory server elsewhere sends no history; its jobs are never suspects.
"""

from __future__ import annotations

from .. import payloads
from ..errors import InvalidPayload
from ..lifecycle import MAX_LOSSES, WORKER_LOST
from ..payloads import Failure, Reservation, parse_instant
from ..results import Attempt, attempts_of

WAIT_S = 10.0
"""How long a suspect waits at least in its process for the other jobs to end; the process fetches nothing meanwhile."""

SHARE = 0.5
"""It waits longer, the longer it has had no process of its own: for this part of the time since its latest loss. Or it
would never run where every process always has a job of a minute."""

PAUSE_S = 5.0
"""Before it is ready again after it was put off: the process that had no time for it fetches other jobs."""


def is_suspect(job: Reservation) -> bool:
    """Whether the next loss of this job is its last."""
    return WORKER_LOST in job.history and len(_losses(job)) >= MAX_LOSSES - 1


def wait_s(job: Reservation) -> float:
    """Return how long this suspect waits for the other jobs of its process to end."""
    losses = _losses(job)
    try:
        lost_at = parse_instant("failed_at", losses[-1].failed_at)
    except (IndexError, InvalidPayload):
        return WAIT_S
    if job.started_at is None or lost_at is None:
        return WAIT_S
    return max(WAIT_S, SHARE * (job.started_at - lost_at).total_seconds())


def put_off(job: Reservation) -> Failure:
    """Return the report that gives a suspect back for another process or a later time; it uses no retry."""
    return payloads.failure(
        jid=job.jid,
        wid=job.wid,
        attempt=job.attempt,
        errtype=WORKER_LOST,
        message="it runs alone, and other jobs of this process did not end in time",
        retry_in_s=PAUSE_S,
        verdict="later",
    )


def _losses(job: Reservation) -> list[Attempt]:
    return [attempt for attempt in attempts_of(job.history) if attempt.errtype == WORKER_LOST]
