"""Walk the rows of a query, or the items of an iterable, in chunks: each commits its writes with the place it reached.

`Rows` is what `context.each` returns. Contract: `docs/long-jobs.md`, ADR 0051.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from itertools import islice
from types import SimpleNamespace, TracebackType
from typing import Any, Generic, TypeVar

from django.db.models import QuerySet
from django.db.models.query import ModelIterable
from msgspec.structs import replace

from ..core.steps import StepRecord
from ..errors import InvalidStep, TaskTimeout, WorkerShutdown
from .steps import Steps, check_name, refuse_coroutine

T = TypeVar("T")
Key = Callable[[T], int | str]

MAX_BY = 100_000
"""Maximum number of rows of a chunk."""


class Rows(Generic[T]):
    """The rows of a walk: `with context.each(orders) as rows: for order in rows:`.

    Leaving the block commits what was done, and the walk is over. An exception undoes the open chunk, and a later run
    continues behind the last committed one.
    """

    kind = "walk"

    key = ""

    def __init__(
        self, steps: Steps, source: Iterable[T], *, name: str, by: int, key: Key[T] | None, total: int | None
    ) -> None:
        self.name, self._steps, self._by = check_name("each", name), steps, by
        if isinstance(by, bool) or not isinstance(by, int) or not 0 < by <= MAX_BY:
            raise InvalidStep(f"{self}: by: expected a whole number from 1 to {MAX_BY:,}, got {by!r:.80}")
        self._source = self._choose_source(source, key)
        self._record = StepRecord(name=name, done=0, total=total, is_finished=False)
        self._chunk: Sequence[T] = ()
        self._taken = 0
        """Number of rows of the chunk that the block has taken."""
        self._is_last = self._is_over = self._has_committed = False
        self._began_at = 0.0
        self._block = ExitStack()
        self._transaction: ExitStack | None = None

    def __str__(self) -> str:
        return f"each {self.name!r}"

    def _choose_source(self, source: Iterable[T], key: Key[T] | None) -> _Query | _Items:
        if isinstance(source, QuerySet):
            return _Query(source, self)
        if key is not None and isinstance(source, Iterable):
            return _Items(source, key, self)
        raise InvalidStep(f"{self}: expected a queryset, or an iterable with key=, got {type(source).__name__}")

    def __enter__(self) -> Rows[T]:
        refuse_coroutine(self, "walk rows in a task that is written as `def`")
        self._began_at = time.monotonic()
        record = self._steps.enter(self)
        if record is not None:
            self._record, self._is_last = record, record.is_finished
            if record.reached is not None:
                self._source.resume(self._steps.unseal(record.reached))
        elif self._record.total is None:
            self._record = replace(self._record, total=self._source.count())
        self._block.enter_context(self._steps.opened(self))
        return self

    def __iter__(self) -> Iterator[T]:
        if not self._began_at:
            raise InvalidStep(f"{self}: expected `with context.each(…) as rows:`, and the loop in its block")
        return self

    def __next__(self) -> T:
        if self._taken == len(self._chunk):
            self._next_chunk()
        self._taken += 1
        return self._chunk[self._taken - 1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._block:
            if kind is not None:
                self._name_timeout()
                if self._transaction is not None:
                    self._transaction.__exit__(kind, error, trace)
            elif not self._record.is_finished:
                self._is_over = True
                if self._transaction is None:
                    self._begin()
                self._commit()

    def _next_chunk(self) -> None:
        """Commit the open chunk, and begin the next one. Raises StopIteration at the end, whose chunk stays open."""
        if self._is_last:
            raise StopIteration
        self._commit()
        control = self._steps.control
        if control.is_ending():
            control.end(WorkerShutdown(f"the worker stops; {self} continues behind its {self._record.done:,} rows"))
        chunk = None if self._source.reads_in_transaction else self._source.read(self._by)
        self._begin()
        self._chunk = self._source.read(self._by) if chunk is None else chunk
        self._is_last = self._source.is_exhausted
        if not self._chunk:
            raise StopIteration

    def _begin(self) -> None:
        self._transaction = ExitStack()
        self._transaction.enter_context(self._steps.committing(self, self._build_record))

    def _commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        transaction.close()
        self._record, self._has_committed = self._next_record, True
        self._chunk, self._taken = (), 0
        if self._record.total and self._record.done is not None:
            self._steps.control.progress(
                self._record.done, self._record.total, "" if self.name == "each" else self.name
            )

    def _build_record(self) -> StepRecord:
        reached = self._steps.seal(self._source.place(self._taken - 1)) if self._taken else self._record.reached
        self._next_record = replace(
            self._record,
            reached=reached,
            done=(self._record.done or 0) + self._taken,
            is_finished=self._is_over,
            ran_s=time.monotonic() - self._began_at,
        )
        return self._next_record

    def _name_timeout(self) -> None:
        """Say in the error that no run will ever get further."""
        control = self._steps.control
        if isinstance(control.reason, TaskTimeout) and not self._has_committed:
            control.reason = TaskTimeout(
                f"{control.reason}, and no chunk of {self} did; set a smaller by= than {self._by}, or a longer timeout"
            )


class _Query:
    """The rows of a queryset, in the order of a field."""

    reads_in_transaction = True  # for `select_for_update`
    is_exhausted = False
    """Whether the latest chunk was the last one."""

    def __init__(self, rows: QuerySet[Any], walk: Rows[Any]) -> None:
        self._field, descends = _order_of(rows, walk)
        self._rows = rows.order_by(f"{'-' * descends}{self._field.attname}")
        self._behind = f"{self._field.attname}__{'lt' if descends else 'gt'}"
        self._reached: Any = None
        self._places: list[Any] = []

    def count(self) -> int | None:
        """Return the number of rows."""
        return self._rows.count()

    def resume(self, place: Any) -> None:
        """Continue behind this place."""
        self._reached = self._field.to_python(place)

    def read(self, by: int) -> list[Any]:
        """Return the next chunk."""
        rows = self._rows if self._reached is None else self._rows.filter(**{self._behind: self._reached})
        found = list(rows[:by])
        self.is_exhausted = len(found) < by
        # Read before the block may change or delete a row. A join may repeat one: its copies follow each other.
        by_place = {getattr(row, self._field.attname): row for row in reversed(found)}
        self._places = [*reversed(by_place)]
        if found:
            self._reached = self._places[-1]
        return [by_place[place] for place in self._places]

    def place(self, index: int) -> str:
        """Return the place of a row of the latest chunk."""
        return str(self._field.value_to_string(SimpleNamespace(**{self._field.attname: self._places[index]})))


class _Items:
    """The items of an iterable, in the order of their keys."""

    reads_in_transaction = False  # an iterable may take long, or have a cursor of the database that a commit would end
    is_exhausted = False

    def __init__(self, items: Iterable[Any], key: Key[Any], walk: Rows[Any]) -> None:
        self._items, self._key, self._walk = items, key, walk
        self._reached: int | str | None = None
        self._places: list[int | str] = []
        self._pairs = self._iterate()

    def count(self) -> int | None:
        return len(self._items) if isinstance(self._items, Sized) else None

    def resume(self, place: Any) -> None:
        self._reached = place

    def read(self, by: int) -> list[Any]:
        pairs = list(islice(self._pairs, by))
        self.is_exhausted = len(pairs) < by
        self._places = [key for key, _ in pairs]
        return [item for _, item in pairs]

    def place(self, index: int) -> int | str:
        return self._places[index]

    def _iterate(self) -> Iterator[tuple[int | str, Any]]:
        last: Any = None
        for item in self._items:
            key: Any = self._key(item)
            known = self._reached if last is None else last
            is_in_order = known is None or (type(key) is type(known) and (last is None or key > last))
            if type(key) not in (int, str) or not is_in_order:
                raise InvalidStep(
                    f"{self._walk}: key: expected ascending whole numbers or texts, got {key!r:.80} after {known!r:.80}"
                )
            last = key
            if self._reached is None or key > self._reached:
                yield key, item


def _order_of(rows: QuerySet[Any], walk: Rows[Any]) -> tuple[Any, bool]:
    """Return the field of the order, and whether it descends. Raises InvalidStep."""
    query, meta = rows.query, rows.model._meta  # noqa: SLF001  (documented)
    forms = {
        "a slice": query.is_sliced,
        "a union": bool(query.combinator),
        "distinct()": query.distinct,
        "values()": not issubclass(rows._iterable_class, ModelIterable),  # noqa: SLF001
        "extra(order_by=…)": bool(query.extra_order_by),
    }
    for form, is_used in forms.items():
        if is_used:
            raise InvalidStep(f"{walk}: expected a queryset of whole rows, got {form}")
    names = query.order_by or ("pk",)
    name = str(names[0]).removeprefix("-")
    field: Any = (
        meta.pk
        if name == "pk"
        else next((one for one in meta.concrete_fields if name in (one.name, one.attname)), None)
    )
    is_unique = field is not None and (
        field.unique or any(one.fields == (field.name,) for one in meta.total_unique_constraints)
    )
    if len(names) > 1 or not is_unique or field.null or field.column is None:
        raise InvalidStep(
            f"{walk}: expected an order by one unique field without NULL, such as the primary key, got order_by"
            f"({', '.join(map(repr, names))})"
        )
    return field, str(names[0]).startswith("-")
