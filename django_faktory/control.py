"""What a running job and its worker tell each other: cancel, and how far it is. Cheap to read, safe from any thread.

Pure. The worker's own kind of it, which can also stop the job, is `worker.stopping.Stoppable`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite


class Control:
    """Of one attempt at one job."""

    __slots__ = ("is_cancelled", "knows_of_cancel", "tell")

    def __init__(self) -> None:
        self.is_cancelled = False
        """Whether somebody wants it cancelled."""
        self.knows_of_cancel = False
        """Whether the task has asked, and was told so."""
        self.tell: Callable[[int, str], None] | None = None
        """Takes percent and note; None where nobody listens."""

    def asked(self) -> bool:
        """Whether the job is cancelled, for the task to hear."""
        if self.is_cancelled:
            self.knows_of_cancel = True
        return self.is_cancelled

    def progress(self, done: float, total: float, note: str) -> None:
        """Tell how far it is; more than all of it counts as all."""
        if not (isfinite(done) and isfinite(total) and done >= 0 and total > 0):
            raise ValueError(f"progress: expected done from 0 and total above 0, got {done!r} of {total!r}")
        if self.tell is not None:
            self.tell(int(min(100 * done / total, 100)), note)
