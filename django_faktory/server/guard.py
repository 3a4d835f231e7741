"""Who may try a password: each address so many wrong ones a minute, later one more. Pure; memory is bounded.

An IPv6 client owns at least a /64 and has as many addresses as it likes there: it counts as one.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv4Address, ip_address

PERIOD_S = 60.0
MOST_ADDRESSES = 10_000
"""Of more than that those are forgotten whose last failure is the oldest: about 2 MB."""


class Guard:
    """Counts wrong passwords by address, as a bucket that leaks `most` a minute. `most=0`: nobody is turned away."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def failed(self, address: str, *, now: float) -> None:
        """A wrong password came from there."""
        if not self._most:
            return
        name = network_of(address)
        self._levels[name] = self._level(name, now) + 1, now
        self._levels.move_to_end(name)
        if len(self._levels) > MOST_ADDRESSES:
            self._levels.popitem(last=False)

    def wait_s(self, address: str, *, now: float) -> float:
        """Seconds until this address may try again; 0.0: it may now."""
        if not self._levels:
            return 0.0
        over = self._level(network_of(address), now) - (self._most - 1)
        return over * PERIOD_S / self._most if over > 0 else 0.0

    def _level(self, name: str, now: float) -> float:
        level, at = self._levels.get(name, (0.0, now))
        return max(0.0, level - (now - at) * self._most / PERIOD_S)


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, the /64 of another, or the text where it is none."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return found.packed[:8].hex()
