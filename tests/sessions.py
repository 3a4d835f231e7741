"""End the session of a database connection, as an administrator or a restart of the server does."""

from django_faktory.store.dialects.idle_sessions import is_readable
from tests.waiting import wait_until

END = {"postgresql": "SELECT pg_terminate_backend(%s)", "mysql": "KILL %s"}
# PostgreSQL sends its last message before it closes the socket: wait up to 5 s until its process has ended.
_END_AND_WAIT = END | {"postgresql": "SELECT pg_terminate_backend(%s, 5000)"}
_OWN = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}


def end_idle(connection):
    """End this connection's session from another connection; wait until its socket is readable, and do not read it."""
    with connection.cursor() as cursor:
        cursor.execute(_OWN[connection.vendor])
        (session,) = cursor.fetchone()
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(_END_AND_WAIT[connection.vendor], [session])
    finally:
        other.close()
    wait_until(lambda: is_readable(connection.connection.fileno()))
