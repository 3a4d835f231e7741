"""Prepared statements sent straight through libpq: all in one message, values and rows in binary or plain text.

What a cursor does for a statement (binding values into the text, wrappers, adaptation by type) takes longer than
PostgreSQL takes to carry a hot one out (ADR 0010). Only for statements of ours, whose types are known. Several of them
are one transaction outside of a transaction, as everything before a sync is.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

Rows = list[tuple[Any, ...]]

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_BINARY = 1


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_READ: dict[int, Callable[[bytes], Any]] = {
    16: b"\x01".__eq__,  # bool
    20: _integer,  # int8
    21: _integer,  # int2
    23: _integer,  # int4
    25: bytes.decode,  # text
    114: bytes.decode,  # json
    1043: bytes.decode,  # varchar
    1184: lambda data: _EPOCH + timedelta(microseconds=_integer(data)),  # timestamptz
}


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
    """Whether statements may go this way: not where somebody listens in on them, nor in another encoding."""
    if connection.execute_wrappers or connection.queries_logged:
        return False
    psycopg, raw = _driver(), connection.connection
    return psycopg is not None and isinstance(raw, psycopg.Connection) and raw.info.encoding == "utf-8"


def run_prepared(connection: BaseDatabaseWrapper, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows]:
    """Carry out prepared statements, each a name and its values, in one round trip; return the rows of each.

    Where the connection is to be in a transaction and none was begun yet, it begins here. Raises the first statement's
    error as Django's; those after it were not carried out.
    """
    with connection.wrap_database_errors:
        packed = [(name.encode(), [_packed(value) for value in values]) for name, values in calls]
        raw = connection.connection
        try:
            found = _exchange(raw, packed)
        except BaseException:  # replies may still be on their way, which nobody must take for his own
            raw.pgconn.finish()
            raise
        error = next((result for result in found if result.status == _driver().pq.ExecStatus.FATAL_ERROR), None)
        if error is not None:
            raise _driver().errors.error_from_result(error)
    return [_rows(result) for result in found[len(found) - len(calls) :]]


def _exchange(raw: Any, calls: Sequence[tuple[bytes, list[bytes | None]]]) -> list[Any]:
    """Send, and read every result up to the sync: one for each statement, BEGIN's before them."""
    pgconn, pq = raw.pgconn, _driver().pq
    pgconn.enter_pipeline_mode()
    if not raw.autocommit and pgconn.transaction_status == pq.TransactionStatus.IDLE:
        pgconn.send_query_params(b"BEGIN", None)
    for name, values in calls:
        pgconn.send_query_prepared(name, values, result_format=_BINARY)
    pgconn.pipeline_sync()
    _flush(pgconn)
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
    """A value as PostgreSQL reads it from text."""
    if value is None:
        return None
    if isinstance(value, list):
        return b"{" + b",".join(map(_element, value)) + b"}"
    data = (value if isinstance(value, str) else str(value)).encode()
    if b"\x00" in data:  # libpq would take it for the end
        raise _driver().DataError("expected text without NUL (0x00), got some")
    return data


def _element(value: Any) -> bytes:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return b'"' + (_packed(escaped) or b"") + b'"'
    return _packed(value) or b"NULL"


def _rows(result: Any) -> Rows:
    read = [_READ[result.ftype(column)] for column in range(result.nfields)]
    columns = list(enumerate(read))
    rows = []
    for row in range(result.ntuples):
        values = []
        for column, reader in columns:
            data = result.get_value(row, column)
            values.append(None if data is None else reader(data))
        rows.append(tuple(values))
    return rows
