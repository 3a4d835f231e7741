"""The system's own look at whether the other side of a connection is still there."""

from __future__ import annotations

import socket

KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A peer that vanished without a word is noticed within 90 s, not after the system's two hours."""


def keep_alive(raw: socket.socket) -> None:
    """Have it look."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # not every system has them all
        if option is not None:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
