"""Triggers that count jobs: one delta for each number that a statement, or a row, changes (ADR 0047).

Installed after `migrate`, as the stored functions of PostgreSQL, and compared by their texts. They count what any
statement does to the two tables of jobs, also one that does not come from this package.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ...errors import FunctionsMissing
from ..database_errors import first_line
from . import dialect_of
from .base import DELTA, HISTORY, JOB

_TRANSITIONS = {
    "INSERT": "NEW TABLE AS added",
    "DELETE": "OLD TABLE AS removed",
    "UPDATE": "OLD TABLE AS removed NEW TABLE AS added",
}
"""Events of the triggers, with the rows that the functions of PostgreSQL count."""

_INSTALLED = {
    "postgresql": "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger"
    f" WHERE tgrelid IN (to_regclass('{JOB}'), to_regclass('{HISTORY}')) AND NOT tgisinternal AND tgenabled <> 'D'",
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'",
    "mysql": "SELECT trigger_name, action_statement FROM information_schema.triggers WHERE trigger_schema = DATABASE()",
}
# PostgreSQL's rows are only inserted, and found by their marks: a wider index, and the check that a key needs, double
# what a row costs. Without a key, a publication of all tables would refuse the DELETEs of folds.
_NARROW = f"""
ALTER TABLE {DELTA} ALTER mark SET DEFAULT pg_current_xact_id(), DROP CONSTRAINT IF EXISTS {DELTA}_pkey,
  REPLICA IDENTITY FULL;
CREATE INDEX IF NOT EXISTS faktory_delta_mark ON {DELTA} (mark)"""

_SCHEMA = re.compile(r'(?:"[^"]+"|\w+)\.|"')
"""What databases add to a text: PostgreSQL the schema, SQLite quotes where a table was renamed."""


class Trigger(NamedTuple):
    """A trigger as this version creates it."""

    name: str
    sql: str
    """The whole statement."""
    text: str
    """What the database keeps of it."""


def name_of_day(column: str, connection: BaseDatabaseWrapper) -> str:
    """Return SQL for a day as text, which is the name of its numbers."""
    if connection.vendor == "mysql":
        return f"CAST({column} AS CHAR CHARACTER SET utf8mb4) COLLATE utf8mb4_nopad_bin"
    return f"to_char({column}, 'YYYY-MM-DD')" if connection.vendor == "postgresql" else column


def build(connection: BaseDatabaseWrapper) -> list[Trigger]:
    """Return the triggers of this database."""
    return [_build(connection, table, event) for table in (JOB, HISTORY) for event in _TRANSITIONS]


def _build(connection: BaseDatabaseWrapper, table: str, event: str) -> Trigger:
    name = f"{table}_{event.lower()}"
    is_sqlite = connection.vendor == "sqlite"
    head = f"CREATE {'' if is_sqlite else 'OR REPLACE '}TRIGGER {name} AFTER {event} ON {table}"
    if connection.vendor == "postgresql":
        function = "faktory_count_jobs_1" if table == JOB else "faktory_count_history_1"
        sql = f"{head} REFERENCING {_TRANSITIONS[event]} FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
        return Trigger(name, sql, sql.replace("OR REPLACE ", ""))
    dialect, insert = dialect_of(connection), f"INSERT INTO {DELTA} (mark, kind, name, amount) VALUES"
    old, new = (
        f"{row}.state, {name_of_day(f'{row}.day', connection) if table == HISTORY else f'{row}.queue'}"
        for row in ("OLD", "NEW")
    )
    added = f"({dialect.own_mark}, {new}, 1)"
    is_changed = "NEW.state <> OLD.state OR " + ("NEW.day <> OLD.day" if table == HISTORY else "NEW.queue <> OLD.queue")
    if not is_sqlite:
        removed = f"({dialect.own_mark}, {old}, -1)"
        rows = {"INSERT": added, "DELETE": removed, "UPDATE": f"{removed}, {added}"}[event]
        body = f"{insert} {rows} {dialect.add_tail}"
        if event == "UPDATE":
            body = f"IF {is_changed} THEN {body}; END IF"
        return Trigger(name, f"{head} FOR EACH ROW {body}", body)
    # Deletes insert nothing: Django empties tables in any order, and would leave negative numbers.
    add = f"{insert} {added} {dialect.add_tail};"
    remove = f"UPDATE {DELTA} SET amount = amount - 1 WHERE (mark, kind, name) = ({dialect.own_mark}, {old});"
    steps = {"INSERT": add, "DELETE": remove, "UPDATE": f"{remove} {add}"}[event]
    sql = f"{head} FOR EACH ROW {f'WHEN {is_changed} ' if event == 'UPDATE' else ''}BEGIN {steps} END"
    return Trigger(name, sql, sql)


def has_tables(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database has our tables."""
    return connection.vendor in _INSTALLED and JOB in connection.introspection.table_names()


def install(connection: BaseDatabaseWrapper) -> list[str]:
    """Create the triggers that are missing or differ; return their names. Does nothing without our tables.

    Raises FunctionsMissing if the database refuses.
    """
    outdated = find_outdated(connection) if has_tables(connection) else []
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            for trigger in build(connection):
                if trigger.name in outdated:
                    if connection.vendor == "sqlite":  # it has no CREATE OR REPLACE
                        cursor.execute(f"DROP TRIGGER IF EXISTS {trigger.name}")
                    cursor.execute(trigger.sql)
            if outdated and connection.vendor == "postgresql":
                cursor.execute(_NARROW)
    except DatabaseError as error:
        raise FunctionsMissing(
            f"cannot create the triggers of django_faktory in the database {connection.alias!r}: {first_line(error)}; "
            "migrate as the owner of the tables; MariaDB with a binary log also needs log_bin_trust_function_creators"
        ) from error
    return outdated


_checked: set[str] = set()
"""Aliases of databases whose triggers this process has compared."""


def check(connection: BaseDatabaseWrapper) -> None:
    """Raise FunctionsMissing if a trigger is missing or differs. Compares once per process and database."""
    if connection.alias in _checked:
        return
    if outdated := find_outdated(connection):
        raise FunctionsMissing(
            f"the database {connection.alias!r} lacks the trigger {outdated[0]} of this version of django_faktory; run "
            f"manage.py migrate --database {connection.alias}"
        )
    _checked.add(connection.alias)


def forget() -> None:
    """Compare again at the next call, for tests."""
    _checked.clear()


def find_outdated(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the names of the triggers that are missing or differ."""
    # The driver's own cursor: a query of ours must not appear where a project counts its queries.
    with connection.wrap_database_errors, connection.cursor() as cursor:
        cursor.cursor.execute(_INSTALLED[connection.vendor])
        found = {name: _SCHEMA.sub("", text) for name, text in cursor.cursor.fetchall()}
    return [one.name for one in build(connection) if found.get(one.name) != _SCHEMA.sub("", one.text)]
