"""Prepared statements sent straight through libpq: all in one message, values and rows in binary or plain text.

What a cursor does for a statement (binding values into the text, wrappers, adaptation by type) takes longer than
PostgreSQL takes to carry a hot one out (ADR 0010). Only for statements of ours, whose types are known. Several of them
are one transaction outside of a transaction, as everything before a sync is.
"""

from __future__ import annotations

import functools
import select
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from .cursor_hooks import has_own_cursor

Rows = list[tuple[Any, ...]]
Packed = tuple[bytes, list[bytes | None], list[int]]
"""A prepared statement's name, its values as they are sent, and whether each is binary: 1 or 0."""

Told = TypeVar("Told")

_BINARY = 1
_TEXT_TYPE = 25
_MISSING = struct.pack("!i", -1)
_PLAIN = (None, None, None)
"""What the driver begins with a bare BEGIN."""


@functools.cache
def has_psycopg3() -> bool:
    """Whether Django talks to PostgreSQL with psycopg 3: without it, with psycopg2."""
    from django.db.backends.postgresql.psycopg_any import is_psycopg3  # needs a driver, which others do not have

    return bool(is_psycopg3)


@functools.cache
def _driver() -> Any:
    """psycopg 3, where its libpq knows pipelines; else None."""
    try:
        import psycopg
    except ImportError:
        return None
    return psycopg if psycopg.Pipeline.is_supported() else None


def can_pipeline(connection: BaseDatabaseWrapper) -> bool:
    """Return whether prepared statements may bypass the cursor.

    They may not where statements are logged or wrapped, where the backend prepares its session for each cursor, in
    another encoding than UTF-8, and where they would begin a transaction with characteristics of its own.
    """
    if connection.execute_wrappers or connection.queries_logged or has_own_cursor(connection):
        return False
    psycopg, raw = _driver(), connection.connection
    if psycopg is None or not isinstance(raw, psycopg.Connection) or raw.info.encoding != "utf-8":
        return False
    return bool(raw.autocommit or not _is_idle(raw) or (raw.isolation_level, raw.read_only, raw.deferrable) == _PLAIN)


def _is_idle(raw: Any) -> bool:
    return bool(raw.pgconn.transaction_status == _driver().pq.TransactionStatus.IDLE)


def run_prepared(connection: BaseDatabaseWrapper, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows]:
    """Carry out prepared statements, each a name and its values, in one round trip; return the rows of each.

    Where the connection is to be in a transaction and none was begun yet, it begins here. Raises the first statement's
    error as Django's; those after it were not carried out.
    """
    with connection.wrap_database_errors:
        found = _exchanged(connection.connection, _packed_all(calls))
        return _answers(found, len(calls))


def run_last(connection: BaseDatabaseWrapper, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows]:
    """Carry out prepared statements, and COMMIT unless one failed, in one round trip; return the rows of each.

    Raises the first statement's error as Django's, with the transaction spoilt; or COMMIT's, with nothing committed. An
    OperationalError that closed the connection says nothing of the commit, as ever.
    """
    with connection.wrap_database_errors:
        found = _exchanged(connection.connection, _packed_all(calls), then=b"COMMIT")
        *rows, _ = _answers(found, len(calls) + 1)
        if found[-1].command_status != b"COMMIT":
            raise _driver().InternalError(f"expected a commit, got {found[-1].command_status!r}: nothing is committed")
        return rows


class Flight(Generic[Told]):
    """`run_prepared` for who must not wait: it is sent when this is made, and read as its results come.

    `then` makes of the rows what is told. Nothing else may be done with the connection until all was read. Errors are
    those of `run_prepared`; after one that is not a statement's the connection is closed.
    """

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        calls: Sequence[tuple[str, Sequence[Any]]],
        then: Callable[[list[Rows]], Told],
    ) -> None:
        self._connection, self._calls, self._then = connection, len(calls), then
        self._found: list[Any] = []
        self.is_last = False
        """Whether something came behind the answer that was read, such as the connection's end."""
        with connection.wrap_database_errors:
            packed = _packed_all(calls)
            self._pgconn = connection.connection.pgconn
            with self._closed_by_errors():
                _send(connection.connection, packed)
                self.is_sent: bool = not self._pgconn.flush()

    @property
    def fd(self) -> int:
        """Readable when there is something to read, writable when there is room for what is not sent yet."""
        return int(self._pgconn.socket)

    def send(self) -> None:
        """Send more, where the socket did not take all of it."""
        with self._connection.wrap_database_errors, self._closed_by_errors():
            self.is_sent = not self._pgconn.flush()

    def read(self) -> Told | None:
        """What there is to tell; None while more is to come."""
        with self._connection.wrap_database_errors:
            with self._closed_by_errors():
                self._pgconn.consume_input()
                while not (is_whole := self._take()) and _is_more_here(self._pgconn):
                    self._pgconn.consume_input()  # to the end: of a reset behind it libuv would not tell again
                self.is_last = is_whole and _is_more_here(self._pgconn)
            return self._then(_answers(self._found, self._calls)) if is_whole else None

    def _take(self) -> bool:
        pgconn, pq = self._pgconn, _driver().pq
        was_none = False
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None and was_none:
                raise _driver().OperationalError("expected results of what was sent, the connection is lost")
            was_none = result is None
            if was_none:
                continue
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                pgconn.exit_pipeline_mode()
                return True
            self._found.append(result)
        return False

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pgconn.finish()
            raise


def _is_more_here(pgconn: Any) -> bool:
    """Whether there is something to read: data, an end or an error."""
    readable = select.poll()
    readable.register(pgconn.socket, select.POLLIN)
    return bool(readable.poll(0))


def _packed_all(calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Packed]:
    packed = []
    for name, values in calls:
        binary = [_are_texts(value) for value in values]
        data = [_texts(value) if is_binary else _packed(value) for value, is_binary in zip(values, binary, strict=True)]
        packed.append((name.encode(), data, list(map(int, binary))))
    return packed


def _exchanged(raw: Any, calls: Sequence[Packed], *, then: bytes = b"") -> list[Any]:
    """The results of all of this."""
    try:
        _send(raw, calls, then=then)
        _flush(raw.pgconn)
        return _received(raw.pgconn)
    except BaseException:  # replies may still be on their way, which nobody must take for his own
        raw.pgconn.finish()
        raise


def _send(raw: Any, calls: Sequence[Packed], *, then: bytes = b"") -> None:
    """Have all of this sent up to the sync; BEGIN before it, where the connection is to be in a transaction."""
    pgconn = raw.pgconn
    pgconn.enter_pipeline_mode()
    if not raw.autocommit and _is_idle(raw):
        pgconn.send_query_params(b"BEGIN", None)
    for name, values, formats in calls:
        pgconn.send_query_prepared(name, values, formats, result_format=_BINARY)
    if then:
        pgconn.send_query_params(then, None)
    pgconn.pipeline_sync()


def _received(pgconn: Any) -> list[Any]:
    """Wait for every result up to the sync: one for each statement, BEGIN's before them."""
    pq = _driver().pq
    found: list[Any] = []
    readable = select.poll()
    readable.register(pgconn.socket, select.POLLIN)
    while True:
        while pgconn.is_busy():
            readable.poll()
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            continue
        if result.status == pq.ExecStatus.PIPELINE_SYNC:
            pgconn.exit_pipeline_mode()
            return found
        found.append(result)


def _answers(found: list[Any], calls: int) -> list[Rows]:
    error = next((result for result in found if result.status == _driver().pq.ExecStatus.FATAL_ERROR), None)
    if error is not None:
        raise _driver().errors.error_from_result(error)
    return [_rows(result) for result in found[len(found) - calls :]]


def _flush(pgconn: Any) -> None:
    """Send all there is; read meanwhile, or both sides might wait for each other."""
    if not pgconn.flush():
        return
    either = select.poll()
    either.register(pgconn.socket, select.POLLIN | select.POLLOUT)
    while pgconn.flush():
        if either.poll()[0][1] & select.POLLIN:
            pgconn.consume_input()


def _packed(value: Any) -> bytes | None:
    """A value as PostgreSQL reads it from text; a list of numbers, or of nothing."""
    if value is None:
        return None
    if isinstance(value, list):
        return b"{" + b",".join(_packed(item) or b"NULL" for item in value) + b"}"
    data = (value if isinstance(value, str) else str(value)).encode()
    if b"\x00" in data:  # libpq would take it for the end
        raise _driver().DataError("expected text without NUL (0x00), got some")
    return data


def _are_texts(value: Any) -> bool:
    """Whether it is a list of texts, some of which may be missing."""
    return type(value) is list and type(next((item for item in value if item is not None), None)) is str


def _texts(values: Sequence[str | None]) -> bytes:
    """An array of them in binary: as text each quote has a backslash before it, and jobs are full of quotes."""
    parts = [struct.pack("!5i", 1, None in values, _TEXT_TYPE, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_MISSING)
        else:
            data = value.encode()
            parts += (len(data).to_bytes(4, "big"), data)
    return b"".join(parts)


class _Reader(threading.local):
    """Makes Python values of a result's, by the driver's own code in C where it has some: a tenth of the time that a
    function for each of them takes. What the project has registered for its own types counts for nothing here."""

    def __init__(self) -> None:
        from psycopg.adapt import AdaptersMap, Transformer  # psycopg 3 is here where there is a result
        from psycopg.types import bool as booleans
        from psycopg.types import datetime, numeric, string

        adapters = AdaptersMap(types=_driver().adapters.types)
        adapters.register_loader("bool", booleans.BoolBinaryLoader)
        adapters.register_loader("int2", numeric.Int2BinaryLoader)
        adapters.register_loader("int4", numeric.Int4BinaryLoader)
        adapters.register_loader("int8", numeric.Int8BinaryLoader)
        adapters.register_loader("timestamptz", datetime.TimestamptzBinaryLoader)  # in UTC: it knows of no connection
        for kind in ("text", "varchar", "json"):
            adapters.register_loader(kind, string.TextBinaryLoader)
        self._transformer = Transformer(adapters)

    def rows(self, result: Any) -> Rows:
        """All of them."""
        self._transformer.set_pgresult(result)
        rows: Rows = self._transformer.load_rows(0, result.ntuples, tuple)
        self._transformer.set_pgresult(None)  # or it would be kept until the next
        return rows


_reader = functools.cache(_Reader)


def _rows(result: Any) -> Rows:
    return _reader().rows(result) if result.ntuples else []
