"""Sets of jobs and queues by the words of the domain: `Job.objects.dead().about(order).retry()`.

The filters only say what is meant; the verbs hand the set to `acts`. Which filters an index serves: docs/queries.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Self

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q, Subquery, Value
from django.db.models.functions import Coalesce, Now, Right, StrIndex

from . import jsontext, queries
from .arguments import encoded_call
from .lifecycle import State
from .queries import Pattern, Query, parse_query
from .subjects import about_of

if TYPE_CHECKING:
    from .models import Job, Queue  # noqa: F401  (named in the types below)

    _Lookup = models.Lookup[Any]
else:  # Django's own classes take no type parameters at run time
    _Lookup = models.Lookup

_SHARED = ((State.SCHEDULED, State.RETRIES), (State.DEAD, State.DISCARDED, State.EXPIRED))
"""States that share a partial index: faktory_due, faktory_failed."""

LAST = "\U0010ffff"
RECENT = 50_000


class _Among(_Lookup):
    """Whether a column has one of these values, as literals in the SQL, in this order: SQLite takes a partial index for
    its very own condition only. For values that are ours, not a user's."""

    lookup_name = "among"
    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        """`column = 'a'`, or `column IN ('a', 'b')`."""
        column, params = self.process_lhs(compiler, connection)
        told = _literal(column, self.rhs)
        for shared in _SHARED:
            if connection.vendor == "sqlite" and set(self.rhs) < set(shared):
                return f"({told} AND {_literal(column, shared)})", (*params, *params)
        return told, params


def _literal(column: str, states: Iterable[State]) -> str:
    values = [f"'{value}'" for value in states]
    return f"{column} = {values[0]}" if len(values) == 1 else f"{column} IN ({', '.join(values)})"


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs by the words of the domain, and what people do to them."""

    def in_state(self, *states: State) -> Self:
        """Jobs in any of these states."""
        return self.filter(_Among(F("state"), tuple(state for state in State if state in states)))

    def scheduled(self) -> Self:
        """Jobs that wait for their time."""
        return self.in_state(State.SCHEDULED)

    def enqueued(self) -> Self:
        """Jobs that any worker may take."""
        return self.in_state(State.ENQUEUED)

    def blocked(self) -> Self:
        """Jobs whose lock another one holds."""
        return self.in_state(State.BLOCKED)

    def working(self) -> Self:
        """Jobs that a worker has."""
        return self.in_state(State.WORKING)

    def retries(self) -> Self:
        """Jobs that failed, and wait for their next try."""
        return self.in_state(State.RETRIES)

    def dead(self) -> Self:
        """Jobs that failed for good, or were killed."""
        return self.in_state(State.DEAD)

    def succeeded(self) -> Self:
        """Jobs that succeeded, and whose result is kept."""
        return self.in_state(State.SUCCEEDED)

    def discarded(self) -> Self:
        """Jobs that were dropped, and whose rows are kept for a while."""
        return self.in_state(State.DISCARDED)

    def expired(self) -> Self:
        """Jobs that nobody took in time, and whose rows are kept for a while."""
        return self.in_state(State.EXPIRED)

    def queue(self, *names: str) -> Self:
        """Jobs of any of these queues; `mail.*` means all whose name begins so."""
        return self.filter(_named("queue", map(_pattern, names)))

    def task(self, *tasks: Any) -> Self:
        """Jobs of any of these tasks, given as the task itself or by jobtype; `shop.*` means all that begin so."""
        return self.filter(_named("jobtype", [_pattern(getattr(task, "jobtype", task)) for task in tasks]))

    def failed_with(self, *errors: str | type[BaseException]) -> Self:
        """Jobs whose latest failure was of this type: a class, its path, its last part, or a beginning with a star."""
        return self.filter(_failed_with([_pattern(_path(error)) for error in errors]))

    def older_than(self, age: timedelta) -> Self:
        """Jobs pushed longer ago than that."""
        return self.filter(created_at__lt=Now() - age)

    def newer_than(self, age: timedelta) -> Self:
        """Jobs pushed since then."""
        return self.filter(created_at__gte=Now() - age)

    def about(self, *objects: models.Model | str) -> Self:
        """Jobs about any of these: see `using(about=…)`."""
        return self.filter(about__in=[about_of(one) for one in objects])

    def batch(self, *bids: str) -> Self:
        """Members of these batches."""
        return self.filter(bid__in=bids)

    def with_args(self, *args: Any, among: int = queries.SEARCHED) -> Self:
        """Jobs with exactly these positional arguments, as common clients write them; looks into the newest `among`."""
        return self.newest(among).filter(_has_args(jsontext.encode(encoded_call(args, {})[0])))

    def containing(self, *texts: str, among: int = queries.SEARCHED) -> Self:
        """Jobs whose JSON, as it was sent, has each of these texts; case counts. Looks into the newest `among`."""
        return self.newest(among).filter(*map(_has_text, texts))

    def newest(self, count: int) -> Self:
        """The `count` of these that came last, in no order: what no index helps to find is looked for among them."""
        place = self.order_by("-pk").values("pk")[count - 1 : count]
        return self.filter(pk__gte=Coalesce(Subquery(place), Value(0)))

    def recent(self, count: int = RECENT) -> Self:
        """Those of these among the last `count` jobs that were pushed at all: no more rows are looked at, whatever else
        is asked."""
        last = self.model._default_manager.using(self.db).order_by("-pk").values("pk")[:1]  # noqa: SLF001
        return self.filter(pk__gt=Coalesce(Subquery(last), Value(0)) - count)

    def matching(self, query: Query | str) -> Self:
        """Jobs that a query means. Raises InvalidQuery for a text that is none."""
        asked = parse_query(query) if isinstance(query, str) else query
        found = self.in_state(*asked.states) if asked.states else self
        for condition in _conditions(asked):
            found = found.filter(condition)
        if asked.searches:
            wanted = [] if asked.args is None else [_has_args(asked.args)]
            found = found.newest(asked.among).filter(*wanted, *map(_has_text, asked.texts))
        return found

    def shown(self, query: Query | str) -> Self:
        """`matching` for a page: what no index leads to is looked for among the `recent` ones only."""
        asked = parse_query(query) if isinstance(query, str) else query
        found = self.matching(asked)
        return found if asked.has_index else found.recent()

    def count_up_to(self, most: int) -> int:
        """How many there are, and `most` where there are more: no table is counted to its end."""
        return self.order_by()[:most].count()

    def retry(self) -> int:
        """Run those that failed, dead or waiting for a retry, again now; returns how many."""
        return self._carry_out("retry")

    def requeue(self) -> int:
        """Run those that are dead, or wait for their time, now; returns how many."""
        return self._carry_out("requeue")

    def kill(self) -> int:
        """Give up those that do not run: they are dead; returns how many."""
        return self._carry_out("kill")

    def discard(self) -> int:
        """Drop those that do not run; returns how many."""
        return self._carry_out("discard")

    def prune(self) -> int:
        """Delete those that ended, before their time; returns how many."""
        return self._carry_out("prune")

    # None of them on the manager: `Job.objects.kill()` is said by mistake.
    retry.queryset_only = requeue.queryset_only = kill.queryset_only = True  # type: ignore[attr-defined]
    discard.queryset_only = prune.queryset_only = True  # type: ignore[attr-defined]
    retry.alters_data = requeue.alters_data = kill.alters_data = True  # type: ignore[attr-defined]
    discard.alters_data = prune.alters_data = True  # type: ignore[attr-defined]

    def _carry_out(self, verb: str) -> int:
        from .acts import Verb, carry_out  # what it needs imports the models

        return carry_out(Verb(verb), self)


class QueueQuerySet(models.QuerySet["Queue"]):
    """Queues that somebody used."""

    def paused(self) -> Self:
        """Those that give out no job."""
        return self.filter(paused_at__isnull=False)

    def pause(self) -> int:
        """Give out no job of these from now on; returns how many were not paused yet."""
        from .acts import pause  # as above

        return pause(self)

    def resume(self) -> int:
        """Give out jobs of these again; returns how many were paused."""
        from .acts import resume  # as above

        return resume(self)

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
    """By whole name or beginning: a range, which the column's index serves and which compares exactly everywhere."""
    patterns = list(patterns)
    whole = Q(**{f"{column}__in": [one.text for one in patterns if not one.is_prefix]})
    begun = (
        Q(**{f"{column}__gte": one.text, f"{column}__lt": one.text + LAST}) if one.text else Q(pk__isnull=False)
        for one in patterns
        if one.is_prefix
    )
    return reduce(or_, begun, whole)


def _failed_with(patterns: Iterable[Pattern]) -> Q:
    """Also by the last part of its path. `RIGHT`, for LIKE is not exact on every database."""
    patterns = list(patterns)
    ends = (
        Q(_Equals(Right("errtype", len(one.text) + 1), Value(f".{one.text}"))) for one in patterns if not one.is_prefix
    )
    return reduce(or_, ends, _named("errtype", patterns))


_Equals: Callable[[Any, Any], Any] = models.lookups.Exact


def _has_text(text: str) -> Q:
    """LIKE is quick and, on SQLite, blind to case; a place in the text is exact there."""
    return Q(payload__contains=text) & Q(models.lookups.GreaterThan(StrIndex("payload", Value(text)), 0))


def _has_args(args: str) -> Q:
    """In the spellings of JSON libraries: with or without spaces, and escapes."""
    value = json.loads(args)
    spelled = {
        f'"args"{colon}{json.dumps(value, separators=marks, ensure_ascii=is_ascii)}'
        for marks, colon in (((",", ":"), ":"), ((", ", ": "), ": "))
        for is_ascii in (True, False)
    } | {f'"args":{args}'}
    return reduce(or_, map(_has_text, sorted(spelled)))
