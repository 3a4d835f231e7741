"""Records of the steps, sleeps and waits of a job, and the report of a run that ends until later (ADR 0051, 0052).

Pure: no Django, I/O or clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeGuard

import msgspec

from ..errors import Later
from .payloads import Interruption, Reservation

MAX_STEP_NAME, MAX_STEP_BYTES = 100, 1024 * 1024
"""Maximum characters of the name of a step or signal, and size of its result or payload as JSON."""
FOREVER = datetime(9999, 1, 1, tzinfo=UTC)
"""`run_at` of a job that waits for a signal without a time-out."""


def is_step_name(name: object) -> TypeGuard[str]:
    """Return whether this may be the name of a step or signal."""
    return isinstance(name, str) and 0 < len(name) <= MAX_STEP_NAME and name.isprintable()


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A committed step of a job, how far a walk over rows has come, or a sleep or wait that has begun."""

    name: str
    key: str = ""
    """Tells steps of one name apart, which a loop runs."""
    result: str | None = None
    """JSON of its result; encrypted if the arguments of the job are."""
    ran_s: float = 0.0
    """Seconds from its begin to its commit; of a walk, from its begin in the latest run."""
    reached: str | None = None
    """Place of the last row of a walk that is done, as text; encrypted like the result."""
    done: int | None = None
    """Number of rows of a walk that are done; None for a step."""
    total: int | None = None
    """Number of rows of a walk when it began, if known."""
    is_finished: bool = True
    until: datetime | None = None
    """End of a sleep, or time-out of a wait, `FOREVER` without one; None for others."""
    is_over: bool = False
    """Whether `until` was reached when the record was read."""

    @property
    def kind(self) -> str:
        """Kind of its block."""
        return "walk" if self.done is not None else "step" if self.until is None else "pause"


class Parking(Interruption, frozen=True, kw_only=True, gc=False):
    """Release a job whose task ended its run until later: it uses no attempt (ADR 0052)."""

    in_s: float | None
    """Seconds until the job runs again; None: only a signal ends the wait."""
    pause: tuple[str, str] | None = None
    """Name and key of the sleep or wait to record, unless an earlier run has: then the job waits until its end."""
    waits_for: str | None = None
    """Name of the signal that ends the wait."""
    log: tuple[str, ...] = ()
    """The latest lines that the task logged."""


def parking(job: Reservation, error: Later, log: tuple[str, ...]) -> Parking:
    """Return the report of a job whose task ended its run until later."""
    return Parking(
        jid=job.jid,
        wid=job.wid,
        attempt=job.attempt,
        queue=job.queue,
        errtype=type(error).__name__,
        message=f"{error}; only jobs in this project's database can, so this counts as a failure",
        summary=str(error),
        in_s=error.in_s,
        pause=error.pause,
        waits_for=error.waits_for,
        log=log,
    )
