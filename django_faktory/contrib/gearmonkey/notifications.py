"""Listen for new jobs on the channels of the specification.

A notification only shortens the wait: events get lost, and other peers may send wrong ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from redis import Redis

from ...store.notifier import Listener
from . import lua
from .requests import REDIS_ERRORS

RECHECK_DELAYS_S = (0.005, 0.020, 0.050)
"""Delays in seconds after a notification: the specification publishes `create` before it pushes the job, so the caller
has to read the queues again."""

# Another thread cannot interrupt get_message: it returns this often to notice `close`.
CLOSED_CHECK_S = 0.5


class ChannelListener(Listener):
    """Listener on the functions' channels. One thread waits; any thread may close it."""

    def __init__(self, redis: Redis, fns: Iterable[str]) -> None:
        super().__init__()
        self._redis = redis
        self._channels = [lua.channel(fn) for fn in fns]
        self._pubsub: Any = None
        self._recheck_times: list[float] = []
        self._is_closed = False

    def wait(self, timeout_s: float) -> bool:
        """Return True on a notification, and again after each delay of `RECHECK_DELAYS_S`; False after `timeout_s`."""
        recheck_at = self._recheck_times[0] if self._recheck_times else None
        if recheck_at is not None:
            timeout_s = min(timeout_s, max(0.0, recheck_at - time.monotonic()))
        if self._wait_for_notification(timeout_s):
            now = time.monotonic()
            self._recheck_times = [now + after_s for after_s in RECHECK_DELAYS_S]
            return True
        if recheck_at is None or time.monotonic() < recheck_at:
            return False
        self._recheck_times.pop(0)
        return True

    def close(self) -> None:
        """Make the current and all later waits return."""
        self._is_closed = True

    def _wait_for_notification(self, timeout_s: float) -> bool:
        ends_at = time.monotonic() + timeout_s
        while not self._is_closed:
            remaining_s = ends_at - time.monotonic()
            try:
                if self._pubsub is None:
                    self._pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
                    self._pubsub.subscribe(*self._channels)
                if self._receive_create(max(0.0, min(remaining_s, CLOSED_CHECK_S))):
                    while self._receive_create(0.0):  # one notification is enough: drain the pending ones
                        pass
                    return True
            except (*REDIS_ERRORS, OSError):
                self._unsubscribe()
                # An outage must not become a busy loop. Notifications may be missed: the caller polls (ADR 0013).
                time.sleep(max(0.0, min(remaining_s, 0.1)))
            if remaining_s <= 0:
                return False
        self._unsubscribe()
        return False

    def _receive_create(self, timeout_s: float) -> bool:
        """Return whether a `create` event arrives within the time; skip other events."""
        ends_at = time.monotonic() + timeout_s
        while True:
            message = self._pubsub.get_message(timeout=max(0.0, ends_at - time.monotonic()))
            # The channel has the events of all jobs; only a new job is a reason to read the queues.
            if message and bytes(message.get("data") or b"").startswith(b"create:"):
                return True
            if message is None and time.monotonic() >= ends_at:
                return False

    def _unsubscribe(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
