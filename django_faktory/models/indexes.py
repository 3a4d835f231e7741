"""Partial indexes and constraints, with a substitute on databases that have none. Imports no model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.checks import CheckMessage
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import Q


def without_ignored_parts(messages: Iterable[CheckMessage]) -> list[CheckMessage]:
    """Leave out Django's warnings that SQLite and MariaDB ignore the condition or the included columns of an index.

    Where a condition matters, the classes below have a substitute. An index without its included columns is slower, not
    wrong. Django 6.1 repeats each warning for each index: 13 lines in the output of every command.
    """
    return [message for message in messages if message.id not in {"models.W037", "models.W040"}]


class HotIndex(models.Index):
    """A partial index over the rows in some states; on MariaDB a full index that begins with the state.

    Django would omit the condition on MariaDB, and FETCH would then scan finished rows in the plain index.
    """

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Return the statement for the connection's database."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **kwargs)
        # The state first: FETCH compares it with a constant, and the other columns give the order.
        led_by_state = models.Index(fields=["state", *self.fields], name=self.name)
        return led_by_state.create_sql(model, schema_editor, using, **kwargs)


class IndexWhereSet(models.Index):
    """An index over the rows with a value in the first field; over all rows where partial indexes are missing."""

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Return the statement for the connection's database."""
        is_partial = schema_editor.connection.features.supports_partial_indexes
        condition = Q(**{f"{self.fields[0]}__isnull": False}) if is_partial else None
        index = models.Index(fields=self.fields, name=self.name, condition=condition)
        return index.create_sql(model, schema_editor, using, **kwargs)


class PartialIndex(models.Index):
    """A partial index that is omitted on MariaDB, where every job would have to maintain it."""

    def is_kept_on(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the index exists on this database."""
        return bool(connection.features.supports_partial_indexes)

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Return the statement, or a no-op."""
        if self.is_kept_on(schema_editor.connection):
            return super().create_sql(model, schema_editor, using, **kwargs)
        return _NO_OP

    def remove_sql(self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, **kwargs: Any) -> Any:
        """Return the statement, or a no-op for an index that was never created."""
        if self.is_kept_on(schema_editor.connection):
            return super().remove_sql(model, schema_editor, **kwargs)
        return _NO_OP


# Django executes whatever it gets, so the statement must be valid on each database.
_NO_OP = "SELECT 1"


class PostgresqlIndex(PartialIndex):
    """A partial index for a statement that only PostgreSQL has."""

    def is_kept_on(self, connection: BaseDatabaseWrapper) -> bool:
        """Return whether the index exists on this database."""
        return connection.vendor == "postgresql"


class UniqueWhereSet(models.UniqueConstraint):
    """A unique constraint on the rows that have a value; partial where the database supports it.

    Django omits a constraint with a condition on MariaDB, so it has none there; NULLs do not conflict anyway.
    """

    def create_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Return the statement for the connection's database."""
        return self._here(schema_editor).create_sql(model, schema_editor)

    def constraint_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Return the clause of CREATE TABLE for the connection's database."""
        return self._here(schema_editor).constraint_sql(model, schema_editor)

    def remove_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Return the statement for the connection's database."""
        return self._here(schema_editor).remove_sql(model, schema_editor)

    def _here(self, schema_editor: Any) -> models.UniqueConstraint:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        has_value = Q(**{f"{field}__isnull": False for field in self.fields}) if is_partial else None
        return models.UniqueConstraint(fields=list(self.fields), name=self.name, condition=has_value)
