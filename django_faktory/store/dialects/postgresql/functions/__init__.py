"""Stored functions of PostgreSQL, one for each verb of the store: read their files, install and check them (ADR 0043).

Each `.sql` file of this folder creates the functions of one subject, each before the functions that it calls. They are
installed after `migrate` (`install`), in the schema of the tables, and find the tables by the caller's `search_path`.
What is installed is compared by its text, so that no number has to be raised with a change, and a restored dump needs
nothing. A text of a newer release is left as it is: a function that does something else has another name.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from django.db import ProgrammingError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from .....errors import FunctionsMissing
from ....database_errors import error_code, first_line
from ...base import JOB

# Not imported: on use, the package root imports modules that import this one.
_VERSION: str = sys.modules[__name__.partition(".")[0]].__version__
_HEADER = re.compile(r"CREATE OR REPLACE FUNCTION (?P<name>\w+) \((?P<parameters>.*?)\)\s*RETURNS", re.DOTALL)
_BODY = re.compile(r"AS \$\$ -- \S+(.*)\$\$;", re.DOTALL)
_END = re.compile(r"(?<=\$\$;)\n+")
_COMMENT = re.compile(r"--.*")
_MUTEX = 5_218_806_127_240_961_311
"""Key of the advisory lock of `install`: two at once would fail with "tuple concurrently updated"."""

_NO_RIGHT, _OTHER_RESULT, _UNDEFINED = "42501", "42P13", "42883"

# One row for each function that has one of the names, in the schema of the tables: functions of our names elsewhere
# belong to another installation.
_INSTALLED = rf"""
SELECT proname, pg_proc.oid::regprocedure::text,
  pg_proc.oid = to_regprocedure(quote_ident(nspname) || '.' || wanted.signature),
  md5(regexp_replace(prosrc, '^ -- \S+', '')) = wanted.md5, COALESCE(substring(prosrc FROM '^ -- (\S+)'), '')
FROM unnest(%s::text[], %s::text[], %s::text[]) AS wanted (name, signature, md5)
JOIN pg_proc ON proname = wanted.name
JOIN pg_namespace ON pg_namespace.oid = pronamespace
WHERE pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('{JOB}'))"""


class StoredFunction(NamedTuple):
    """A function of a file."""

    name: str
    types: tuple[str, ...]
    """Types of the parameters."""
    text: str
    """The whole statement."""

    @property
    def signature(self) -> str:
        """The name with the types, as PostgreSQL's `regprocedure` reads it."""
        return f"{self.name}({', '.join(self.types)})"

    @property
    def md5(self) -> str:
        """The MD5 sum of the body without its version; PostgreSQL keeps the body unchanged in `prosrc`."""
        [body] = _BODY.findall(self.text)
        return _md5(body)


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


@functools.cache
def read() -> dict[str, StoredFunction]:
    """Return the functions of this version by name."""
    paths = sorted(Path(__file__).parent.glob("*.sql"))
    return {one.name: one for path in paths for one in parse(path.read_text(encoding="utf-8"))}


def parse(text: str) -> Iterator[StoredFunction]:
    """Yield the functions that the text of a file creates. Raises ValueError if it has other statements."""
    for statement in _END.split(text.rstrip()):
        header = _HEADER.search(statement)
        if header is None:
            raise ValueError(f"expected CREATE OR REPLACE FUNCTION name (…) RETURNS, found {statement[:80]!r}")
        parameters = _COMMENT.sub("", header["parameters"])
        types = [" ".join(parameter.split()[1:]) for parameter in parameters.split(",") if parameter.strip()]
        # PostgreSQL keeps the body as it is, and the rest in columns of its own: in the body, the sum of the whole text
        # shows a change of an option or of the result too.
        marked = statement.replace("AS $$", f"AS $$ -- {_VERSION} {_md5(statement)}", 1)
        yield StoredFunction(header["name"], tuple(types), marked)


def install(connection: BaseDatabaseWrapper) -> list[str]:
    """Create the functions that are missing or differ, in the schema of the tables; return their names.

    Only for a database with our tables. Raises FunctionsMissing if the role has no right to create them.
    """
    with connection.cursor() as cursor:
        if not _find_outdated(cursor):
            return []
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_MUTEX])
            cursor.execute(f"SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = '{JOB}'::regclass")
            [schema] = cursor.fetchone()
            names = _find_outdated(cursor)  # again: another `migrate` may have created them meanwhile
            for name in names:
                _create(connection, cursor, read()[name], schema)
            return names
    except ProgrammingError as error:
        if error_code(error) != _NO_RIGHT:
            raise
        raise FunctionsMissing(
            f"cannot create the functions of django_faktory in the database {connection.alias!r}: {first_line(error)}; "
            "migrate as a role with CREATE on the schema that owns its functions, or let one run the output of "
            "manage.py faktory functions --sql"
        ) from error


_checked: set[str] = set()
"""Aliases of databases whose functions this process has compared."""


def check(connection: BaseDatabaseWrapper) -> None:
    """Raise FunctionsMissing if a function is missing or of another version. Compares once per process and database."""
    if connection.alias in _checked:
        return
    if outdated := find_outdated(connection):
        raise missing(connection, outdated[0])
    _checked.add(connection.alias)


def forget() -> None:
    """Compare again at the next call, for tests."""
    _checked.clear()


def find_outdated(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the names of the functions that are missing or of another version."""
    # The driver's own cursor: a query of ours must not appear where a project counts its queries.
    with connection.wrap_database_errors, connection.cursor() as cursor:
        return _find_outdated(cursor.cursor)


def missing(connection: BaseDatabaseWrapper, name: str) -> FunctionsMissing:
    """Return the error for a function that is missing or of another version."""
    return FunctionsMissing(
        f"the database {connection.alias!r} lacks the function {name} of this version of django_faktory; run manage.py "
        f"migrate --database {connection.alias}"
    )


def undefined(error: BaseException) -> str:
    """Return the name of the function of ours that an error of PostgreSQL reports as undefined, or ""."""
    if error_code(error) != _UNDEFINED:
        return ""
    return next((name for name in read() if f"{name}(" in str(error)), "")


def _installed(cursor: CursorWrapper) -> Iterator[tuple[str, str, bool, bool]]:
    """Yield name and signature of each function with one of the names, whether the signature is ours, and whether the
    body is ours or newer.
    """
    wanted = read().values()
    columns = [[function.name for function in wanted], [function.signature for function in wanted]]
    cursor.execute(_INSTALLED, [*columns, [function.md5 for function in wanted]])
    for name, signature, is_signature, is_body, version in cursor.fetchall():
        yield name, signature, is_signature, is_body or _numbers(version) > _numbers(_VERSION)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _find_outdated(cursor: CursorWrapper) -> list[str]:
    current: dict[str, list[bool]] = {name: [] for name in read()}
    for name, _, is_signature, is_body in _installed(cursor):
        current[name].append(is_signature and is_body)
    # A second function of the name counts too: with other parameters, a call might be ambiguous.
    return [name for name, found in current.items() if found != [True]]


def _create(connection: BaseDatabaseWrapper, cursor: CursorWrapper, function: StoredFunction, schema: str) -> None:
    for name, signature, is_signature, _ in list(_installed(cursor)):
        # CREATE OR REPLACE leaves the old function beside one with other parameters.
        if name == function.name and not is_signature:
            cursor.execute(f"DROP ROUTINE {signature}")
    create = function.text.replace(f"FUNCTION {function.name} (", f"FUNCTION {schema}.{function.name} (", 1)
    try:
        with transaction.atomic(using=connection.alias):
            cursor.execute(create)
    except ProgrammingError as error:
        if error_code(error) != _OTHER_RESULT:
            raise
        # CREATE OR REPLACE cannot change the columns of the result.
        cursor.execute(f"DROP ROUTINE {schema}.{function.signature}")
        cursor.execute(create)
