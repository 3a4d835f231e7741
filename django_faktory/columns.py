"""Columns that are the same on every database. Knows no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

if TYPE_CHECKING:
    _CharField = models.CharField[Any, Any]
else:  # Django's own class takes no type parameters at run time
    _CharField = models.CharField


class ExactCharField(_CharField):
    """Text compared byte for byte, on every database: ids and names that differ in case or in a trailing
    space are different. (MariaDB's default collation would take them for one; PostgreSQL's is slower.)"""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        """Add the collation of the database at hand."""
        found: dict[str, Any] = super().db_parameters(connection)
        return {**found, "collation": {"postgresql": "C", "mysql": "utf8mb4_nopad_bin"}.get(connection.vendor)}

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Spell the type out on PostgreSQL: for "varchar" Django adds a second, LIKE index to each unique one,
        which a column in collation C does not need and every PUSH would pay for."""
        found = super().db_type(connection)
        return found and found.replace("varchar", "character varying") if connection.vendor == "postgresql" else found
