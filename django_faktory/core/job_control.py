"""State shared by a running job and its worker: cancellation, progress, steps and lost locks.

Pure, cheap to read, safe from any thread. The worker's subclass, which can also interrupt the job, is
`worker.interrupt.InterruptibleControl`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from math import isfinite
from typing import Any, NoReturn

from ..errors import FaktoryError

Part = tuple[int, int] | None
"""Progress as (done, total) in whole numbers."""


class Control:
    """The control state of one attempt at one job."""

    # Slots: a worker creates one instance for each job it runs.
    __slots__ = (
        "bid", "has_progressed", "has_seen_cancel", "is_cancelled", "is_ending", "lock_token", "lost_locks", "reason",
        "report_progress", "steps", "wid",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bid = ""
        """The bid of the batch the job is a member of; "" if none."""
        self.wid = ""
        """The wid of the worker that runs the job."""
        self.is_cancelled = False
        """Whether a cancellation was requested."""
        self.has_seen_cancel = False
        """Whether the task has called `check_cancelled` after that, so that a normal return counts as discarded."""
        self.report_progress: Callable[[int, str, Part], None] | None = None
        """Callback for progress: percent, note, and (done, total) if both were whole numbers. None if progress is not
        recorded.
        """

        self.lock_token: int | None = None
        """Token of the lock that the job has; None without a lock."""
        self.lost_locks: Container[int] = ()
        """Tokens of lost locks, whose keys other jobs may have now."""
        self.steps: Any = None
        """The steps of the run, a `tasks.steps.Steps`; None if no worker runs the task."""
        self.has_progressed = False
        """Whether the run has committed a step."""
        self.is_ending: Callable[[], bool] = bool
        """Returns whether the worker stops, so that a walk should end behind its open chunk."""
        self.reason: FaktoryError | None = None
        """Why the job was stopped; None if it was not."""

    @property
    def lock_lost(self) -> bool:
        """Return whether the lock was lost, so that another job with its key may be running."""
        return self.lock_token in self.lost_locks

    def end(self, reason: FaktoryError) -> NoReturn:
        """End the task from its own thread."""
        raise reason

    def check_cancelled(self) -> bool:
        """Return whether the job is cancelled, and remember that the task has seen it."""
        if self.is_cancelled:
            self.has_seen_cancel = True
        return self.is_cancelled

    def progress(self, done: float, total: float, note: str) -> None:
        """Report progress; `done` above `total` counts as `total`. Raises ValueError."""
        if not (isfinite(done) and isfinite(total) and done >= 0 and total > 0):
            raise ValueError(f"progress: expected done from 0 and total above 0, got {done!r} of {total!r}")
        if self.report_progress is not None:
            # Whole numbers are passed on as well, so that "3 of 7" can be shown.
            part = (min(done, total), total) if isinstance(done, int) and isinstance(total, int) else None
            self.report_progress(int(min(100 * done / total, 100)), note, part)
