"""Querysets of jobs and queues with named filters and bulk operations: `Job.objects.dead().about(order).retry()`.

`JobQuerySet` and `QueueQuerySet` only build filters. Their operations are those of higher layers, which
`FaktoryConfig.ready` installs (`Operations`). docs/queries.md lists which filters an index serves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from django.core.exceptions import AppRegistryNotReady
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q, Subquery, Value
from django.db.models.functions import Coalesce, Now, Right, StrIndex

from ..core import queries
from ..core.json import jsontext
from ..core.lifecycle import State
from ..core.queries import Pattern, Query, parse_query
from .related_object import about_of

if TYPE_CHECKING:
    from . import Job, Queue  # noqa: F401  (named in the types below)

    _Lookup = models.Lookup[Any]
else:  # Django's own classes take no type parameters at run time
    _Lookup = models.Lookup

_SHARED = ((State.SCHEDULED, State.RETRIES), (State.DEAD, State.DISCARDED, State.EXPIRED))
"""Groups of states that share a partial index: faktory_due, faktory_failed."""

LAST = "\U0010ffff"
"""The highest code point: the upper bound of a range of names that have the same beginning."""
RECENT = 50_000
"""Number of newest jobs that a page looks through when no index serves its filter."""


class Operations(NamedTuple):
    """Functions of higher layers that querysets call; models import no higher layer."""

    encode_args: Callable[[Sequence[Any]], list[Any]]
    """Return positional arguments as they are stored."""
    carry_out: Callable[[str, JobQuerySet], int]
    pause: Callable[[QueueQuerySet], int]
    resume: Callable[[QueueQuerySet], int]


_installed: list[Operations] = []


def install(operations: Operations) -> None:
    """Set the functions that querysets call."""
    _installed[:] = [operations]


def _operations() -> Operations:
    if not _installed:
        raise AppRegistryNotReady("django_faktory: its AppConfig.ready() has not been called yet")
    return _installed[0]


class _Among(_Lookup):
    """Compare a column with these values, written as literals into the SQL in this order.

    SQLite uses a partial index only for a query that repeats the index's own condition literally, so parameters would
    prevent it. For the package's own constants only, never for user input.
    """

    lookup_name = "among"
    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        """Return `column = 'a'` or `column IN ('a', 'b')`."""
        column, params = self.process_lhs(compiler, connection)
        told = _literal(column, self.rhs)
        for shared in _SHARED:
            # A subset of a shared index's states does not imply the index condition for SQLite: repeat the condition
            # literally.
            if connection.vendor == "sqlite" and set(self.rhs) < set(shared):
                return f"({told} AND {_literal(column, shared)})", (*params, *params)
        return told, params


def _literal(column: str, states: Iterable[State]) -> str:
    values = [f"'{value}'" for value in states]
    return f"{column} = {values[0]}" if len(values) == 1 else f"{column} IN ({', '.join(values)})"


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs with filters by state, queue, task, error, age, object and text, and bulk operations."""

    def in_state(self, *states: State) -> Self:
        """Filter jobs in any of these states."""
        # In the order of `State`, as in the index conditions, because SQLite compares them literally.
        return self.filter(_Among(F("state"), tuple(state for state in State if state in states)))

    def scheduled(self) -> Self:
        """Filter jobs that wait for their start time."""
        return self.in_state(State.SCHEDULED)

    def enqueued(self) -> Self:
        """Filter jobs that any worker may take."""
        return self.in_state(State.ENQUEUED)

    def blocked(self) -> Self:
        """Filter jobs that wait for a lock or a limiter."""
        return self.in_state(State.BLOCKED)

    def working(self) -> Self:
        """Filter jobs that a worker runs."""
        return self.in_state(State.WORKING)

    def retries(self) -> Self:
        """Filter jobs that failed and wait for their next attempt."""
        return self.in_state(State.RETRIES)

    def dead(self) -> Self:
        """Filter jobs that failed finally or were killed."""
        return self.in_state(State.DEAD)

    def succeeded(self) -> Self:
        """Filter jobs that succeeded and have a stored result."""
        return self.in_state(State.SUCCEEDED)

    def discarded(self) -> Self:
        """Filter jobs that were dropped, until their rows are purged."""
        return self.in_state(State.DISCARDED)

    def expired(self) -> Self:
        """Filter jobs that no worker took in time, until their rows are purged."""
        return self.in_state(State.EXPIRED)

    def queue(self, *names: str) -> Self:
        """Filter jobs of any of these queues; `mail.*` matches every name with that prefix."""
        return self.filter(_named("queue", map(_pattern, names)))

    def task(self, *tasks: Any) -> Self:
        """Filter jobs of these tasks, each a task or a jobtype; `shop.*` matches every jobtype with that prefix."""
        return self.filter(_named("jobtype", [_pattern(getattr(task, "jobtype", task)) for task in tasks]))

    def failed_with(self, *errors: str | type[BaseException]) -> Self:
        """Filter jobs by the type of their latest failure.

        Each error is a class, its path, the last part of its path, or a prefix with a star.
        """
        return self.filter(_failed_with([_pattern(_path(error)) for error in errors]))

    def older_than(self, age: timedelta) -> Self:
        """Filter jobs that were pushed more than `age` ago."""
        return self.filter(created_at__lt=Now() - age)

    def newer_than(self, age: timedelta) -> Self:
        """Filter jobs that were pushed at most `age` ago."""
        return self.filter(created_at__gte=Now() - age)

    def about(self, *objects: models.Model | str) -> Self:
        """Filter jobs about any of these objects: see `using(about=…)`."""
        return self.filter(about__in=[about_of(one) for one in objects])

    def batch(self, *bids: str) -> Self:
        """Filter members of these batches."""
        return self.filter(bid__in=bids)

    def with_args(self, *args: Any, among: int = queries.SEARCHED) -> Self:
        """Filter jobs with exactly these positional arguments, as common clients write them.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(_has_args(jsontext.encode(_operations().encode_args(args))))

    def containing(self, *texts: str, among: int = queries.SEARCHED) -> Self:
        """Filter jobs by texts that their JSON, as it was sent, must all contain; case-sensitive.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(*map(_has_text, texts))

    def newest(self, count: int) -> Self:
        """Keep the `count` newest jobs of this set, unordered. Bounds filters that no index serves."""
        # A lower bound on the key, not a slice: a sliced queryset can be neither filtered nor updated.
        place = self.order_by("-pk").values("pk")[count - 1 : count]
        return self.filter(pk__gte=Coalesce(Subquery(place), Value(0)))

    def recent(self, count: int = RECENT) -> Self:
        """Keep jobs among the last `count` pushed in the whole table.

        At most that number of rows is read, whatever the other filters are.
        """
        # The latest key of the whole table, not of this set: finding that one could read every row.
        last = self.model._default_manager.using(self.db).order_by("-pk").values("pk")[:1]  # noqa: SLF001
        return self.filter(pk__gt=Coalesce(Subquery(last), Value(0)) - count)

    def matching(self, query: Query | str) -> Self:
        """Filter jobs that a query describes. Raises InvalidQuery for a text that is not a valid query."""
        asked = parse_query(query) if isinstance(query, str) else query
        found = self.in_state(*asked.states) if asked.states else self
        for condition in _conditions(asked):
            found = found.filter(condition)
        # Last, so that `newest` counts jobs that match all other conditions.
        if asked.searches:
            wanted = [] if asked.args is None else [_has_args(asked.args)]
            found = found.newest(asked.among).filter(*wanted, *map(_has_text, asked.texts))
        return found

    def shown(self, query: Query | str) -> Self:
        """Apply `matching` for a page: a query that no index serves searches the `recent` jobs only."""
        asked = parse_query(query) if isinstance(query, str) else query
        found = self.matching(asked)
        return found if asked.has_index else found.recent()

    def count_up_to(self, most: int) -> int:
        """Return the number of rows, capped at `most`, so that no large table is counted to its end."""
        # order_by() removes the order, which would force a sort of the whole set before the cut.
        return self.order_by()[:most].count()

    def retry(self) -> int:
        """Enqueue failed jobs, dead or waiting for a retry, now; return how many."""
        return self._carry_out("retry")

    def requeue(self) -> int:
        """Enqueue jobs that are dead or wait for their time now; return how many."""
        return self._carry_out("requeue")

    def kill(self) -> int:
        """Move jobs that are not running to the dead set; return how many."""
        return self._carry_out("kill")

    def discard(self) -> int:
        """Drop jobs that are not running; return how many."""
        return self._carry_out("discard")

    def prune(self) -> int:
        """Delete the rows of finished jobs before their purge time; return how many."""
        return self._carry_out("prune")

    # Not exposed on the manager, so that `Job.objects.kill()` cannot hit every job by accident.
    retry.queryset_only = requeue.queryset_only = kill.queryset_only = True  # type: ignore[attr-defined]
    discard.queryset_only = prune.queryset_only = True  # type: ignore[attr-defined]
    # Templates must not call these: Django renders a method with alters_data as an empty text.
    retry.alters_data = requeue.alters_data = kill.alters_data = True  # type: ignore[attr-defined]
    discard.alters_data = prune.alters_data = True  # type: ignore[attr-defined]

    def _carry_out(self, verb: str) -> int:
        return _operations().carry_out(verb, self)


class QueueQuerySet(models.QuerySet["Queue"]):
    """Known queues, with operations to pause and resume them."""

    def paused(self) -> Self:
        """Filter queues from which no job is fetched."""
        return self.filter(paused_at__isnull=False)

    def pause(self) -> int:
        """Stop delivering jobs of these queues; return how many were not paused before."""
        return _operations().pause(self)

    def resume(self) -> int:
        """Deliver jobs of these queues again; return how many were paused."""
        return _operations().resume(self)

    pause.queryset_only = resume.queryset_only = True  # type: ignore[attr-defined]
    pause.alters_data = resume.alters_data = True  # type: ignore[attr-defined]


def _conditions(asked: Query) -> Iterable[Q]:
    if asked.queues:
        yield _named("queue", asked.queues)
    if asked.tasks:
        yield _named("jobtype", asked.tasks)
    if asked.errors:
        yield _failed_with(asked.errors)
    if asked.about:
        yield Q(about__in=asked.about)
    if asked.batches:
        yield Q(bid__in=asked.batches)
    if asked.jids:
        yield Q(jid__in=asked.jids)
    if asked.older_s is not None:
        yield Q(created_at__lt=Now() - timedelta(seconds=asked.older_s))
    if asked.newer_s is not None:
        yield Q(created_at__gte=Now() - timedelta(seconds=asked.newer_s))


def _pattern(name: str) -> Pattern:
    return queries.pattern(name, "name")


def _path(error: str | type[BaseException]) -> str:
    return error if isinstance(error, str) else f"{error.__module__}.{error.__qualname__}"


def _named(column: str, patterns: Iterable[Pattern]) -> Q:
    """Match whole names or prefixes.

    A prefix is a range: the column's index serves it, and it compares exactly on every database.
    """
    patterns = list(patterns)
    whole = Q(**{f"{column}__in": [one.text for one in patterns if not one.is_prefix]})
    begun = (
        Q(**{f"{column}__gte": one.text, f"{column}__lt": one.text + LAST}) if one.text else Q(pk__isnull=False)
        for one in patterns
        if one.is_prefix
    )
    return reduce(or_, begun, whole)


def _failed_with(patterns: Iterable[Pattern]) -> Q:
    """Match error types by whole name, prefix or last part.

    Uses `RIGHT`, because LIKE is not exact on every database.
    """
    patterns = list(patterns)
    # The dot is part of the compared text: `Timeout` matches `x.Timeout`, not `x.ReadTimeout`.
    ends = (
        Q(_Equals(Right("errtype", len(one.text) + 1), Value(f".{one.text}"))) for one in patterns if not one.is_prefix
    )
    return reduce(or_, ends, _named("errtype", patterns))


_Equals: Callable[[Any, Any], Any] = models.lookups.Exact


def _has_text(text: str) -> Q:
    """Match a text exactly.

    LIKE is fast but ignores case on SQLite; the position of the text is compared there exactly.
    """
    return Q(payload__contains=text) & Q(models.lookups.GreaterThan(StrIndex("payload", Value(text)), 0))


def _has_args(args: str) -> Q:
    """Match the `args` member in the spellings of common JSON libraries: with or without spaces, escaped or not."""
    # Clients differ in spaces and escapes; the stored text is compared as it was sent.
    value = json.loads(args)
    spelled = {
        f'"args"{colon}{json.dumps(value, separators=marks, ensure_ascii=is_ascii)}'
        for marks, colon in (((",", ":"), ":"), ((", ", ": "), ": "))
        for is_ascii in (True, False)
    } | {f'"args":{args}'}
    return reduce(or_, map(_has_text, sorted(spelled)))
