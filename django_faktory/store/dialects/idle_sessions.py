"""Detect that a server has ended a session while its connection was idle.

A statement sent on such a connection fails, although the database is available. The statement must not be repeated: a
lost connection does not show whether its last statement was committed.
"""

from __future__ import annotations

import select


def is_readable(fd: int) -> bool:
    """Return whether data, an end of file or an error is waiting at the socket. Does not block."""
    poll = select.poll()  # `select.select` fails for descriptors from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
