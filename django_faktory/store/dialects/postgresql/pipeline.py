"""Send prepared statements through libpq in one pipeline, with values and rows in binary or plain text (ADR 0043).

A cursor's work for a statement (binding values, wrappers, adaptation by type) takes longer than PostgreSQL needs to run
a hot one. Only for the package's own statements, because their types are known. Outside a transaction, all statements
before a sync are one transaction. Main functions: `run_prepared`, `run_and_commit`; `loop_connection` does not block.
"""

from __future__ import annotations

import functools
import select
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..cursor_hooks import has_own_cursor

Rows = list[tuple[Any, ...]]
EncodedCall = tuple[bytes, list[bytes | None], list[int]]
"""Name of a prepared statement, or SQL, its encoded values, and the format of each: 1 is binary, 0 is text."""

_BINARY = 1
# Of libpq's ExecStatusType. As numbers: a member of the driver's enumeration takes longer to find than a result.
_FAILED, SYNC = 7, 10
_TEXT_TYPE = 25  # oid of `text` in pg_type, which is the same on every server
_NULL = struct.pack("!i", -1)
_NOTHING: Mapping[str, str] = {}
_PLAIN = (None, None, None)
"""Transaction characteristics with which the driver sends a plain BEGIN."""


@functools.cache
def has_psycopg3() -> bool:
    """Return whether Django uses psycopg 3 for PostgreSQL; otherwise it is psycopg2."""
    # Imported here: it needs a driver, which projects on other databases do not have.
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    return bool(is_psycopg3)


@functools.cache
def driver() -> Any:
    """Return psycopg 3 if its libpq supports pipelines, else None."""
    try:
        import psycopg
    except ImportError:
        return None
    return psycopg if psycopg.Pipeline.is_supported() else None


def can_pipeline(connection: BaseDatabaseWrapper) -> bool:
    """Return whether prepared statements may bypass the cursor.

    They may not if statements are logged or wrapped, if the backend prepares its session for each cursor, if the
    encoding is not UTF-8, or if they would begin a transaction with characteristics of its own.
    """
    if connection.execute_wrappers or connection.queries_logged or has_own_cursor(connection):
        return False
    psycopg, raw = driver(), connection.connection
    if psycopg is None or not isinstance(raw, psycopg.Connection):
        return False
    # Read from libpq directly: `raw.info.encoding` takes four Python calls.
    if raw.pgconn.parameter_status(b"client_encoding") != b"UTF8":
        return False
    # A transaction that has begun already has its characteristics; only a BEGIN of our own would be a plain one.
    return bool(raw.autocommit or not _is_idle(raw) or (raw.isolation_level, raw.read_only, raw.deferrable) == _PLAIN)


def _is_idle(raw: Any) -> bool:
    return bool(raw.pgconn.transaction_status == driver().pq.TransactionStatus.IDLE)


def run_prepared(connection: BaseDatabaseWrapper, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows]:
    """Run prepared statements, each a name and its values, in one round trip; return the rows of each.

    Sends BEGIN first if the connection should be in a transaction and none has begun. Raises the first statement's
    error as Django's; later statements are not executed.
    """
    with connection.wrap_database_errors:
        results = _run_pipeline(connection.connection, encode_calls(calls))
        return rows_of_calls(results, len(calls))


def run_and_commit(connection: BaseDatabaseWrapper, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows]:
    """Run prepared statements, and COMMIT unless one failed, in one round trip; return the rows of each.

    Raises the first statement's error as Django's, with the transaction broken; or COMMIT's, with nothing committed.
    After an OperationalError that closed the connection, the outcome of the commit is unknown, as with any commit.
    """
    with connection.wrap_database_errors:
        results = _run_pipeline(connection.connection, encode_calls(calls), final_command=b"COMMIT")
        *rows, _ = rows_of_calls(results, len(calls) + 1)
        # COMMIT of a broken transaction succeeds with the status ROLLBACK.
        if results[-1].command_status != b"COMMIT":
            raise driver().InternalError(f"expected a commit, got {results[-1].command_status!r}: nothing is committed")
        return rows


def prepare(connection: BaseDatabaseWrapper, name: str, sql: str) -> None:
    """Prepare a statement in a message of its own, with the types of its parameters as the server finds them."""
    with connection.wrap_database_errors:
        result = connection.connection.pgconn.prepare(name.encode(), sql.encode())
        if result.status == _FAILED:
            raise driver().errors.error_from_result(result)


def encode_calls(calls: Sequence[tuple[str, Sequence[Any]]]) -> list[EncodedCall]:
    """Encode calls, each the name of a prepared statement, or SQL, and its values. Raises the driver's errors."""
    encoded: list[EncodedCall] = []
    for name, values in calls:
        data: list[bytes | None] = []
        formats: list[int] = []
        for value in values:
            is_binary = False
            # Usual types are encoded here: a function call for every value of every statement takes longer than this.
            if type(value) is str and "\x00" not in value:
                data.append(value.encode())
            elif value is None or type(value) is int:
                data.append(None if value is None else b"%d" % value)
            elif type(value) is list and value and type(value[0]) is not int and _are_texts(value):
                is_binary = True
                data.append(_encode_texts(value))
            else:
                data.append(_encode_value(value))
            formats.append(is_binary)
        encoded.append((name.encode(), data, formats))
    return encoded


def _run_pipeline(raw: Any, calls: Sequence[EncodedCall], *, final_command: bytes = b"") -> list[Any]:
    try:
        send_calls(raw, calls, final_command=final_command)
        if raw.pgconn.flush():
            _flush(raw.pgconn)
        return _receive_results(raw.pgconn)
    except BaseException:  # late replies must not be read by the connection's next user
        raw.pgconn.finish()
        raise


def send_calls(
    raw: Any,
    calls: Sequence[EncodedCall],
    new: Mapping[str, str] = _NOTHING,
    *,
    final_command: bytes = b"",
) -> None:
    """Send all statements and the sync; BEGIN first, if the connection should be in a transaction.

    Prepares the `new` statements, SQL by name, before all others.
    """
    pgconn = raw.pgconn
    pgconn.enter_pipeline_mode()
    if not raw.autocommit and _is_idle(raw):
        # In the same pipeline, so that it costs no round trip; the driver would send it before its first statement.
        pgconn.send_query_params(b"BEGIN", None)
    for name, sql in new.items():
        pgconn.send_prepare(name.encode(), sql.encode())
    for command, values, formats in calls:
        if b" " in command:
            pgconn.send_query_params(command, values, None, formats, _BINARY)
        else:
            pgconn.send_query_prepared(command, values, formats, result_format=_BINARY)
    if final_command:
        pgconn.send_query_params(final_command, None)
    pgconn.pipeline_sync()


def _receive_results(pgconn: Any) -> list[Any]:
    """Wait for all results up to the sync: BEGIN's if it was sent, then one for each statement."""
    results: list[Any] = []
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    while True:
        while pgconn.is_busy():
            poll.poll()
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:  # libpq returns it after the results of each statement
            continue
        if result.status == SYNC:
            pgconn.exit_pipeline_mode()
            return results
        results.append(result)


def rows_of_calls(results: list[Any], call_count: int) -> list[Rows]:
    """Return the rows of the last calls; raise the first error, as the driver's."""
    rows: list[Rows] = []
    for result in results:
        if result.status == _FAILED:  # later results only report that the pipeline was aborted
            raise driver().errors.error_from_result(result)
        rows.append(_reader().rows(result) if result.ntuples else [])
    # Results of BEGIN, or of statements that were prepared, come first and are left out.
    return rows[len(rows) - call_count :]


def _flush(pgconn: Any) -> None:
    """Send the rest, and read meanwhile: with full buffers, client and server would block each other."""
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN | select.POLLOUT)
    while pgconn.flush():
        if poll.poll()[0][1] & select.POLLIN:
            pgconn.consume_input()


def _encode_value(value: Any) -> bytes | None:
    """Encode a value as PostgreSQL parses it from text; lists may contain numbers and None."""
    if value is None:
        return None
    if isinstance(value, list):
        return f"{{{','.join(['NULL' if item is None else str(item) for item in value])}}}".encode()
    data = (value if isinstance(value, str) else str(value)).encode()
    if b"\x00" in data:  # libpq would treat it as the end of the value
        raise driver().DataError("expected text without NUL (0x00), got some")
    return data


def _are_texts(values: Sequence[Any]) -> bool:
    """Return whether these are texts, some of which may be None."""
    if type(values[0]) is str:
        return True
    return type(next((value for value in values if value is not None), None)) is str


def _encode_texts(values: Sequence[str | None]) -> bytes:
    """Encode a text array in binary: in text format each quote needs a backslash, and jobs are full of quotes."""
    parts = [struct.pack("!5i", 1, None in values, _TEXT_TYPE, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            data = value.encode()
            parts += (len(data).to_bytes(4, "big"), data)
    return b"".join(parts)


class _Reader(threading.local):
    """Convert results into Python rows with the driver's own loaders, which are in C if available.

    That takes a tenth of the time of a Python function per value. Loaders that the project has registered for its own
    types are not used.
    """

    def __init__(self) -> None:
        from psycopg.adapt import AdaptersMap, Transformer  # a result exists only with psycopg 3
        from psycopg.types import bool as booleans
        from psycopg.types import datetime, numeric, string

        # An adapters map of its own: those of the connection may contain the project's loaders.
        adapters = AdaptersMap(types=driver().adapters.types)
        adapters.register_loader("bool", booleans.BoolBinaryLoader)
        adapters.register_loader("int2", numeric.Int2BinaryLoader)
        adapters.register_loader("int4", numeric.Int4BinaryLoader)
        adapters.register_loader("int8", numeric.Int8BinaryLoader)
        # Loads times in UTC, because the transformer has no connection with a time zone.
        adapters.register_loader("timestamptz", datetime.TimestamptzBinaryLoader)
        for type_name in ("text", "varchar", "json"):
            adapters.register_loader(type_name, string.TextBinaryLoader)
        self._transformer = Transformer(adapters)

    def rows(self, result: Any) -> Rows:
        """Return all rows of a result as tuples."""
        # The transformer keeps the current result, so each thread needs its own (`threading.local`).
        self._transformer.set_pgresult(result)
        rows: Rows = self._transformer.load_rows(0, result.ntuples, tuple)
        self._transformer.set_pgresult(None)  # otherwise the result stays in memory until the next one
        return rows


# Created at the first result, because it needs psycopg 3.
_reader = functools.cache(_Reader)
