"""Send metrics to statsd over UDP (`Statsd`), with Faktory's names and DogStatsD's tags.

Over UDP, a slow or missing statsd delays no job. Counts and times are sent every few seconds by the process that
recorded them, sizes every 30 s by each server. Source of the names:
https://github.com/contribsys/faktory/issues/261 and /515.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping

from ..core.histograms import Series
from ..core.logs import get_logger
from ..operations.statistics import ExportedStatistics

logger = get_logger(__name__)

NAMESPACE = "faktory."
"""Prefix of all names, as in Faktory."""

MAX_PACKET_BYTES = 1432
"""Maximum size of a packet that an Ethernet frame carries without fragmentation."""

_UNSAFE = re.compile(r"[\x00-\x20:|@#,\x7f]")
"""Characters that would end a tag or begin a new line of the format."""


class Statsd:
    """Client of one address, "host:port". Metrics that cannot be sent are dropped; the first failure is logged."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        # An IPv6 address is written in brackets, which `getaddrinfo` does not accept.
        self._address = (host.strip("[]"), int(port))
        self._socket: socket.socket | None = None
        self._has_logged_failure = False

    def send(self, lines: Iterable[str]) -> None:
        """Send the lines, as many in each packet as fit. Logs an unreachable or impossible address once."""
        try:
            for packet in _packets(lines):
                self._open().send(packet)
            self._has_logged_failure = False
        except (OSError, ValueError) as error:  # UnicodeError: a host with an empty or too long label
            self.close()
            if not self._has_logged_failure:
                logger.warning(
                    "statsd cannot be reached, numbers are lost address=%s:%d error=%s", *self._address, error
                )
            self._has_logged_failure = True

    def close(self) -> None:
        """Close the socket; the next `send` opens a new one."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        if self._socket is None:
            [(family, socket_type, proto, _, address), *_] = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)
            self._socket = socket.socket(family, socket_type, proto)
            self._socket.connect(address)
            # A full buffer then raises BlockingIOError, and the metrics are dropped.
            self._socket.setblocking(False)
        return self._socket


def format_job_counts(series: Mapping[tuple[str, str], Series]) -> Iterator[str]:
    """Yield the lines about jobs that ended: `jobs.count`, `jobs.failed`, and mean `jobs.perform` in milliseconds."""
    for (queue, jobtype), sums in series.items():
        tags = f"|#queue:{_replace_unsafe(queue)},jobtype:{_replace_unsafe(jobtype)}"
        ended_count = sums.succeeded + sums.failed
        if ended_count:
            yield f"{NAMESPACE}jobs.count:{ended_count}|c{tags}"
            yield f"{NAMESPACE}jobs.perform:{1000 * sums.ran_s / ended_count:.3f}|ms{tags}"
        if sums.failed:
            yield f"{NAMESPACE}jobs.failed:{sums.failed}|c{tags}"


def format_sizes(statistics: ExportedStatistics) -> Iterator[str]:
    """Yield the gauges: sizes of sets and queues, totals, workers, latencies in seconds."""
    for state, count in sorted(statistics.sets.items()):
        yield f"{NAMESPACE}{state}:{count:.0f}|g"
    for name, total in (("processed", statistics.processed), ("failures", statistics.failed)):
        yield f"{NAMESPACE}{name}:{total}|g"
    yield f"{NAMESPACE}workers:{sum(statistics.workers.values()):.0f}|g"
    for queue in sorted(statistics.queues):
        yield f"{NAMESPACE}queue.size:{statistics.queues[queue]:.0f}|g|#queue:{_replace_unsafe(queue)}"
        yield f"{NAMESPACE}queue.latency:{statistics.latencies.get(queue, 0.0):.3f}|g|#queue:{_replace_unsafe(queue)}"


def _replace_unsafe(name: str) -> str:
    """Replace characters that have a meaning in the format: clients choose these names."""
    return _UNSAFE.sub("_", name)


def _packets(lines: Iterable[str]) -> Iterator[bytes]:
    packet = b""
    for line in lines:
        # Names from clients may contain lone surrogates, which UTF-8 cannot encode.
        data = line.encode("utf-8", "replace")
        if packet and len(packet) + 1 + len(data) > MAX_PACKET_BYTES:
            yield packet
            packet = b""
        packet = packet + b"\n" + data if packet else data
    if packet:
        yield packet
