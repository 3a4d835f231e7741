"""Changes of tables that workers of the last release use meanwhile: an operation of migrations.

What changes a table needs it alone for a moment. Who asks for that stands in a queue behind every transaction that has
looked at the table, and everybody who comes later stands behind him: with one transaction that is open for long nobody
pushes or fetches any more. So we ask for a moment only, step back, and ask again.
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

from ..logs import get_logger
from ..store.transactions import error_code

logger = get_logger(__name__)

HOLD_UP_S = 0.5
"""How long we stand in the queue, and hold up who is behind us; less than PostgreSQL's `deadlock_timeout`."""
PAUSE_S = 1.0
WAIT_S = 300.0

_STOOD_TOO_LONG = frozenset({"57014", "55P03", 1205})
"""PostgreSQL's statement and lock timeouts, MariaDB's lock wait timeout."""


class TablesInUse(SeparateDatabaseAndState):
    """Operations that change tables which are there already; the first of a migration.

    Nobody is held up for longer than a moment, but for the time of the changes themselves. Raises OperationalError,
    with nothing changed, where the tables could not be had within `WAIT_S`.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        super().__init__(database_operations=operations, state_operations=operations)

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """As it was made."""
        return type(self).__name__, [], {"operations": self.database_operations}

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Change them."""
        with _considerate(schema_editor, self._tables(app_label, schema_editor, from_state)):
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Change them back."""
        with _considerate(schema_editor, self._tables(app_label, schema_editor, from_state)):
            super().database_backwards(app_label, schema_editor, from_state, to_state)

    def _tables(self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState) -> list[str]:
        """Those that are there and in this database, in one order everywhere."""
        named = {getattr(operation, "model_name", None) or operation.name for operation in self.database_operations}
        models = [state.apps.get_model(app_label, name) for name in named if (app_label, name.lower()) in state.models]
        alias = schema_editor.connection.alias
        return sorted(model._meta.db_table for model in models if self.allow_migrate_model(alias, model))


class ReplaceIndex(Operation):
    """Give an index of a table in use another condition: build it beside the old one, then let it take its name.

    On PostgreSQL no statement of a worker waits for it, and the old index serves until the new one is complete. Only in
    migrations with `atomic = False`. Safe to run again after it broke off. Where an index has no condition (MariaDB)
    there is nothing to change.
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
        """Replace it."""
        self._replace(app_label, schema_editor, to_state, self.index)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Replace it by the one before."""
        self._replace(app_label, schema_editor, to_state, self.before)

    def describe(self) -> str:
        """What `migrate --plan` shows."""
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
        schema_editor.remove_index(model, new, concurrently=True)  # what an attempt that broke off has left is invalid
        schema_editor.add_index(model, new, concurrently=True)
        schema_editor.remove_index(model, index, concurrently=True)
        names = map(schema_editor.quote_name, (new.name, index.name))
        schema_editor.execute("ALTER INDEX {} RENAME TO {}".format(*names))


@contextmanager
def _considerate(schema_editor: BaseDatabaseSchemaEditor, tables: Sequence[str]) -> Iterator[None]:
    connection = schema_editor.connection
    with ExitStack() as stack:
        if tables and not schema_editor.collect_sql:
            if connection.vendor == "postgresql":
                if not connection.in_atomic_block:  # of a migration that is not atomic
                    stack.enter_context(transaction.atomic(using=connection.alias))
                _lock(connection, tables)
            elif connection.vendor == "mysql":
                _ask_for_moments(schema_editor)
            elif connection.vendor == "sqlite":
                stack.enter_context(_numbers_go_on(connection, tables))
        yield


def _lock(connection: BaseDatabaseWrapper, tables: Sequence[str]) -> None:
    """All of them, or none; nothing waits for anything after that, or it fails and all is as it was."""
    named = ", ".join(map(connection.ops.quote_name, tables))

    def lock() -> None:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {HOLD_UP_S * 1000:.0f}")
            cursor.execute(f"LOCK TABLE {named} IN ACCESS EXCLUSIVE MODE")
            cursor.execute("SET LOCAL statement_timeout TO DEFAULT")
            cursor.execute(f"SET LOCAL lock_timeout = {HOLD_UP_S * 1000:.0f}")

    _patiently(lock, tables, wait_s=WAIT_S)


def _ask_for_moments(schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Each statement of this migration: one that changes a table is a transaction of its own there.

    Only the first may give up: a migration of which a part is done cannot be begun again.
    """
    connection, execute = schema_editor.connection, schema_editor.execute
    patience = [WAIT_S]

    def execute_patiently(sql: Any, params: Any = ()) -> None:
        def attempt() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@SESSION.lock_wait_timeout")
                [before] = cursor.fetchone()
                cursor.execute("SET SESSION lock_wait_timeout = 1")  # whole seconds are all it takes
                try:
                    execute(sql, params)
                finally:
                    cursor.execute("SET SESSION lock_wait_timeout = %s", [before])

        _patiently(attempt, [str(sql)], wait_s=patience[0])
        patience[0] = math.inf

    schema_editor.execute = execute_patiently  # type: ignore[method-assign]  # the indexes it puts off go this way too


@contextmanager
def _numbers_go_on(connection: BaseDatabaseWrapper, tables: Sequence[str]) -> Iterator[None]:
    """Django makes such a table anew, and SQLite would number its rows from the highest that is left: tokens of locks
    must never come again."""
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
    deadline, has_said = time.monotonic() + wait_s, False
    while True:
        try:
            return attempt()
        except OperationalError as error:
            if error_code(error) not in _STOOD_TOO_LONG or time.monotonic() > deadline:
                raise
        if not has_said:
            logger.warning("migration waits for tables in use by a long transaction wanted=%s", ", ".join(what))
            has_said = True
        time.sleep(PAUSE_S)
