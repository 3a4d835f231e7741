"""Decide when a worker process is replaced: after a number of jobs or above a memory size (`RecyclePolicy`).

Counted after each job, never during one. Does not end the process itself. Rules: `docs/workers.md`, "Recycling
processes".
"""

from __future__ import annotations

import threading
from random import Random

from ..core.logs import get_logger
from .heartbeat import rss_kb

logger = get_logger(__name__)

SPREAD = 4
"""The number of jobs grows by a random part of up to one fourth, so that processes started together do not end
together.
"""

_rng = Random()


class RecyclePolicy:
    """The bounds of one process; None means no bound. `max_rss` is in MB (1024 KB) of resident memory."""

    def __init__(self, *, max_jobs: int | None = None, max_rss: int | None = None, rng: Random = _rng) -> None:
        self._max_jobs = None if max_jobs is None else max_jobs + rng.randrange(max_jobs // SPREAD + 1)
        self._max_rss = max_rss
        self._jobs = 0
        self._has_returned_reason = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Drop a memory bound that is exceeded before the first job.

        Such a bound is a mistake, and would replace the process endlessly.
        """
        if self._max_rss is not None and _rss_mb() > self._max_rss:
            logger.error(
                "a worker takes %d MB before its first job, and MAX_RSS is %d MB: it would be replaced endlessly, "
                "so MAX_RSS is ignored; increase it",
                *(_rss_mb(), self._max_rss),
            )
            self._max_rss = None

    def count_job(self) -> str:
        """Count an ended job; return the reason once when a bound is reached, else ""."""
        # The usual case, without the lock: threads need not wait for each other at the end of each job.
        if self._max_jobs is None and self._max_rss is None:
            return ""
        with self._lock:
            self._jobs += 1
            # Only once: jobs that end while the worker already leaves must not order its replacement again.
            reason = "" if self._has_returned_reason else self._find_reason()
            self._has_returned_reason |= reason != ""
        return reason

    def _find_reason(self) -> str:
        if self._max_jobs is not None and self._jobs >= self._max_jobs:
            return f"it ran {self._jobs} job{'' if self._jobs == 1 else 's'}"
        if self._max_rss is not None and (rss := _rss_mb()) > self._max_rss:
            return f"it takes {rss} MB, MAX_RSS is {self._max_rss}"
        return ""


def _rss_mb() -> int:
    return rss_kb() // 1024
