"""Indexes and constraints over some rows only, where the database can, and what stands in elsewhere. Knows no model."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import Q


class HotIndex(models.Index):
    """An index over the rows in some states only; where the database has no partial indexes, one led by the state.

    Django leaves the condition out on MariaDB, and the plain index would make FETCH walk over finished rows.
    """

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Build the statement for the database at hand."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **kwargs)
        led_by_state = models.Index(fields=["state", *self.fields], name=self.name)
        return led_by_state.create_sql(model, schema_editor, using, **kwargs)


class IndexWhereSet(models.Index):
    """An index over the rows whose first field has a value, where the database can; else over all."""

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Build the statement for the database at hand."""
        is_partial = schema_editor.connection.features.supports_partial_indexes
        condition = Q(**{f"{self.fields[0]}__isnull": False}) if is_partial else None
        here = models.Index(fields=self.fields, name=self.name, condition=condition)
        return here.create_sql(model, schema_editor, using, **kwargs)


class PartialIndex(models.Index):
    """An index over some rows; where the database has no partial indexes, none: every job would have to touch it."""

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Build the statement, or one that does nothing."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **kwargs)
        return "DO 0"

    def remove_sql(self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, **kwargs: Any) -> Any:
        """Build the statement, or one that does nothing."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().remove_sql(model, schema_editor, **kwargs)
        return "DO 0"


class UniqueWhereSet(models.UniqueConstraint):
    """A unique constraint on the rows that have a value: only those are in its index, where the database can.

    (Django leaves a constraint with a condition out on MariaDB, where NULLs do not collide anyway.)
    """

    def create_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the statement for the database at hand."""
        return self._here(schema_editor).create_sql(model, schema_editor)

    def constraint_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the part of CREATE TABLE for the database at hand."""
        return self._here(schema_editor).constraint_sql(model, schema_editor)

    def remove_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the statement for the database at hand."""
        return self._here(schema_editor).remove_sql(model, schema_editor)

    def _here(self, schema_editor: Any) -> models.UniqueConstraint:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        has_value = Q(**{f"{field}__isnull": False for field in self.fields}) if is_partial else None
        return models.UniqueConstraint(fields=list(self.fields), name=self.name, condition=has_value)
