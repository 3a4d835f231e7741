"""Detect a connection pooler, which may give each transaction another PostgreSQL session.

Such a pooler reports an invented server process id to its client, because the id stands for any of its sessions.
Imports no Django; a connection is the driver's own, of psycopg 3 or psycopg2.
"""

from __future__ import annotations

from typing import Any


def is_pooled(connection: Any) -> bool:
    """Return True if the answering process is not the one reported when the connection was made.

    This is true behind PgBouncer in each of its modes. It does not detect a pooler that reports the real process id and
    changes sessions later, so code that relies on a session must survive its loss anyway.
    """
    return bool(process_of(connection) != connection.info.backend_pid)


def process_of(connection: Any, statement: str = "") -> int:
    """Return the id of the answering server process. A `statement` runs before, in the same transaction."""
    # In one message, because a pooler may use another session for the next one.
    with connection.cursor() as cursor:
        cursor.execute(f"{statement}; SELECT pg_backend_pid()" if statement else "SELECT pg_backend_pid()")
        # psycopg 3 has a result for each statement; the last one is that of the SELECT.
        while statement and cursor.description is None:
            cursor.nextset()
        process_id: int = cursor.fetchone()[0]
        return process_id
