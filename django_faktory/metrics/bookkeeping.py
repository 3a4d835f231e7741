"""The loop that adds what a process has seen to the database's sums, a few seconds after it happened.

An idle process writes nothing and holds no connection. What cannot be written is kept and tried again.
"""

from __future__ import annotations

import math
import threading
import time

from django.db import connections

from .. import conf
from ..errors import BrokerUnavailable
from ..logs import get_logger
from ..measuring import Recorder
from ..store import measures
from .numbers import read
from .statsd import Statsd, passed, sizes

logger = get_logger(__name__)

EVERY_S = 5.0
SIZES_EVERY_S = 30.0


class Bookkeeper:
    """The loop; `run` is a thread's."""

    def __init__(
        self,
        alias: str,
        recorder: Recorder,
        *,
        every_s: float = EVERY_S,
        statsd: Statsd | None = None,
        tells_sizes: bool = False,
    ) -> None:
        self._alias, self._recorder, self._every_s, self._statsd = alias, recorder, every_s, statsd
        self._tell_sizes_at = 0.0 if tells_sizes else math.inf
        self._stopping = threading.Event()

    def run(self) -> None:
        """Write every few seconds, and once more when stopped."""
        while not self._stopping.wait(self._every_s):
            self.write()
            self.tell_sizes()
        self.write()
        connections[self._alias].close()
        if self._statsd:
            self._statsd.close()

    def stop(self) -> None:
        """Ask the loop to end; from any thread or a signal handler."""
        self._stopping.set()

    def write(self) -> None:
        """Write what was noted since the last time."""
        taken = self._recorder.take()
        if not taken:
            connections[self._alias].close()
            return
        try:
            measures.add(taken, using=self._alias)
            if self._statsd:
                self._statsd.send(passed(taken))
        except Exception as error:  # a loop: says what happened, and goes on
            self._recorder.give_back(taken)
            connections[self._alias].close()
            if isinstance(error, BrokerUnavailable):
                logger.warning("measures wait for the database error=%s", error)
            else:
                logger.exception("measures could not be written")

    def tell_sizes(self) -> None:
        """Let statsd know how much there is of what, where it is time to."""
        if not self._statsd or time.monotonic() < self._tell_sizes_at:
            return
        self._tell_sizes_at = time.monotonic() + SIZES_EVERY_S
        try:
            self._statsd.send(sizes(read(using=self._alias)))
        except Exception:  # a loop: says what happened, and goes on
            logger.exception("sizes could not be read")
            connections[self._alias].close()


def bookkeeper(alias: str | None, recorder: Recorder, *, tells_sizes: bool = False) -> Bookkeeper | None:
    """The loop, as the settings want it; none where jobs are not in a database of this project."""
    if alias is None:
        return None
    address = conf.get("STATSD")
    return Bookkeeper(alias, recorder, statsd=Statsd(address) if address else None, tells_sizes=tells_sizes)
