"""Wait for other threads and processes by polling a condition, never by a fixed sleep."""

import os
import time

LONGEST_WAIT_S = float(os.environ.get("FAKTORY_TEST_WAIT", "60"))
"""How long a condition may take. `scripts/planted.py` lowers it: with a defect many conditions never become true."""

FIRST_S, LONGEST_S = 0.005, 0.05
"""Pauses between two polls: they grow with the time waited, because most conditions query a database."""


def wait_until(predicate, timeout_s=LONGEST_WAIT_S, *, every_s=None, what=""):
    """Return the first true value of `predicate()`; raise AssertionError after `timeout_s`, naming the condition.

    Pass less than 60 s if a poll, lease or lock timeout of the code would make it true within that time.
    """
    begun = time.monotonic()
    while True:
        value = predicate()
        if value:
            return value
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise AssertionError(f"not true within {timeout_s} s: {what or predicate}; last seen: {value!r:.200}")
        time.sleep(every_s or min(max(waited / 4, FIRST_S), LONGEST_S))
