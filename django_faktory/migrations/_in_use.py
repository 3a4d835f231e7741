"""Migration operations that change tables while workers of the previous release use them.

A change of a table needs an exclusive lock. Its request waits for every transaction that has read the table, and all
later statements wait for the request: one long transaction would stop all pushes and fetches. These operations
therefore request the lock for half a second only, pause, and request it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import NotSupportedError, OperationalError, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations import SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.migrations.state import ProjectState

from ..core.logs import get_logger
from ..store.transactions import error_code

logger = get_logger(__name__)

HOLD_UP_S = 0.5
"""Maximum wait of one request, in which workers wait too; less than PostgreSQL's `deadlock_timeout`."""
PAUSE_S = 1.0
WAIT_S = 300.0
"""Seconds after which a migration that could not lock its tables fails."""

_STOOD_TOO_LONG = frozenset({"57014", "55P03", 1205})
"""PostgreSQL's statement and lock timeouts, MariaDB's lock wait timeout."""


class TablesInUse(SeparateDatabaseAndState):
    """Operations that change existing tables; the first operation of a migration.

    Workers wait for at most `HOLD_UP_S` and for the changes themselves. Raises OperationalError, with nothing changed,
    if the tables could not be locked within `wait_s`.
    """

    def __init__(self, operations: Sequence[Operation], *, wait_s: float = WAIT_S) -> None:
        super().__init__(database_operations=operations, state_operations=operations)
        self._wait_s = wait_s

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name and the arguments of the constructor."""
        return type(self).__name__, [], {"operations": self.database_operations, "wait_s": self._wait_s}

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Lock the tables and apply the operations."""
        with _considerate(schema_editor, self._tables(app_label, schema_editor, from_state), self._wait_s):
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Lock the tables and reverse the operations."""
        with _considerate(schema_editor, self._tables(app_label, schema_editor, from_state), self._wait_s):
            super().database_backwards(app_label, schema_editor, from_state, to_state)

    def _tables(self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState) -> list[str]:
        """Return the tables that exist in this database, sorted: all migrations lock them in one order."""
        named = {getattr(operation, "model_name", None) or operation.name for operation in self.database_operations}
        models = [state.apps.get_model(app_label, name) for name in named if (app_label, name.lower()) in state.models]
        alias = schema_editor.connection.alias
        return sorted(model._meta.db_table for model in models if self.allow_migrate_model(alias, model))


class ReplaceIndex(Operation):
    """Change the condition of an index: build a new index, drop the old one, and rename the new one.

    On PostgreSQL no statement of a worker waits, and the old index is used until the new one is complete. Requires a
    migration with `atomic = False`. Safe to repeat after an error. Changes nothing on databases without conditions of
    indexes (MariaDB).
    """

    reduces_to_sql = True
    reversible = True
    category = OperationCategory.ALTERATION

    def __init__(self, model_name: str, index: models.Index, before: models.Index) -> None:
        self.model_name, self.index, self.before = model_name, index, before

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change the index in the models' state."""
        state.remove_index(app_label, self.model_name.lower(), self.before.name)
        state.add_index(app_label, self.model_name.lower(), self.index)

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Build the new index in place of the old one."""
        self._replace(app_label, schema_editor, to_state, self.index)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Build the old index in place of the new one."""
        self._replace(app_label, schema_editor, to_state, self.before)

    def describe(self) -> str:
        """Return the line that `migrate --plan` prints."""
        return f"Replace index {self.index.name} of {self.model_name}"

    def _replace(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState, index: models.Index
    ) -> None:
        connection, model = schema_editor.connection, state.apps.get_model(app_label, self.model_name)
        is_partial = connection.features.supports_partial_indexes
        if not is_partial or not self.allow_migrate_model(connection.alias, model):
            return
        if connection.vendor != "postgresql":
            with transaction.atomic(using=connection.alias):
                schema_editor.remove_index(model, index)
                schema_editor.add_index(model, index)
            return
        if connection.in_atomic_block:
            raise NotSupportedError(f"{self.describe()}: expected a migration with atomic = False; set it")
        new = index.clone()
        new.name = f"{index.name}_new"
        schema_editor.remove_index(model, new, concurrently=True)  # a failed attempt leaves an invalid index
        schema_editor.add_index(model, new, concurrently=True)
        schema_editor.remove_index(model, index, concurrently=True)
        names = map(schema_editor.quote_name, (new.name, index.name))
        schema_editor.execute("ALTER INDEX {} RENAME TO {}".format(*names))


@contextmanager
def _considerate(schema_editor: BaseDatabaseSchemaEditor, tables: Sequence[str], wait_s: float) -> Iterator[None]:
    connection = schema_editor.connection
    with ExitStack() as stack:
        if tables and not schema_editor.collect_sql:
            if connection.vendor == "postgresql":
                if not connection.in_atomic_block:  # a migration with `atomic = False`
                    stack.enter_context(transaction.atomic(using=connection.alias))
                _lock(connection, tables, wait_s)
            elif connection.vendor == "mysql":
                _ask_for_moments(schema_editor, wait_s)
            elif connection.vendor == "sqlite":
                stack.enter_context(_numbers_go_on(connection, tables))
        yield


def _lock(connection: BaseDatabaseWrapper, tables: Sequence[str], wait_s: float) -> None:
    """Lock all tables or none. Afterwards a statement that would wait for a lock fails, and the migration rolls back."""
    named = ", ".join(map(connection.ops.quote_name, tables))

    def lock() -> None:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {HOLD_UP_S * 1000:.0f}")
            cursor.execute(f"LOCK TABLE {named} IN ACCESS EXCLUSIVE MODE")
            cursor.execute("SET LOCAL statement_timeout TO DEFAULT")
            cursor.execute(f"SET LOCAL lock_timeout = {HOLD_UP_S * 1000:.0f}")

    _patiently(lock, tables, wait_s=wait_s)


def _ask_for_moments(schema_editor: BaseDatabaseSchemaEditor, wait_s: float) -> None:
    """Execute each statement of the migration with a short lock timeout, again and again until it succeeds.

    MariaDB commits each statement that changes a table. Only the first one gives up after `wait_s`: a migration that is
    applied in part cannot be started again.
    """
    connection, execute = schema_editor.connection, schema_editor.execute
    patience = [wait_s]

    def execute_patiently(sql: Any, params: Any = ()) -> None:
        def attempt() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@SESSION.lock_wait_timeout")
                [before] = cursor.fetchone()
                cursor.execute("SET SESSION lock_wait_timeout = 1")  # the variable takes whole seconds
                try:
                    execute(sql, params)
                finally:
                    cursor.execute("SET SESSION lock_wait_timeout = %s", [before])

        _patiently(attempt, [str(sql)], wait_s=patience[0])
        patience[0] = math.inf

    schema_editor.execute = execute_patiently  # type: ignore[method-assign]  # deferred index statements use it too


@contextmanager
def _numbers_go_on(connection: BaseDatabaseWrapper, tables: Sequence[str]) -> Iterator[None]:
    """Keep the highest row numbers of the tables.

    Django creates a changed table again, and SQLite would continue from the highest row that is left. Tokens of locks
    are such numbers and must be unique.
    """
    places = ", ".join(["%s"] * len(tables))
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT name, seq FROM sqlite_sequence WHERE name IN ({places})", tables)
        before = cursor.fetchall()
    yield
    with connection.cursor() as cursor:
        for name, highest in before:
            cursor.execute("DELETE FROM sqlite_sequence WHERE name = %s", [name])
            cursor.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (%s, %s)", [name, highest])


def _patiently(attempt: Callable[[], None], what: Sequence[str], *, wait_s: float) -> None:
    deadline, has_logged = time.monotonic() + wait_s, False
    while True:
        try:
            return attempt()
        except OperationalError as error:
            if error_code(error) not in _STOOD_TOO_LONG or time.monotonic() > deadline:
                raise
        if not has_logged:
            logger.warning("migration waits for tables in use by a long transaction wanted=%s", ", ".join(what))
            has_logged = True
        time.sleep(PAUSE_S)
