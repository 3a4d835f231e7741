"""Hints on PostgreSQL: NOTIFY with a queue's name after the commit, LISTEN on a connection of one's own.

Knows no job rows. The listener reads all the time and is never in a transaction: one that stops reading would hold
up the server's queue of notifications for everybody. NOTIFY inside the pushing transaction would take a lock of the
whole server at its commit, so it is a statement by itself (reliability N1 to N3).
"""

from __future__ import annotations

import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..logs import get_logger
from ..poolers import is_pooled, process_of
from .base import Listener

logger = get_logger(__name__)

CHANNEL = "django_faktory"
MAX_NAMED = 50
ANY_QUEUE = ""
_TEST = "?"  # begins the payload of a listener's test of itself; no queue's name has it

HEARD_WITHIN_S = 5.0
"""How long a listener waits for its own test before it takes it that a pooler keeps notifications from it."""

TEST_EVERY_S = 60.0
"""How often a listener tests itself again: a connection to what was the primary may stand, and tell nothing."""

LONGEST_PAUSE_S = 15.0

UNLISTEN_TRIES = 50
"""How often a listener asks a pooler for the session in which its trial listens, to end that."""

# A hint is not worth a wait for the disk.
_NOTIFY = """
SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload
WHERE (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"""
_NOTIFY_STRAIGHT = "SELECT %s WHERE (SELECT set_config('synchronous_commit', 'off', TRUE)) IS NOT NULL"


def notify(connection: BaseDatabaseWrapper, queues: Collection[str], senders: set[int] | None = None) -> None:
    """Tell all listeners of this database. A name has 255 bytes at most (W9), a payload may have 7999.

    The server's process that told it is added to `senders` before anybody hears.
    """
    payloads = list(queues) if len(queues) <= MAX_NAMED else [ANY_QUEUE]
    try:
        if not connection.get_autocommit():
            return
        if senders is not None:
            senders.add(connection.connection.info.backend_pid)
        if can_listen() and not (connection.execute_wrappers or connection.queries_logged):
            _notify_straight(connection, payloads)
            return
        with connection.cursor() as cursor:
            cursor.execute(_NOTIFY, [CHANNEL, payloads])
    except Error as error:
        logger.debug("hint not sent error=%s", error)
        with suppress(Error):
            connection.close()  # broken or not: the next statement finds a good one


def _notify_straight(connection: BaseDatabaseWrapper, payloads: Sequence[str]) -> None:
    """By libpq: who enqueues waits for it, and a cursor takes as long as PostgreSQL does."""
    import psycopg  # psycopg 3 is here where somebody can listen

    calls = ", ".join(f"pg_notify($1, ${place})" for place in range(2, 2 + len(payloads)))
    values = [CHANNEL.encode(), *(payload.encode() for payload in payloads)]
    with connection.wrap_database_errors:
        told = connection.connection.pgconn.exec_params((_NOTIFY_STRAIGHT % calls).encode(), values)
        if told.status != psycopg.pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(told)


def can_listen() -> bool:
    """Whether the driver at hand lets us: psycopg 3 does."""
    from django.db.backends.postgresql.psycopg_any import is_psycopg3  # needs a driver, which others do not have

    return bool(is_psycopg3)


class PostgresListener(Listener):
    """Hears NOTIFY on its own connection, in its own thread, and connects anew when that breaks.

    With `queues`, hints of others are not passed on. Right after connecting it gives a hint of its own: what came
    before was not heard. A test at the start finds poolers that swallow notifications; then only polls remain, and who
    `tells` (one listener of a node) says so in the log. `is_own` tells by the sender's number at the server which hints
    are of no use here.
    """

    def __init__(
        self,
        alias: str,
        queues: Collection[str] | None = None,
        is_own: Callable[[int], bool] = lambda _: False,
        *,
        tells: bool = True,
    ) -> None:
        super().__init__()
        self._tells = tells
        self._is_own = is_own
        self._alias = alias
        self._wanted = None if queues is None else {*queues, ANY_QUEUE}
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._bell, self._ring = socket.socketpair()
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="faktory-listen", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """See Listener."""
        self._heard.set()

    def close(self) -> None:
        """See Listener. Waits a moment for the thread, which may be busy connecting."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            self._heard.set()
            with self._ring, suppress(OSError):  # the thread may have ended by itself
                self._ring.send(b".")
            self._thread.join(1.0)

    def _hear(self, timeout_s: float) -> bool:
        heard = self._heard.wait(timeout_s) and not self._closed.is_set()
        if heard:
            self._heard.clear()
        return heard

    def _run(self) -> None:
        import psycopg  # only projects on PostgreSQL have it

        pause_s = 0.5
        with self._bell:
            while not self._closed.is_set():
                try:
                    with closing(self._connect()) as connection:
                        pause_s = 0.5
                        if not self._receive(connection):
                            return
                except (psycopg.Error, Error, OSError) as error:
                    self._become_deaf()
                    self._report(error)
                    self._closed.wait(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _connect(self) -> Any:
        """A driver's connection, in autocommit, outside any pool of Django's."""
        wrapper = connections[self._alias].copy()
        wrapper.settings_dict["OPTIONS"].pop("pool", None)
        connection = wrapper.get_new_connection(wrapper.get_connection_params())
        connection.autocommit = True
        return connection

    def _receive(self, connection: Any) -> bool:
        """Hear until closed. False when notifications do not come here at all."""
        if is_pooled(connection) and not self._pass_a_trial(connection):
            return self._give_up()
        connection.execute(f"LISTEN {CHANNEL}")
        self._heard.set()
        if self._is_down:
            logger.info("hints are back alias=%s", self._alias)
            self._is_down = False
        test, until = self._test()
        while not self._closed.is_set():
            came = {one.payload for one in self._notices(connection, until) if not self._is_own(one.pid)}
            self.hears_all = self.hears_all or bool(came)
            self._pass_on(came)
            if test in came:
                test, until = "", time.monotonic() + TEST_EVERY_S
            elif time.monotonic() >= until and not test:
                test, until = self._test()
            elif time.monotonic() >= until and self.hears_all:
                raise ConnectionError("a test was sent and not heard: another server than that of new connections")
            elif time.monotonic() >= until:
                return self._give_up()
        return True

    def _test(self) -> tuple[str, float]:
        """Say something to oneself; what, and until when it is to be heard."""
        test = f"{_TEST}{secrets.token_hex(8)}"
        self._send(CHANNEL, test)
        return test, time.monotonic() + HEARD_WITHIN_S

    def _pass_a_trial(self, connection: Any) -> bool:
        """Whether a pooler lets notifications through: asked on a channel that nobody else has.

        LISTEN is a session's, and outlives who said it where sessions are shared. With the channel of all, whoever had
        this session next would be sent every hint, and keep it.
        """
        trial = f"{CHANNEL}_{secrets.token_hex(8)}"
        session = process_of(connection, f"LISTEN {trial}")
        self._send(trial, _TEST)
        give_up_at, is_heard = time.monotonic() + HEARD_WITHIN_S, False
        while not (is_heard or self._closed.is_set()) and time.monotonic() < give_up_at:
            is_heard = any(one.channel == trial for one in self._notices(connection, give_up_at))
        for _ in range(UNLISTEN_TRIES):
            if process_of(connection, f"UNLISTEN {trial}") == session:
                break
        return is_heard

    def _notices(self, connection: Any, until: float) -> list[Any]:
        """Those that come next; none where the time is over before, or when closed."""
        ready, _, _ = select.select([connection, self._bell], [], [], max(0.0, until - time.monotonic()))
        return list(connection.notifies(timeout=0)) if connection in ready else []

    def _give_up(self) -> bool:
        if self._tells and not self._closed.is_set():
            logger.warning(
                "NOTIFY does not come through, as behind a pooler: work is found by polling; for hints, let runfaktory"
                " connect to PostgreSQL directly alias=%s",
                self._alias,
            )
        return False

    def _send(self, channel: str, payload: str) -> None:
        # From another connection: a pooler hands back to a sender what it keeps from those who wait.
        with closing(self._connect()) as other:
            other.execute("SELECT pg_notify(%s, %s)", [channel, payload])

    def _pass_on(self, payloads: Collection[str]) -> None:
        hints = {payload for payload in payloads if not payload.startswith(_TEST)}
        if hints and (self._wanted is None or hints & self._wanted):
            self._heard.set()

    def _become_deaf(self) -> None:
        """Who waits is to look now, and often from now on."""
        if self.hears_all:
            self.hears_all = False
            self._heard.set()

    def _report(self, error: Exception) -> None:
        if not self._is_down:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("no hints, polling until the database is back alias=%s error=%s", self._alias, first)
        self._is_down = True
