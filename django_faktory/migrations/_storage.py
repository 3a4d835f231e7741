"""Migration operation that sets PostgreSQL's storage parameters, such as autovacuum thresholds (ADR 0009)."""

from __future__ import annotations

from collections.abc import Mapping

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation, OperationCategory
from django.db.migrations.state import ProjectState


class TuneStorage(Operation):
    """Set storage parameters of a model's table on PostgreSQL; do nothing on other databases."""

    reduces_to_sql = True
    reversible = True
    category = OperationCategory.ALTERATION

    def __init__(self, name: str, parameters: Mapping[str, object]) -> None:
        self.name, self.parameters = name, parameters

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Leave the state of the models unchanged."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Set the storage parameters on PostgreSQL."""
        text = ", ".join(f"{parameter} = {value}" for parameter, value in self.parameters.items())
        self._alter(app_label, schema_editor, to_state, f"SET ({text})")

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Reset the parameters to the server's defaults."""
        self._alter(app_label, schema_editor, to_state, f"RESET ({', '.join(self.parameters)})")

    def describe(self) -> str:
        """Return the line that `migrate --plan` prints."""
        return f"Tune storage of {self.name}"

    def _alter(self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, state: ProjectState, change: str) -> None:
        connection = schema_editor.connection
        model = state.apps.get_model(app_label, self.name)
        if connection.vendor == "postgresql" and self.allow_migrate_model(connection.alias, model):
            schema_editor.execute(f"ALTER TABLE {schema_editor.quote_name(model._meta.db_table)} {change}")
