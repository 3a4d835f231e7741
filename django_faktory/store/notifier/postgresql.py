"""Notifications on PostgreSQL: NOTIFY with queue names after the commit, LISTEN on a separate connection.

Does not read job rows. The listener reads all the time and is never in a transaction: one that stops reading would
block the server's notification queue for every client. NOTIFY is a statement of its own, because inside the pushing
transaction it takes a server-wide lock at its commit.
"""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.logs import get_logger
from .. import sharing
from ..dialects.postgresql.pipeline import has_psycopg3
from ..dialects.postgresql.pooler import is_pooled, process_of
from ..outages import of_this_node
from .base import ANY_QUEUE, Listener, wait_readable

logger = get_logger(__name__)

CHANNEL = "django_faktory"
MAX_NAMED = 50
_TEST = "?"  # prefix of a listener's self-test; no queue name contains it

TEST_TIMEOUT_S = 5.0
"""Seconds a listener waits for its own test before it assumes that a pooler withholds notifications."""

TEST_EVERY_S = 60.0
"""Seconds between self-tests: a connection to a former primary may stay open without sending notifications."""

LONGEST_PAUSE_S = 15.0
"""Maximum seconds between two attempts to connect."""

SHARING_CHECK_S = 5.0
"""Seconds between two checks whether the node has too few connections to listen on one."""

UNLISTEN_TRIES = 50
"""Attempts to send UNLISTEN to the pooled session that executed the LISTEN of the self-test."""

# A notification does not need durability: with synchronous_commit off the statement does not wait for the disk.
_NOTIFY = """
SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload
WHERE (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"""
_NOTIFY_THROUGH_LIBPQ = "SELECT %s WHERE (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"


def notify(connection: BaseDatabaseWrapper, queues: Collection[str], senders: set[int] | None = None) -> None:
    """Notify all listeners of this database. Does nothing inside a transaction; never raises a database error.

    A queue name has at most 255 bytes (W9), a payload at most 7999. More than `MAX_NAMED` queues become one
    `ANY_QUEUE`. `senders` has the backend pid of the sender before any listener can receive the notification.
    """
    payloads = list(queues) if len(queues) <= MAX_NAMED else [ANY_QUEUE]
    try:
        if not connection.get_autocommit():
            return
        if senders is not None and (pid := connection.connection.info.backend_pid) not in senders:
            # PostgreSQL may give the pid of an earlier connection to another client.
            senders.clear()
            senders.add(pid)
        if has_psycopg3() and not (connection.execute_wrappers or connection.queries_logged):
            _notify_through_libpq(connection, payloads)
            return
        with connection.cursor() as cursor:
            cursor.execute(_NOTIFY, [CHANNEL, payloads])
    except Error as error:
        logger.debug("notification not sent error=%s", error)
        with suppress(Error):
            connection.close()  # the connection may be broken: the next statement opens another


def _notify_through_libpq(connection: BaseDatabaseWrapper, payloads: Sequence[str]) -> None:
    """Send the notification through libpq.

    The enqueuing thread waits for it, and a Django cursor adds as much time as PostgreSQL itself takes.
    """
    import psycopg  # `notify` has checked that psycopg 3 is installed

    calls = ", ".join(map("pg_notify($1, ${})".format, range(2, 2 + len(payloads))))
    values = [CHANNEL.encode(), *map(str.encode, payloads)]
    with connection.wrap_database_errors:
        result = connection.connection.pgconn.exec_params((_NOTIFY_THROUGH_LIBPQ % calls).encode(), values)
        if result.status != psycopg.pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)


class PostgresListener(Listener):
    """Receives NOTIFY on its own connection and thread, and reconnects when the connection breaks.

    With `queues`, notifications for other queues are dropped. Directly after connecting it wakes its waiter, because
    earlier notifications were not received. A test at the start detects poolers that drop notifications; then only
    polling remains, and the listener with `logs_problems` (one per node) logs that. `is_own` recognizes by backend pid
    the notifications that this process sent and does not need.
    """

    def __init__(
        self,
        alias: str,
        queues: Collection[str] | None = None,
        is_own: Callable[[int], bool] = lambda _: False,
        *,
        logs_problems: bool = True,
        test_timeout_s: float = TEST_TIMEOUT_S,
        test_every_s: float = TEST_EVERY_S,
    ) -> None:
        super().__init__()
        self._test_timeout_s, self._test_every_s = test_timeout_s, test_every_s
        self._logs_problems = logs_problems
        self._is_own = is_own
        self._alias = alias
        self._queues = None if queues is None else {*queues, ANY_QUEUE}
        self._woken = threading.Event()
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._close_receiver, self._close_sender = socket.socketpair()
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="faktory-listen", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the waiting thread, as for a notification from this process."""
        self._woken.set()

    def close(self) -> None:
        """Stop the thread and wait up to 1 s for it, since it may be busy connecting."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            self._woken.set()
            with self._close_sender, suppress(OSError):  # the thread may have ended and closed its end
                self._close_sender.send(b".")
            self._thread.join(1.0)

    def _wait_for_notification(self, timeout_s: float) -> bool:
        is_woken = self._woken.wait(timeout_s) and not self._closed.is_set()
        if is_woken:
            self._woken.clear()
        return is_woken

    def _run(self) -> None:
        import psycopg  # installed only in projects on PostgreSQL

        pause_s = 0.5
        with self._close_receiver:
            while not self._closed.is_set():
                try:
                    while sharing.is_needed():
                        self._fall_back_to_polling()
                        if self._closed.wait(SHARING_CHECK_S):
                            return
                    with closing(self._connect()) as connection:
                        pause_s = 0.5
                        if not self._receive(connection):
                            return
                except (psycopg.Error, Error, OSError) as error:
                    sharing.record(error)
                    self._fall_back_to_polling()
                    self._log_outage(error)
                    # Jitter keeps the nodes from reconnecting at the same moment after an outage.
                    self._closed.wait(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _connect(self) -> Any:
        """Open a driver connection in autocommit, outside Django's connection pool."""
        wrapper = connections[self._alias].copy()
        wrapper.settings_dict["OPTIONS"].pop("pool", None)
        connection = wrapper.get_new_connection(wrapper.get_connection_params())
        connection.autocommit = True
        return connection

    def _receive(self, connection: Any) -> bool:
        """Receive notifications until closed. Return False if notifications do not arrive on this connection at all."""
        if is_pooled(connection):
            if not self._passes_self_test(connection):
                return self._give_up()
        else:
            # A session that only listens is always idle; behind a pooler, the next client would get this setting.
            connection.execute("SET idle_session_timeout = 0")
        connection.execute(f"LISTEN {CHANNEL}")
        self._woken.set()
        if self._is_down:
            logger.info("notifications are back alias=%s", self._alias)
            self._is_down = False
        test_payload, until = self._send_test()
        while not (self._closed.is_set() or sharing.is_needed()):
            notifications = self._receive_next(connection, min(until, time.monotonic() + SHARING_CHECK_S))
            payloads = {notification.payload for notification in notifications if not self._is_own(notification.pid)}
            self.receives_all = self.receives_all or bool(payloads)
            self._pass_on(payloads)
            if test_payload in payloads:
                test_payload, until = "", time.monotonic() + self._test_every_s
            elif time.monotonic() >= until and not test_payload:
                test_payload, until = self._send_test()
            elif time.monotonic() >= until and self.receives_all:
                # After a failover the old connection can stay open while `_send` reaches the new primary. The error
                # makes `_run` reconnect.
                raise ConnectionError("the self-test did not arrive: LISTEN is on another server than new connections")
            elif time.monotonic() >= until:
                return self._give_up()
        return True

    def _send_test(self) -> tuple[str, float]:
        """Send a self-test; return its payload and the time until which it must arrive."""
        test_payload = f"{_TEST}{secrets.token_hex(8)}"
        self._send(CHANNEL, test_payload)
        return test_payload, time.monotonic() + self._test_timeout_s

    def _passes_self_test(self, connection: Any) -> bool:
        """Return whether a pooler forwards notifications, tested on a channel with a random name.

        LISTEN belongs to a session and outlives its client where sessions are shared. With the common channel, the next
        client of this session would receive and buffer every notification.
        """
        test_channel = f"{CHANNEL}_{secrets.token_hex(8)}"
        session = process_of(connection, f"LISTEN {test_channel}")
        self._send(test_channel, _TEST)
        give_up_at, has_arrived = time.monotonic() + self._test_timeout_s, False
        while not (has_arrived or self._closed.is_set()) and time.monotonic() < give_up_at:
            notifications = self._receive_next(connection, give_up_at)
            has_arrived = any(notification.channel == test_channel for notification in notifications)
        # The pooler picks a session for each statement, so UNLISTEN may reach another one than LISTEN did.
        for _ in range(UNLISTEN_TRIES):
            if process_of(connection, f"UNLISTEN {test_channel}") == session:
                break
        return has_arrived

    def _receive_next(self, connection: Any, until: float) -> list[Any]:
        """Return the notifications that arrive next; an empty list on timeout or when closed."""
        descriptor = connection.fileno()
        ready = wait_readable([descriptor, self._close_receiver.fileno()], max(0.0, until - time.monotonic()))
        return list(connection.notifies(timeout=0)) if descriptor in ready else []

    def _give_up(self) -> bool:
        if self._logs_problems and not self._closed.is_set():
            logger.warning(
                "NOTIFY does not come through, as behind a pooler: work is found by polling; for notifications, let"
                " runfaktory connect to PostgreSQL directly alias=%s",
                self._alias,
            )
        return False

    def _send(self, channel: str, payload: str) -> None:
        # From another connection: a pooler passes notifications to a client that sends a statement, although it
        # withholds them from waiting clients.
        with closing(self._connect()) as sender:
            sender.execute("SELECT pg_notify(%s, %s)", [channel, payload])

    def _pass_on(self, payloads: Collection[str]) -> None:
        queues = {payload for payload in payloads if not payload.startswith(_TEST)}
        if queues and (self._queues is None or queues & self._queues):
            self._woken.set()

    def _fall_back_to_polling(self) -> None:
        """Wake the waiter so that it looks now and polls at the short interval from now on."""
        if self.receives_all:
            self.receives_all = False
            self._woken.set()

    def _log_outage(self, error: Exception) -> None:
        if not self._is_down:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            of_this_node.record_failure("notifications, polling meanwhile", line)
        self._is_down = True
