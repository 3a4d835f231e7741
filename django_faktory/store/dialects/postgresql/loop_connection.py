"""A connection that an event loop owns: it sends commands without blocking, and reads their rows as they arrive.

Needs no asyncio: the loop is passed to `start`. ADR 0005 says why the loop does not use the driver's own connections.
"""

from __future__ import annotations

import secrets
import select
from collections.abc import Sequence
from typing import Any

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ..idle_sessions import was_ended
from .pipeline import SYNC, Rows, can_pipeline, driver, encode_calls, rows_of_calls, send_calls
from .prepared import Call, Command, disable_if_lost, keeps_session

READ_ANYWAY_S = 1.0
"""Read an answer after this time, and each time it has passed again, even without an event: a missed event would block
the queue and all clients."""


class PostgresqlLoopConnection:
    """The `core.loop_connection.LoopConnection` of PostgreSQL."""

    def __init__(self, connection: BaseDatabaseWrapper, *, read_anyway_s: float = READ_ANYWAY_S) -> None:
        self.connection: Any = connection
        self._read_anyway_s = read_anyway_s
        self._keeps_session = keeps_session(connection)
        self._pgconn = connection.connection.pgconn
        self._fd: int = self._pgconn.socket
        poll = select.poll()  # kept, because creating one takes as long as a poll
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll
        self._texts: dict[Command, str] = {}
        """Names of prepared statements, or their SQL."""
        self._results: list[Any] = []
        self._answer: Any = None  # a future of the loop, while calls are executed
        self._timer: Any = None

    @classmethod
    def take(cls, connection: BaseDatabaseWrapper) -> PostgresqlLoopConnection | None:
        """Take over the connection of the calling thread. None if its statements must go through the driver."""
        raw = connection.connection
        if raw is None or raw.closed or connection.in_atomic_block or not connection.autocommit:
            return None
        if not can_pipeline(connection):
            return None
        connection.inc_thread_sharing()  # this thread has opened it, that of the loop will close it
        return cls(connection)

    def start(self, loop: Any) -> None:
        self._loop = loop
        loop.add_reader(self._fd, self._on_input)

    def is_usable(self) -> bool:
        # Not left to an event: uvloop reports a reset once, which may have been with the last answer.
        if self.connection.connection is not None and self._poll(0):
            self._on_input()
        return self.connection.connection is not None

    def close(self) -> None:
        if self.connection.connection is not None:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._pgconn.finish()  # first, so that Django's pool gives it to no other user
            # What `close` does, which refuses to be called while a loop runs: it might have to wait, but not here.
            self.connection._close()  # noqa: SLF001
            self.connection.connection = None

    async def execute(self, calls: Sequence[Call]) -> list[Rows]:
        texts, new = self._texts, dict[str, str]()
        if not texts.keys() >= dict(calls).keys():
            texts, new = self._with_new(calls)
        is_clean = True
        try:
            with self.connection.wrap_database_errors:
                encoded = encode_calls([(texts[command], values) for command, values in calls])
                is_clean = False
                send_calls(self.connection.connection, encoded, new)
                # libpq keeps what a full socket does not take; the loop must not wait for it.
                if self._pgconn.flush():
                    self._loop.add_writer(self._fd, self._on_writable)
                if self._timer is None:
                    self._timer = self._loop.call_later(self._read_anyway_s, self._on_timer)
                self._answer, self._results = self._loop.create_future(), []
                results = await self._answer
                is_clean = True
                rows = rows_of_calls(results, len(calls))
        except Error as error:
            if disable_if_lost(error):
                self._texts = {}
            raise
        finally:
            self._answer = None
            if not is_clean:
                self.close()  # the next user would read results that are not its own
        self._texts = texts
        return rows

    def _with_new(self, calls: Sequence[Call]) -> tuple[dict[Command, str], dict[str, str]]:
        """Return the texts of all commands, and by name the SQL of those to prepare in the same message."""
        new = [command for command, _ in calls if command not in self._texts]
        if not (self._keeps_session and Command.works):
            return {**self._texts, **{command: command.sql for command in new}}, {}
        # Unique: behind a pooler that was not detected, another process may have prepared such a statement.
        names = {command: f"{command.name}_{secrets.token_hex(6)}" for command in new}
        return {**self._texts, **names}, {name: command.sql for command, name in names.items()}

    def _on_timer(self) -> None:
        self._timer = None
        if self._answer is not None:
            self._timer = self._loop.call_later(self._read_anyway_s, self._on_timer)
            self._on_input()

    def _on_writable(self) -> None:
        try:
            if not self._pgconn.flush():
                self._loop.remove_writer(self._fd)
        except driver().Error:  # `_on_input` finds it too
            self._loop.remove_writer(self._fd)
        self._on_input()

    def _on_input(self) -> None:
        if self._answer is None:
            # Between two sets: a notice, a changed setting, or the end of the session.
            if was_ended(self.connection.connection):
                self.close()
        elif not self._answer.done():
            try:
                if self._receive():
                    self._answer.set_result(self._results)
            except driver().Error as error:
                self._answer.set_exception(error)

    def _receive(self) -> bool:
        """Receive the results that have arrived, and return whether they are complete."""
        pgconn = self._pgconn
        while True:
            pgconn.consume_input()
            # libpq returns None after each statement's results; two in succession mean that none is outstanding.
            was_none = False
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None and was_none:
                    raise driver().OperationalError("expected results of what was sent, the connection is lost")
                was_none = result is None
                if was_none:
                    continue
                if result.status == SYNC:
                    pgconn.exit_pipeline_mode()
                    return True
                self._results.append(result)
            if not self._poll(0):  # read all input: libuv reports a reset behind the data only once
                return False
