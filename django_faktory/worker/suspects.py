"""Recognize jobs whose worker was lost twice. Each runs alone, so that a third loss blames one job (W20).

The losses are read from the job's history, which a claim carries for jobs that have one: plain jobs cost nothing. A
Faktory server elsewhere sends no history; its jobs are never suspects.
"""

from __future__ import annotations

from .. import payloads
from ..lifecycle import MAX_LOSSES, WORKER_LOST
from ..payloads import Failure, Reservation
from ..results import Attempt, attempts_of

WAIT_S = 10.0
"""How long a suspect waits in its process for the other jobs to end. The process fetches nothing meanwhile."""

MOST_TRIES = 12
"""A suspect that was put off so many times since its latest loss runs as other jobs do, or it could wait for as long as
every process has a long job: about six minutes of waiting."""

LONGEST_PAUSE_S = 30.0


def is_suspect(job: Reservation) -> bool:
    """Whether the next loss of this job is its last, and it has not been put off too often."""
    if not job.history or WORKER_LOST not in job.history:
        return False
    losses = _losses(job)
    return len(losses) >= MAX_LOSSES - 1 and _tries(job, losses) < MOST_TRIES


def put_off(job: Reservation) -> Failure:
    """Return the report that gives a suspect back for another process or a later time; it uses no retry."""
    return payloads.failure(
        jid=job.jid,
        wid=job.wid,
        attempt=job.attempt,
        errtype=WORKER_LOST,
        message="it runs alone, and other jobs of this process did not end in time",
        retry_in_s=min(2.0 ** _tries(job, _losses(job)), LONGEST_PAUSE_S),
        verdict="later",
    )


def _losses(job: Reservation) -> list[Attempt]:
    return [attempt for attempt in attempts_of(job.history) if attempt.errtype == WORKER_LOST]


def _tries(job: Reservation, losses: list[Attempt]) -> int:
    """How often the job was claimed and not begun since its latest loss: each claim has a number of its own."""
    return max(0, job.attempt - losses[-1].attempt - 1)
