"""Model fields that behave the same on every database. Imports no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

if TYPE_CHECKING:
    _CharField = models.CharField[Any, Any]
    _BigIntegerField = models.BigIntegerField[Any, Any]
else:  # Django's own classes take no type parameters at run time
    _CharField, _BigIntegerField = models.CharField, models.BigIntegerField


class ExactCharField(_CharField):
    """Text field compared byte for byte on every database.

    Ids and names that differ in case or in a trailing space are different. MariaDB's default collation would treat them
    as equal; PostgreSQL's default collation is slower.
    """

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        """Add the collation for the connection's database."""
        parameters: dict[str, Any] = super().db_parameters(connection)
        # SQLite needs none: it compares bytes by default.
        return {**parameters, "collation": {"postgresql": "C", "mysql": "utf8mb4_nopad_bin"}.get(connection.vendor)}

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Spell the type out on PostgreSQL, so that Django creates no second index.

        For "varchar" Django adds a LIKE index to each unique column. In collation C the unique index itself supports
        LIKE, and every PUSH would have to maintain the second one.
        """
        column_type = super().db_type(connection)
        return (
            column_type and column_type.replace("varchar", "character varying")
            if connection.vendor == "postgresql"
            else column_type
        )


class MarkField(_BigIntegerField):
    """Id of a transaction on PostgreSQL, a number on other databases."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the type that SQL compares with ids of transactions without a conversion."""
        return "xid8" if connection.vendor == "postgresql" else super().db_type(connection)

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        """Pass PostgreSQL a text: it converts no number to the type."""
        number = super().get_db_prep_value(value, connection, prepared)
        return number if number is None or connection.vendor != "postgresql" else str(number)

    def from_db_value(self, value: Any, *_: Any) -> int:
        """Convert the text that drivers return for the type."""
        return int(value)
