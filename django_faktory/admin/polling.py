"""Limit the CPU time of pages that update themselves: the more pages are open, the less often each is updated.

The answer to a poll has a header with the factor by which the page waits longer than usual. The next poll returns it.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from .sanitize import View, call_when_rendered

SHARE = 0.05
"""Share of a core that the polls of one process may use."""

WINDOW_S = 60.0
"""Seconds over which the use is averaged."""

HEADER = "X-Faktory-Poll-Factor"
MAX_FACTOR = 1000.0
_factor_pattern = re.compile(r"[0-9]{1,6}(\.[0-9]{1,2})?")


class PollBudget:
    """CPU time of the polls of this process. Thread-safe."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._lock = threading.Lock()
        # Share of a core that the polls would use if every page had the factor 1.
        self._demand = 0.0
        self._updated_at = 0.0

    def record(self, cpu_s: float, now: float, factor: float = 1.0) -> float:
        """Add the CPU seconds of a poll that waited longer by `factor`; return the factor for the next one."""
        with self._lock:
            self._demand *= math.exp((self._updated_at - now) / WINDOW_S)
            self._updated_at = now
            # Without the factor the page would have polled that many times more.
            self._demand += cpu_s * factor / WINDOW_S
            return min(max(1.0, self._demand / self._share), MAX_FACTOR)


budget = PollBudget()


def _replace_budget() -> None:
    global budget  # noqa: PLW0603
    budget = PollBudget()


# A forked process has its own share, and another thread of the parent may have held the lock.
os.register_at_fork(after_in_child=_replace_budget)


def _read_factor(request: HttpRequest) -> float:
    text = request.headers.get(HEADER, "")
    # The script sends at most what an answer had; any other text counts as none.
    return min(float(text), MAX_FACTOR) if _factor_pattern.fullmatch(text) else 1.0


def with_poll_factor(view: View) -> View:
    """Wrap a view so that its answers to polls have the header with the factor."""

    @wraps(view)
    def measured_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.headers.get("X-Requested-With") != "fetch":
            return view(request, *args, **kwargs)
        began_s = time.thread_time()

        def add_header(response: HttpResponse) -> None:
            factor = budget.record(time.thread_time() - began_s, time.monotonic(), _read_factor(request))
            response.headers[HEADER] = f"{factor:.2f}"

        response = view(request, *args, **kwargs)
        # Rendering, which takes most of the time, follows later in the same thread.
        call_when_rendered(response, add_header)
        return response

    return measured_view
