"""Partitions of the history by day (ADR 0049): what differs between databases. Without partitions: SQLite."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import KEPT

DAY = timedelta(days=1)


class Partition(NamedTuple):
    """The rows of the days from `first` up to, but without, `end`."""

    name: str
    first: date
    end: date
    is_detaching: bool = False
    """Whether a DETACH CONCURRENTLY was interrupted: no statement through the table reads it."""

    @property
    def is_kept(self) -> bool:
        """Whether it has the rows that leave one by one; it stays."""
        return self.first <= KEPT


def find(partitions: list[Partition], day: date) -> Partition | None:
    """Return the partition that takes rows of this day."""
    return next((one for one in partitions if one.first <= day < one.end and not one.is_detaching), None)


class Partitions:
    """The partitions of the table of history. Each change is a transaction of its own; a lock is waited for briefly."""

    def read(self, connection: BaseDatabaseWrapper) -> list[Partition] | None:  # noqa: ARG002
        """Return the partitions in their order; None if the table has none and cannot have any: it is plain."""
        return None

    def convert(self, connection: BaseDatabaseWrapper) -> None:
        """Partition the table if it is plain and empty."""

    def add(self, connection: BaseDatabaseWrapper, first: date, end: date) -> None:
        """Add a partition, unless there is one for its first day."""

    def empty(self, connection: BaseDatabaseWrapper, partition: Partition, forget: Callable[[], None]) -> bool:
        """Delete all rows of the partition at once, and their numbers by `forget`; return False if one is not due."""
        raise NotImplementedError

    def remove(self, connection: BaseDatabaseWrapper, partition: Partition) -> None:
        """Remove an empty partition, if no transaction that reads the history delays that."""

    def find_detached(self, connection: BaseDatabaseWrapper) -> list[str]:  # noqa: ARG002
        """Return detached partitions that have rows; drop those that have none."""
        return []
