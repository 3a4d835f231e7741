"""Wait for other threads and processes by polling a condition, never by a fixed sleep."""

import time


def wait_until(predicate, timeout_s=10, *, every_s=0.01, what=""):
    """Return the first true value of `predicate()`; raise AssertionError after `timeout_s`, naming the condition."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {timeout_s} s: {what or predicate}; last seen: {value!r:.200}")
        time.sleep(every_s)
