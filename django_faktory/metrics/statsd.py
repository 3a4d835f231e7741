"""The numbers for statsd, with Faktory's names and DogStatsD's tags: sent by UDP, so that nobody waits for anybody.

Counts and times go out every few seconds, from the process that saw them; sizes every 30 s, from each server.
Source of the names: https://github.com/contribsys/faktory/issues/261 and /515.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping

from ..logs import get_logger
from ..measuring import Series
from .numbers import Numbers

logger = get_logger(__name__)

NAMESPACE = "faktory."
MAX_PACKET_BYTES = 1432
"""What an Ethernet frame carries in one piece."""

_UNSAFE = re.compile(r"[\x00-\x20:|@#,\x7f]")


class Statsd:
    """Sends to one address, "host:port". What cannot be sent is lost, and said once."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self._socket: socket.socket | None = None
        self._is_silent = False

    def send(self, lines: Iterable[str]) -> None:
        """Send lines, as many in a packet as it holds."""
        try:
            for packet in _packets(lines):
                self._open().send(packet)
            self._is_silent = False
        except OSError as error:
            self.close()
            if not self._is_silent:
                logger.warning(
                    "statsd cannot be reached, numbers are lost address=%s:%d error=%s", *self._address, error
                )
            self._is_silent = True

    def close(self) -> None:
        """Let go of the socket; the next `send` makes another."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        if self._socket is None:
            [(family, kind, proto, _, address), *_] = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)
            self._socket = socket.socket(family, kind, proto)
            self._socket.connect(address)
            self._socket.setblocking(False)
        return self._socket


def passed(series: Mapping[tuple[str, str], Series]) -> Iterator[str]:
    """What ended in a process since the last time: `jobs.count`, `jobs.failed`, and `jobs.perform` in milliseconds."""
    for (queue, jobtype), sums in series.items():
        tags = f"|#queue:{_safe(queue)},jobtype:{_safe(jobtype)}"
        ended = sums.succeeded + sums.failed
        if ended:
            yield f"{NAMESPACE}jobs.count:{ended}|c{tags}"
            yield f"{NAMESPACE}jobs.perform:{1000 * sums.ran_s / ended:.3f}|ms{tags}"
        if sums.failed:
            yield f"{NAMESPACE}jobs.failed:{sums.failed}|c{tags}"


def sizes(numbers: Numbers) -> Iterator[str]:
    """How much there is of what."""
    for state, count in sorted(numbers.sets.items()):
        yield f"{NAMESPACE}{state}:{count:.0f}|g"
    for name, total in (("processed", numbers.processed), ("failures", numbers.failed)):
        yield f"{NAMESPACE}{name}:{total}|g"
    yield f"{NAMESPACE}workers:{sum(numbers.workers.values()):.0f}|g"
    for queue in sorted(numbers.queues):
        yield f"{NAMESPACE}queue.size:{numbers.queues[queue]:.0f}|g|#queue:{_safe(queue)}"
        yield f"{NAMESPACE}queue.latency:{numbers.latencies.get(queue, 0.0):.3f}|g|#queue:{_safe(queue)}"


def _safe(name: str) -> str:
    """A name that a client chose, without what would end a tag or begin a line."""
    return _UNSAFE.sub("_", name)


def _packets(lines: Iterable[str]) -> Iterator[bytes]:
    packet = b""
    for line in lines:
        data = line.encode("utf-8", "replace")
        if packet and len(packet) + 1 + len(data) > MAX_PACKET_BYTES:
            yield packet
            packet = b""
        packet = packet + b"\n" + data if packet else data
    if packet:
        yield packet
