"""Track claims that got no reply: the database may have committed them although no worker received the jobs.

Each claim has a random number that is stored in the rows it takes (`Job.claim`). `ClaimNumbers` keeps the numbers of
claims that ended with an error; the broker releases their jobs by number (ADR 0017).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

CHECK_DELAYS_S = (0.0, 5.0, 30.0)
"""Delays of the checks for one claim: the server may still be executing it after its connection was lost."""

RECHECK_DELAY_S = 5.0
"""Delay of the next check after one that failed."""

NUMBERS_PER_DRAW = 64
"""Numbers drawn per system call: each call to `os.urandom` releases the GIL to other threads."""

# The sign has a meaning of its own: a claim is negative until its delivery is confirmed (ADR 0026).
_BYTES = 8
_POSITIVE = 2**63 - 1

_drawn: list[int] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drawn.clear)  # two processes must not use the same number


class ClaimNumbers:
    """The claim numbers of one broker that still have to be checked. Thread-safe."""

    def __init__(self) -> None:
        self._due: dict[int, list[float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def numbered(self) -> Iterator[int]:
        """Provide the number for the claims made inside the block; schedule checks for it if the block raises."""
        number = self.number()
        try:
            yield number
        except BaseException:  # KeyboardInterrupt and interruptions of tasks too: the claim may be committed
            self.schedule_checks(number)
            raise

    def number(self) -> int:
        """Return an unused number. The caller must call `schedule_checks` if its claim gets no reply."""
        # `list.pop` is atomic under the GIL, so the lock is not needed here.
        try:
            return _drawn.pop()
        except IndexError:
            random_bytes = os.urandom(NUMBERS_PER_DRAW * _BYTES)
            first, *others = (
                int.from_bytes(random_bytes[at : at + _BYTES]) & _POSITIVE for at in range(0, len(random_bytes), _BYTES)
            )
            _drawn.extend(others)
            return first

    def has_checks_left(self) -> bool:
        """Return True if at least one number still has checks left, due or not."""
        return bool(self._due)

    def take_due(self) -> list[int]:
        """Return the numbers to check now. Cheap if there are none.

        Each number is returned to one caller only, which must call `retry_checks` if its check fails.
        """
        if not self._due:
            return []
        with self._lock:
            now = time.monotonic()
            taken = [number for number, times in self._due.items() if times[0] <= now]
            for number in taken:
                if len(times := self._due[number]) > 1:
                    del times[0]
                else:
                    del self._due[number]
            return taken

    def retry_checks(self, numbers: Collection[int]) -> None:
        """Schedule another check of these numbers in `RECHECK_DELAY_S`, after a check that failed."""
        with self._lock:
            again_at = time.monotonic() + RECHECK_DELAY_S
            for number in numbers:
                self._due[number] = [again_at, *self._due.get(number, [])]

    def schedule_checks(self, number: int) -> None:
        """Schedule checks for this number: its claim may be committed although no reply came."""
        with self._lock:
            now = time.monotonic()
            self._due[number] = [now + after_s for after_s in CHECK_DELAYS_S]
