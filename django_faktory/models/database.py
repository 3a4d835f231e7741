"""Base class of all models: the only place that decides which database stores their rows, for reading and writing.

Django's routers are not asked: a row that another one reads from a replica would be changed there, and jobs that a
page reads from `default` are not the jobs that its buttons change.
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import models

from .. import conf

_Row = TypeVar("_Row", bound="JobsModel")


class JobsManager(models.Manager[_Row]):
    """Manager of the rows in `FAKTORY["DATABASE"]`; `using()` names another database."""

    @property
    def db(self) -> str:
        """The alias that `using()` names, else that of the row whose relation is read, else that of the setting."""
        row = self._hints.get("instance") or getattr(self, "instance", None)  # type: ignore[attr-defined]
        alias = row._state.db if isinstance(row, JobsModel) else None  # noqa: SLF001  (documented)
        return self._db or alias or self.model.get_alias()

    def get_queryset(self) -> models.QuerySet[_Row]:
        return super().get_queryset().using(self.db)


class JobsModel(models.Model):
    """Model whose rows are where the jobs are."""

    objects = JobsManager()

    class Meta:
        abstract = True
        base_manager_name = "objects"

    def save(self, *args: Any, using: str | None = None, **options: Any) -> None:
        """Save the row where it was read, a new one by the setting."""
        super().save(*args, using=using or self._state.db or self.get_alias(), **options)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        """Delete the row where it was read."""
        return super().delete(using or self._state.db, keep_parents)

    @classmethod
    def get_alias(cls) -> str:
        """Return the alias of the database that stores new rows."""
        return str(conf.get("DATABASE"))
