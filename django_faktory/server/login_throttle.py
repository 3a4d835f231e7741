"""Throttle logins: each address may send a limited number of wrong passwords per minute (`LoginThrottle`).

Pure; memory is bounded. A /64 counts as one address: an IPv6 client owns at least that, and may use any address in it.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv4Address, ip_address

PERIOD_S = 60.0
MAX_ADDRESSES = 10_000
"""Addresses that are remembered, about 2 MB; beyond it the address with the oldest last failure is forgotten."""


class LoginThrottle:
    """Leaky bucket of wrong passwords per address; leaks `limit` (PASSWORD_TRIES) per minute. 0 disables it."""

    def __init__(self, *, limit: int, max_addresses: int = MAX_ADDRESSES) -> None:
        self._limit = limit
        self._max_addresses = max_addresses
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def record_failure(self, address: str, *, now: float) -> None:
        """Count a wrong password from this address; `now` is in seconds of any monotonic clock."""
        if not self._limit:
            return
        name = network_of(address)
        self._levels[name] = self._level(name, now) + 1, now
        self._levels.move_to_end(name)  # first is the oldest last failure, which is evicted below
        if len(self._levels) > self._max_addresses:
            self._levels.popitem(last=False)

    def wait_s(self, address: str, *, now: float) -> float:
        """Return the seconds until this address may try again; 0.0 means now."""
        if not self._levels:
            return 0.0
        # One more failure must fit into the bucket.
        excess = self._level(network_of(address), now) - (self._limit - 1)
        return excess * PERIOD_S / self._limit if excess > 0 else 0.0

    def _level(self, name: str, now: float) -> float:
        level, at = self._levels.get(name, (0.0, now))
        return max(0.0, level - (now - at) * self._limit / PERIOD_S)


def network_of(address: str) -> str:
    """Return the key of an address: IPv4 as is, the /64 of IPv6, other text unchanged."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:  # ::ffff:a.b.c.d, on a dual-stack socket: all share one /64
        return str(ip.ipv4_mapped)
    return ip.packed[:8].hex()
