"""Decide by one table of error codes what an error of a database means: an outage, a collision, wrong data, a setting.

The only place that knows the codes of PostgreSQL, MariaDB and SQLite. An error of the data comes back at each attempt,
so it must not be taken for an outage: callers refuse the item, and repeat the other items of the set without it.
"""

from __future__ import annotations

from enum import Enum

from django.db import DataError, InterfaceError, OperationalError

from ..errors import InvalidPayload


class ErrorKind(Enum):
    """What an error of the database says about the next attempt."""

    OUTAGE = "outage"
    """The database cannot be reached, or has no resources: a later attempt may succeed."""
    COLLISION = "collision"
    """Another transaction was in the way: the same transaction is likely to succeed when it is retried."""
    DATA = "data"
    """The database refuses a value: each attempt fails, and other values are not affected."""
    CONFIGURATION = "configuration"
    """A table, a right or the database itself is missing: each attempt fails until a person acts."""
    DEFECT = "defect"
    """Any other error: a defect of the statement."""


NO_TABLE = frozenset({"42P01", 1146})
LOCK_TIMEOUTS = frozenset({"55P03", 1205})
DEADLOCKS = frozenset({"40P01", 1213})
READ_ONLY = frozenset({"25006", 1290, 1792, 1836})
"""Errors of a primary that has become a standby: the next connection may reach the new primary."""

SESSION_LIMITS = frozenset({"25P03", "25P04", "57P05"})
"""PostgreSQL ended a session because it was idle, or in a transaction, for longer than its settings allow."""

_TOO_MANY = frozenset({"53300", 1040, 1203, 1226})
_TOO_MANY_TEXTS = ("too many connections", "too many clients", "connection slots are reserved", "no more connections")

_CHARACTERS = frozenset({"22P05", "22021", 1267, 1270, 1271, 1300, 1366, 1977})
_LENGTHS = frozenset({"22001", "54", 1118, 1153, 1301, 1406, "SQLITE_TOOBIG"})
_OTHER_VALUES = frozenset({"22", 1264, 1265, 1292, 1411, "SQLITE_MISMATCH", "SQLITE_RANGE"})

# PostgreSQL: SQLSTATEs, or their first two characters for a whole class. MariaDB: its numbers. SQLite: names.
_KINDS: dict[object, ErrorKind] = {
    **dict.fromkeys(LOCK_TIMEOUTS | DEADLOCKS | {"40001", 1020, "SQLITE_BUSY", "SQLITE_LOCKED"}, ErrorKind.COLLISION),
    **dict.fromkeys(_CHARACTERS | _LENGTHS | _OTHER_VALUES, ErrorKind.DATA),
    **dict.fromkeys(NO_TABLE, ErrorKind.CONFIGURATION),
    **dict.fromkeys({"28", "3D000", "42501", 1044, 1045, 1049, 1142, 1143}, ErrorKind.CONFIGURATION),
    **dict.fromkeys({"SQLITE_PERM", "SQLITE_AUTH", "SQLITE_NOTADB"}, ErrorKind.CONFIGURATION),
    # Drivers report a read-only server and a closed session as several classes of exceptions.
    **dict.fromkeys(READ_ONLY | SESSION_LIMITS | {"08", "53", "57", "58"}, ErrorKind.OUTAGE),
}


def kind_of(error: BaseException) -> ErrorKind:
    """Return what this error means. Codes that are not in the table count by the class of the exception."""
    code = error_code(error)
    kind = _KINDS.get(code) or _KINDS.get(_class_of(code))
    if kind is not None:
        return kind
    if _has_no_table(error):
        return ErrorKind.CONFIGURATION
    if isinstance(error, DataError | UnicodeEncodeError):  # the driver refused the value, so there is no code
        return ErrorKind.DATA
    return ErrorKind.OUTAGE if isinstance(error, OperationalError | InterfaceError) else ErrorKind.DEFECT


def exceeds_session_limit(error: BaseException | None) -> bool:
    """Return whether this error, or one that it replaced, says that a session lasted too long in its transaction."""
    while error is not None and error_code(error) not in SESSION_LIMITS:
        error = error.__cause__ or error.__context__
    return error is not None


def lacks_connections(error: BaseException) -> bool:
    """Return whether the database, its account or a pooler refused a connection because there are too many."""
    # libpq reports no code for a refused connection.
    return error_code(error) in _TOO_MANY or any(text in str(error) for text in _TOO_MANY_TEXTS)


def is_starting(error: BaseException) -> bool:
    """Return whether the database refused a connection because it is starting up or shutting down."""
    return error_code(error) == "57P03" or "the database system is " in str(error)


def is_collision(error: BaseException) -> bool:
    """Return True if the same transaction is likely to succeed when it is retried."""
    return kind_of(error) is ErrorKind.COLLISION


def refused_data(error: BaseException) -> InvalidPayload:
    """Return the error that a caller gets for `ErrorKind.DATA`.

    It names the reason without the driver's message, which quotes names of the database and parts of the value.
    """
    code = error_code(error)
    known = code if code in _KINDS else _class_of(code)
    if known in _CHARACTERS or isinstance(error, UnicodeEncodeError):
        reason = "a character that its encoding does not have; see manage.py check --database"
    elif known in _LENGTHS:
        reason = "a value that is too long for it; store large values elsewhere, and pass a reference"
    else:
        reason = "a value that it does not accept"
    number = f" (error {code})" if isinstance(code, int) or len(str(code)) == 5 else ""
    return InvalidPayload(f"invalid payload: the database cannot store {reason}{number}")


def remedy(error: BaseException) -> str:
    """Return what a person has to do about an unavailable database, or "" if nothing is known."""
    return "; run manage.py migrate" if error_code(error) in NO_TABLE or _has_no_table(error) else ""


def error_code(error: BaseException) -> object:
    """Return the SQLSTATE, MariaDB's number or SQLite's name; without any, the first argument of the error."""
    cause = error.__cause__
    for name in ("sqlstate", "pgcode", "sqlite_errorname"):
        if code := getattr(cause, name, None):
            return code
    # Errors of other packages may carry anything, such as the dict of a ValidationError.
    first = error.args[0] if error.args else None
    return first if isinstance(first, int | str) else None


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, because drivers append details on further lines."""
    text = str(error.args[-1] if error.args else error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _class_of(code: object) -> object:
    """Return the class of a SQLSTATE, and the primary name of SQLite's extended error."""
    if not isinstance(code, str):
        return None
    return "_".join(code.split("_")[:2]) if code.startswith("SQLITE_") else code[:2] if len(code) == 5 else None


def _has_no_table(error: BaseException) -> bool:
    return "no such table: django_faktory" in str(error)  # SQLite has no code for it
