"""Models of jobs and their progress, and the query set of jobs: `Job.objects.dead().about(order).retry()`.

`JobQuerySet` only builds filters; its operations are those of `hooks`. docs/queries.md lists which filters an index
serves. Only `store` changes rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from django.db import models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Max, Q, Subquery, Value
from django.db.models.functions import Coalesce, Greatest, Now, Right
from django.utils import timezone

from ..core import queries
from ..core.json import jsontext
from ..core.lifecycle import ENDED, State
from ..core.queries import Age, Pattern, Query, parse_query
from .constraints import JOB_CONSTRAINT
from .database import JobsManager, JobsModel
from .fields import ExactCharField
from .history import History
from .hooks import operations
from .indexes import HotIndex, IndexWhereSet, PartialIndex, PostgresqlIndex, UniqueWhereSet
from .job_columns import JobColumns
from .job_texts import has_args, has_message, has_text, has_word, text_conditions
from .permissions import JOB_PERMISSIONS
from .related_object import about_of
from .tables import HISTORY, HISTORY_TABLE, LIVE_TABLE, JobQuery, tables_of

if TYPE_CHECKING:
    _Lookup = models.Lookup[Any]
else:  # Django's own classes take no type parameters at run time
    _Lookup = models.Lookup

_SHARED = ((State.SCHEDULED, State.RETRIES), (State.RETRIES, State.DEAD), (State.DISCARDED, State.EXPIRED))
"""Groups of states that share a partial index: faktory_due, faktory_failed, faktory_dropped."""

LAST = "\U0010ffff"
"""The highest code point: the upper bound of a range of names that have the same beginning."""
RECENT = 50_000
"""Number of newest jobs that a page looks through when no index serves its filter."""


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
        # A subset of a shared index's states does not imply the index condition for SQLite: repeat the condition
        # literally.
        shared = [states for states in _SHARED if connection.vendor == "sqlite" and set(self.rhs) < set(states)]
        literals = [_literal(column, states) for states in (self.rhs, *shared)]
        return f"({' AND '.join(literals)})", (*params,) * len(literals)


def _literal(column: str, states: Iterable[State]) -> str:
    values = [f"'{value}'" for value in states]
    return f"{column} = {values[0]}" if len(values) == 1 else f"{column} IN ({', '.join(values)})"


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs, with filters by state, queue, task, error, age, object and text, and operations on all that match.

    An operation changes the jobs that are in a state it accepts, in short transactions, and returns their number.
    """

    # Live jobs and those that have ended for good; a filter that names states reads only their table (`tables`).

    query: JobQuery

    def __init__(self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None) -> None:
        super().__init__(model, query or JobQuery(model), using, hints)

    def readable(self) -> Self:
        """Leave out jobs whose retention is over: their rows may stay until their whole day leaves (ADR 0049)."""
        return self.filter(Q(purge_at=None) | Q(purge_at__gte=Now()))

    def latest_of(self, jid: str) -> Job | None:
        """Return the job with this jid, or the one of its last run that has ended; None if there is none."""
        return self.filter(jid=jid).order_by("-pk").first()  # a live job is always the latest

    def select_for_update(self, *args: Any, **options: Any) -> Self:
        """Lock live jobs: a job that has ended for good never changes."""
        return super().select_for_update(*args, **options).stored_for(State.DEAD)

    def update(self, **values: Any) -> int:
        """Update the rows, which stay in their tables."""
        changed = super().update(**values) if LIVE_TABLE in self.query.tables else 0
        return changed + sum(rows.update(**values) for rows in self._history())

    def delete(self) -> tuple[int, dict[str, int]]:
        """Delete the rows from their tables."""
        counts = Counter(dict(super().delete()[1]) if LIVE_TABLE in self.query.tables else {})
        for rows in self._history():
            counts.update(rows.delete()[1])
        return counts.total(), dict(counts)

    def bulk_create(self, objs: Iterable[Job], *args: Any, **options: Any) -> list[Job]:
        """Insert jobs, each in the table of its state."""
        jobs = list(objs)
        states = {id(job): job.state for job in jobs if job.state in ENDED}
        with transaction.atomic(using=self.db):
            for job in jobs:
                # The id comes from the table of live jobs, so that it is unique in both.
                job.state = State.DEAD if id(job) in states else job.state
            created = super().bulk_create(jobs, *args, **options)
            ended = [job for job in jobs if id(job) in states]
            for job in ended:
                job.state = states[id(job)]
            History.copy(ended, using=self.db)
            for chunk in _chunks([job.pk for job in ended]):
                models.QuerySet.delete(type(self)(self.model, using=self.db).filter(pk__in=chunk))
        return created

    # Django's, but for the tables: no signals are sent for jobs, and none refers to them.
    update.alters_data = delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]

    def _history(self) -> Iterator[models.QuerySet[History]]:
        """Yield the rows of this set that are in `History`."""
        if HISTORY_TABLE in self.query.tables:
            ended: Any = self.all()
            ended.query.tables = HISTORY
            for chunk in _chunks(list(ended.order_by().values_list("pk", flat=True))):
                yield History.objects.using(self.db).filter(pk__in=chunk)

    def in_state(self, *states: State) -> Self:
        """Filter jobs in any of these states."""
        # In the order of `State`, as in the index conditions, because SQLite compares them literally.
        jobs = self.stored_for(*states)
        return jobs.filter(_Among(F("state"), tuple(state for state in State if state in states)))

    def stored_for(self, *states: State) -> Self:
        """Read no table that cannot have jobs in these states. Keeps jobs in other states of the same table."""
        jobs: Any = self.all()
        # Contradicting states find nothing in any table.
        jobs.query.tables = (self.query.tables & tables_of(states)) or self.query.tables
        return cast("Self", jobs)

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

    def older_than(self, age: timedelta | datetime) -> Self:
        """Filter jobs that were pushed more than `age` ago, or before a time."""
        return self.filter(created_at__lt=_moment(age))

    def newer_than(self, age: timedelta | datetime) -> Self:
        """Filter jobs that were pushed at most `age` ago, or since a time."""
        return self.filter(created_at__gte=_moment(age))

    def failed_before(self, age: timedelta | datetime) -> Self:
        """Filter jobs with a latest failure more than `age` ago, or before a time."""
        return self.filter(failed_at__lt=_moment(age))

    def failed_after(self, age: timedelta | datetime) -> Self:
        """Filter jobs with a latest failure at most `age` ago, or since a time."""
        return self.filter(failed_at__gte=_moment(age))

    def about(self, *objects: models.Model | str) -> Self:
        """Filter jobs about any of these objects: see `using(about=…)`."""
        return self.filter(about__in=[about_of(subject) for subject in objects])

    def batch(self, *bids: str) -> Self:
        """Filter members of these batches."""
        return self.filter(bid__in=bids)

    def with_args(self, *args: Any, among: int = queries.SEARCHED) -> Self:
        """Filter jobs with exactly these positional arguments, as common clients write them.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(has_args(jsontext.encode(operations().encode_args(args))))

    def containing(self, *texts: str, among: int = queries.SEARCHED) -> Self:
        """Filter jobs by texts that their JSON, as it was sent, must all contain; case-sensitive.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(*map(has_text, texts))

    def with_message(self, *texts: str, among: int = queries.SEARCHED) -> Self:
        """Filter jobs by texts that the message or traceback of their latest failure must all contain; case-sensitive.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(*map(has_message, texts))

    def with_words(self, *words: str, among: int = queries.SEARCHED) -> Self:
        """Filter jobs by texts, each in their JSON without the jid, or in the message or traceback of a failure.

        Searches the newest `among` jobs of the set only.
        """
        return self.newest(among).filter(*map(has_word, words))

    def newest(self, count: int) -> Self:
        """Keep the `count` newest jobs of this set, unordered. Bounds filters that no index serves."""
        # A lower bound on the key, not a slice: a sliced queryset can be neither filtered nor updated.
        oldest_kept = self.order_by("-pk").values("pk")[count - 1 : count]
        return self.filter(pk__gte=Coalesce(Subquery(oldest_kept), Value(0)))

    def recent(self, count: int = RECENT) -> Self:
        """Keep jobs among the last `count` pushed in the whole table.

        At most that number of rows is read, whatever the other filters are.
        """
        # The latest key of each whole table, not of this set: finding that one could read every row. MariaDB reads a
        # range only from a key that it knows before it plans the query: the maximum of one table.
        rows: Any = self.model._default_manager.using(self.db).annotate(all=Value(1)).values("all")  # noqa: SLF001
        keys = rows.annotate(key=Max("pk")).values("key")
        latest = [Coalesce(Subquery(keys.stored_for(state)), Value(0)) for state in (State.DEAD, State.SUCCEEDED)]
        return self.filter(pk__gt=Greatest(*latest) - count)

    def matching(self, query: Query | str) -> Self:
        """Filter jobs that a query describes. Raises InvalidQuery for a text that is not a valid query."""
        parsed = parse_query(query) if isinstance(query, str) else query
        jobs = self.without_texts(parsed)
        # Last, so that `newest` counts jobs that match all other conditions.
        return jobs.newest(parsed.among).filter(*text_conditions(parsed)) if parsed.searches else jobs

    def shown(self, query: Query | str) -> Self:
        """Apply `matching` for a page: a query that no index serves searches the `recent` jobs only."""
        parsed = parse_query(query) if isinstance(query, str) else query
        if parsed.has_index:
            return self.matching(parsed)
        # The texts of all recent jobs: another bound within this one would be searched for row by row.
        return self.recent(max(RECENT, parsed.among)).without_texts(parsed).filter(*text_conditions(parsed))

    def without_texts(self, query: Query) -> Self:
        """Filter by all conditions of a query except those that search texts."""
        jobs = self.in_state(*query.in_states) if query.in_states else self
        return jobs.filter(*_conditions(query))

    def count_up_to(self, max_count: int) -> int:
        """Return the number of rows, capped at `max_count`, so that no large table is counted to its end."""
        # order_by() removes the order, which would force a sort of the whole set before the cut.
        return self.order_by()[:max_count].count()

    def retry(self) -> int:
        """Enqueue failed jobs, dead or waiting for a retry, now; return how many."""
        return self._run_operation("retry")

    def requeue(self) -> int:
        """Enqueue jobs that are dead or wait for their time now; return how many."""
        return self._run_operation("requeue")

    def restart(self) -> int:
        """Enqueue jobs that are dead or wait for their time now, without their committed steps; return how many."""
        return self._run_operation("restart")

    def cancel(self) -> int:
        """Drop jobs that wait, and ask the workers of running jobs to stop them; return the number of both."""
        return self._run_operation("cancel")

    def kill(self) -> int:
        """Move jobs that are not running to the dead set; return how many."""
        return self._run_operation("kill")

    def discard(self) -> int:
        """Drop jobs that are not running; return how many."""
        return self._run_operation("discard")

    def prune(self) -> int:
        """Delete the rows of finished jobs before their purge time; return how many."""
        return self._run_operation("prune")

    # Not exposed on the manager, so that `Job.objects.kill()` cannot hit every job by accident.
    retry.queryset_only = requeue.queryset_only = restart.queryset_only = True  # type: ignore[attr-defined]
    cancel.queryset_only = kill.queryset_only = True  # type: ignore[attr-defined]
    discard.queryset_only = prune.queryset_only = True  # type: ignore[attr-defined]
    # Templates must not call these: Django renders a method with alters_data as an empty text.
    retry.alters_data = requeue.alters_data = restart.alters_data = True  # type: ignore[attr-defined]
    cancel.alters_data = kill.alters_data = True  # type: ignore[attr-defined]
    discard.alters_data = prune.alters_data = True  # type: ignore[attr-defined]

    def _run_operation(self, verb: str) -> int:
        return operations().execute(verb, self)


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the ids in portions that every database accepts in one statement."""
    return (ids[start : start + 500] for start in range(0, len(ids), 500))


def _conditions(query: Query) -> Iterable[Q]:
    if query.queues:
        yield _named("queue", query.queues)
    if query.tasks:
        yield _named("jobtype", query.tasks)
    if query.errors:
        yield _failed_with(query.errors)
    if query.about:
        yield Q(about__in=query.about)
    if query.batches:
        yield Q(bid__in=query.batches)
    if query.jids:
        yield Q(jid__in=query.jids)
    for condition, age in (
        ("created_at__lt", query.older),
        ("created_at__gte", query.newer),
        ("failed_at__lt", query.failed_before),
        ("failed_at__gte", query.failed_after),
    ):
        if age is not None:
            yield Q(**{condition: _moment(age)})


def _moment(age: Age | timedelta) -> Any:
    """Return the time that was this long ago, by the clock of the database, or the time itself."""
    if isinstance(age, int):
        age = timedelta(seconds=age)
    if isinstance(age, timedelta):
        return Now() - age
    return timezone.make_aware(age) if timezone.is_naive(age) else age


def _pattern(name: str) -> Pattern:
    return queries.pattern(name, "name")


def _path(error: str | type[BaseException]) -> str:
    return error if isinstance(error, str) else f"{error.__module__}.{error.__qualname__}"


def _named(column: str, patterns: Iterable[Pattern]) -> Q:
    """Match whole names or prefixes.

    A prefix is a range: the column's index serves it, and it compares exactly on every database.
    """
    patterns = list(patterns)
    whole_names = Q(**{f"{column}__in": [pattern.text for pattern in patterns if not pattern.is_prefix]})
    prefixes = (
        Q(**{f"{column}__gte": pattern.text, f"{column}__lt": pattern.text + LAST})
        if pattern.text
        else Q(pk__isnull=False)
        for pattern in patterns
        if pattern.is_prefix
    )
    return reduce(or_, prefixes, whole_names)


def _failed_with(patterns: Iterable[Pattern]) -> Q:
    """Match error types by whole name, prefix or last part.

    Uses `RIGHT`, because LIKE is not exact on every database.
    """
    patterns = list(patterns)
    # The dot is part of the compared text: `Timeout` matches `x.Timeout`, not `x.ReadTimeout`.
    last_parts = (
        Q(_Equals(Right("errtype", len(pattern.text) + 1), Value(f".{pattern.text}")))
        for pattern in patterns
        if not pattern.is_prefix
    )
    return reduce(or_, last_parts, _named("errtype", patterns))


_Equals: Callable[[Any, Any], Any] = models.lookups.Exact


_HAS_FAILED = Q(state__in=["retries", "dead"])


_Jobs = JobsManager.from_queryset(JobQuerySet)


class LiveJobs(_Jobs):  # type: ignore[type-arg]
    """Manager of the jobs that have not ended for good, dead ones included."""

    def get_queryset(self) -> JobQuerySet:
        jobs: Any = super().get_queryset()
        return cast("JobQuerySet", jobs.stored_for(State.DEAD))


class Job(JobColumns):
    """A job, from its push until its row is deleted."""

    # Only `store` changes it, by guarded updates, and moves it to `History` when it has ended for good.

    # `store` changes jobs by raw SQL and updates, so save() is not called and post_save not sent (ADR 0043).
    objects = JobsManager.from_queryset(JobQuerySet)()  # type: ignore[misc]
    live = LiveJobs()

    class Meta:
        permissions = JOB_PERMISSIONS
        indexes: ClassVar = [
            HotIndex(
                fields=["queue", "sort_priority", "enqueued_at", "id"],
                name="faktory_ready",
                condition=Q(state="enqueued"),
            ),
            # Finds what returned to its place behind the bound of a claim, and is nearly always empty (ADR 0046).
            PostgresqlIndex(
                fields=["queue", "state", "sort_priority", "enqueued_at", "id"],
                name="faktory_returned",
                condition=Q(is_returned=True),
            ),
            # Without partial indexes (MariaDB) the index of ready jobs starts with the state, so it serves these too.
            models.Index(
                fields=["queue", "sort_priority", "enqueued_at", "id"],
                name="faktory_blocked",
                condition=Q(state="blocked"),
            ),
            # Includes the state, so that both sets are counted from the index alone.
            HotIndex(
                fields=["run_at", "id"],
                include=["state"],
                name="faktory_due",
                condition=Q(state__in=["scheduled", "retries"]),
            ),
            HotIndex(fields=["reserved_until"], name="faktory_reserved", condition=Q(state="working")),
            HotIndex(
                fields=["purge_at"],
                name="faktory_purge",
                # Set for dead jobs only. By their state, PostgreSQL would take this index for lists of dead jobs, and
                # sort all of them.
                condition=Q(purge_at__isnull=False),
            ),
            # Dead rows keep their expiry, and each maintenance query would read past them. MariaDB indexes them, so
            # maintenance clears theirs (`maintenance.due.expire`). Not a HotIndex: with the state first, MariaDB would
            # have to update it for each job that never expires.
            models.Index(
                fields=["expires_at"],
                name="faktory_expiring",
                condition=Q(expires_at__isnull=False, state__in=["scheduled", "enqueued", "blocked", "retries"]),
            ),
            # Finds the next job of a key in the order of claims (ADR 0015).
            IndexWhereSet(
                fields=["lock_key", "state", "queue", "sort_priority", "enqueued_at", "id"], name="faktory_by_lock_key"
            ),
            # Finds the next jobs of a limiter, for each queue in the order of claims (ADR 0016).
            IndexWhereSet(fields=["limiter", "queue", "sort_priority", "enqueued_at", "id"], name="faktory_at_limiter"),
            models.Index(fields=["bid", "state"], name="faktory_members", condition=Q(bid__isnull=False)),
            models.Index(fields=["callback_of"], name="faktory_callbacks", condition=Q(callback_of__isnull=False)),
            models.Index(fields=["about", "id"], name="faktory_about", condition=Q(about__isnull=False)),
            # For searches of failed jobs; a job that succeeds directly never touches these indexes. A failure with a
            # retry writes 250 of its 2,290 bytes of PostgreSQL's log for them.
            PartialIndex(fields=["state", "errtype", "id"], name="faktory_failed", condition=_HAS_FAILED),
            PartialIndex(fields=["state", "id"], name="faktory_failed_latest", condition=_HAS_FAILED),
            PartialIndex(fields=["state", "failed_at", "id"], name="faktory_failed_at", condition=_HAS_FAILED),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(name="faktory_job_jid", fields=["jid"]),
            # NULL for jobs that are not unique, so most jobs have no entry in this index.
            UniqueWhereSet(name="faktory_job_unique", fields=["unique_key"]),
            models.CheckConstraint(name="faktory_job_sound", condition=JOB_CONSTRAINT),
        ]

    def save(self, *args: Any, using: str | None = None, **options: Any) -> None:
        """Save the row; a new one in the table of its state."""
        alias = using or self._state.db or self.get_alias()
        if self._state.adding and self.state in ENDED:
            type(self).objects.using(alias).bulk_create([self])
        else:
            super().save(*args, using=alias, **options)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:  # noqa: ARG002
        """Delete the row, in whichever table it is."""
        return type(self).objects.using(using or self._state.db).filter(pk=self.pk).delete()


class Tracking(JobsModel):
    """Progress of a job, set by TRACK SET and kept for a while after its end (W27). The state is the job's column."""

    jid = ExactCharField(max_length=255, primary_key=True)
    percent = models.SmallIntegerField(null=True)
    desc = models.TextField(null=True)
    updated_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="faktory_tracking_percent", condition=Q(percent__range=(0, 100))),
        ]

    def __str__(self) -> str:
        return str(self.jid)
