"""Whether a pooler is between us and PostgreSQL, which may give each transaction another session.

Such a pooler makes up the number that it tells a client for its server process: it stands for any of them. Knows no
Django; a connection is the driver's own, psycopg 3's or psycopg2's.
"""

from __future__ import annotations

from typing import Any


def is_pooled(connection: Any) -> bool:
    """Whether who answers on this connection is somebody else than was said when it was made.

    So it is behind PgBouncer in each of its modes. A pooler that told the truth, and changes sessions later, is not
    found out so: who relies on a session must bear its loss all the same.
    """
    return bool(process_of(connection) != connection.info.backend_pid)


def process_of(connection: Any, before: str = "") -> int:
    """The server process that answers just now; `before`: a statement for it to carry out, in the same transaction."""
    with connection.cursor() as cursor:
        cursor.execute(f"{before}; SELECT pg_backend_pid()" if before else "SELECT pg_backend_pid()")
        while before and cursor.description is None:
            cursor.nextset()
        found: int = cursor.fetchone()[0]
        return found
