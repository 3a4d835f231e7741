"""What a running job and its worker tell each other: cancel, and how far it is. Cheap to read, safe from any thread.

Pure. The worker's own kind of it, which can also stop the job, is `worker.stopping.Stoppable`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from math import isfinite

Part = tuple[int, int] | None
"""So much of so much."""


class Control:
    """Of one attempt at one job."""

    __slots__ = ("bid", "is_cancelled", "knows_of_cancel", "lock_token", "lost_locks", "tell", "wid")

    def __init__(self) -> None:
        self.bid = ""
        """The batch it is a member of, if any."""
        self.wid = ""
        """Who runs it."""
        self.is_cancelled = False
        """Whether somebody wants it cancelled."""
        self.knows_of_cancel = False
        """Whether the task has asked, and was told so."""
        self.tell: Callable[[int, str, Part], None] | None = None
        """Takes percent, note and, where whole numbers were told, those; None where nobody listens."""

        self.lock_token: int | None = None
        """Of the lock its job was given, if any."""
        self.lost_locks: Container[int] = ()
        """Tokens of locks that are others' by now."""

    @property
    def lock_lost(self) -> bool:
        """Whether the lock was lost: another job of its key may run."""
        return self.lock_token in self.lost_locks

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
            part = (min(done, total), total) if isinstance(done, int) and isinstance(total, int) else None
            self.tell(int(min(100 * done / total, 100)), note, part)
