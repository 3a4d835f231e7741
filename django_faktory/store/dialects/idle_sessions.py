"""Detect that a server has ended a session while its connection was idle.

A statement sent on such a connection fails, although the database is available. The statement must not be repeated: a
lost connection does not show whether its last statement was committed.
"""

from __future__ import annotations

import select
from typing import Any


def is_readable(fd: int) -> bool:
    """Return whether data, an end of file or an error is waiting at the socket. Does not block."""
    poll = select.poll()  # `select.select` fails for descriptors from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def was_ended(session: Any) -> bool:
    """Return whether a session of PostgreSQL was ended, for example by `pg_terminate_backend` or a restart.

    Data at an idle connection may also be a notification or a changed setting, so the driver reads and classifies it.
    One read is not enough: the server sends a last message, and then the end of file, which alone is the end.
    """
    if session.closed:
        return True
    try:
        while is_readable(session.fileno()):
            if hasattr(session, "pgconn"):  # psycopg 3
                session.pgconn.consume_input()
                session.pgconn.is_busy()  # parses what was read
                if session.pgconn.status != 0:  # ConnStatus.OK
                    return True
            else:
                session.poll()
                if session.closed:
                    return True
    except Exception:  # noqa: BLE001 - of the driver, not of Django
        return True
    return False
