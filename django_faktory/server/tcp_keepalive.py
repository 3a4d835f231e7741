"""Detect vanished peers with TCP keepalive (`keep_alive`)."""

from __future__ import annotations

import socket

KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Socket options: a peer that vanished without closing is noticed within 90 s instead of the default two hours."""


def keep_alive(raw: socket.socket) -> None:
    """Enable TCP keepalive on a socket, with the times in `KEEP_ALIVE`."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
