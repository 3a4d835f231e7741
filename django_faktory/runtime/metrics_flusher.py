"""Add the counts and times of this process to the sums in the database every few seconds (`MetricsFlusher`).

An idle process writes nothing and has no connection. Metrics of a failed write are kept and written later.
"""

from __future__ import annotations

import math
import time

from django.db import connections

from .. import conf
from ..core.histograms import Recorder
from ..core.logs import get_logger
from ..errors import BrokerUnavailable
from ..operations.statistics import read
from ..store import sharing
from ..store.outages import of_this_node
from ..store.statistics import histograms
from .background_loops import Loop
from .statsd import Statsd, format_job_counts, format_sizes

logger = get_logger(__name__)

EVERY_S = 5.0
"""Seconds between two writes of an active process."""

SIZES_EVERY_S = 30.0
"""Seconds between two reports of sizes to statsd."""


class MetricsFlusher(Loop):
    """Write the metrics of `recorder` in a loop.

    They are also sent to `statsd`, if given; with `sends_sizes` the sizes of queues and sets too.
    """

    def __init__(
        self,
        alias: str,
        recorder: Recorder,
        *,
        every_s: float = EVERY_S,
        statsd: Statsd | None = None,
        sends_sizes: bool = False,
    ) -> None:
        super().__init__()
        self._alias, self._recorder, self._every_s, self._statsd = alias, recorder, every_s, statsd
        self._send_sizes_at = 0.0 if sends_sizes else math.inf

    def run(self) -> None:
        """Write every `every_s` seconds, and once more when stopped."""
        while not self._stopping.wait(self._every_s):
            self.write()
            self.send_sizes()
            sharing.give_back()
        self.write()
        connections[self._alias].close()
        if self._statsd:
            self._statsd.close()

    def write(self) -> None:
        """Write the metrics recorded since the last call; on an error keep them for the next call."""
        series = self._recorder.take()
        if not series:
            # An idle process must not occupy a connection.
            connections[self._alias].close()
            return
        try:
            # The database first: metrics of a failed write are sent again later, and statsd would count them twice.
            histograms.add(series, using=self._alias)
            if self._statsd:
                self._statsd.send(format_job_counts(series))
        except Exception as error:  # the loop must survive any error
            self._recorder.restore(series)
            connections[self._alias].close()
            if isinstance(error, BrokerUnavailable):
                of_this_node.record_failure("metrics", error)
            else:
                logger.exception("metrics could not be written")

    def send_sizes(self) -> None:
        """Send the sizes of queues and sets to statsd if the next report is due."""
        if not self._statsd or time.monotonic() < self._send_sizes_at:
            return
        # Set before the read, so that errors are not repeated at each round.
        self._send_sizes_at = time.monotonic() + SIZES_EVERY_S
        try:
            self._statsd.send(format_sizes(read(using=self._alias)))
        except Exception:  # the loop must survive any error
            logger.exception("sizes could not be read")
            connections[self._alias].close()


def make_metrics_flusher(alias: str | None, recorder: Recorder, *, sends_sizes: bool = False) -> MetricsFlusher | None:
    """Return the flusher that the settings configure; None if the jobs are on another server."""
    if alias is None:
        return None
    address = conf.get("STATSD")
    return MetricsFlusher(alias, recorder, statsd=Statsd(address) if address else None, sends_sizes=sends_sizes)
