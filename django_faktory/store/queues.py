"""Queues as a whole: their names, pauses and latency. Rule: W24. A pause is a row; claims look at it each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..lifecycle import State
from ..models import Job, Queue
from .dialects import dialect_of
from .dialects.base import JOB
from .transactions import run

QUEUE = Queue._meta.db_table  # noqa: SLF001  (documented)
CHUNK = 100
"""Names that one transaction changes: on SQLite every other writer waits for it."""

COUNTED = 1000
"""Jobs of each queue that `waiting` counts, unless it is told otherwise."""


class Waiting(NamedTuple):
    """What waits in a queue."""

    size: int
    """Jobs; the most that were counted where there are as many or more."""
    latency_s: float
    """Seconds the oldest has waited; 0.0 where none waits."""


def known_names(*, using: str) -> list[str]:
    """Every queue there is, by name: those remembered, and those that jobs wait in. One look at an index for each."""
    remembered = run(using, lambda _: set(Queue.objects.using(using).values_list("name", flat=True)), atomic=False)
    return sorted(remembered | set(_names_in_use(using)))


def _names_in_use(using: str) -> list[str]:
    found: list[str] = []
    for state in (State.ENQUEUED, State.BLOCKED):
        waiting = Job.objects.using(using).in_state(state).order_by("queue").values_list("queue", flat=True)
        name = ""
        while (name := _first(waiting.filter(queue__gt=name)[:1], using) or "") != "":
            found.append(name)
    return found


def pause(queues: Sequence[str] | None, *, using: str) -> list[str]:
    """Give out no job of these queues, or of all that are known, from now on; a name never used becomes a queue.

    Returns those that were not paused yet.
    """
    paused = Queue.objects.using(using).filter(paused_at__isnull=False)
    before: set[str] = run(using, lambda _: set(paused.values_list("name", flat=True)), atomic=False)
    names = known_names(using=using) if queues is None else sorted(set(queues))
    names = [name for name in names if name not in before]  # a second PAUSE writes nothing

    def pause_these(names: Sequence[str]) -> None:
        rows = Queue.objects.using(using)
        rows.bulk_create([Queue(name=name) for name in names], ignore_conflicts=True)
        rows.filter(name__in=names, paused_at__isnull=True).update(paused_at=Now())

    _in_chunks(names, pause_these, using)
    return names


def paused(*, using: str) -> set[str]:
    """The names of those that give out no jobs."""
    rows = Queue.objects.using(using).filter(paused_at__isnull=False).values_list("name", flat=True)
    return run(using, lambda _: set(rows), atomic=False)


def resume(queues: Sequence[str] | None, *, using: str) -> list[str]:
    """Give out jobs of these queues, or of all that are paused, again; returns those that were paused."""
    paused = Queue.objects.using(using).filter(paused_at__isnull=False)
    names: list[str] = run(using, lambda _: list(paused.values_list("name", flat=True)), atomic=False)
    resumed = sorted(names if queues is None else {*names} & {*queues})
    _in_chunks(resumed, lambda chunk: paused.filter(name__in=chunk).update(paused_at=None), using)
    return resumed


def latency(queues: Sequence[str], *, using: str) -> dict[str, float]:
    """Seconds the oldest enqueued job of each has waited; 0.0 where none waits."""

    def verb(connection: BaseDatabaseWrapper) -> dict[str, float]:
        with connection.cursor() as cursor:
            now = dialect_of(connection).now(cursor)
        oldest = {
            queue: min(at or now for at in (_oldest(queue, state, using) for state in (State.ENQUEUED, State.BLOCKED)))
            for queue in queues
        }
        return {queue: max(0.0, (now - at).total_seconds()) for queue, at in oldest.items()}

    return run(using, verb)


def waiting(names: Sequence[str], *, using: str, most: int = COUNTED) -> dict[str, Waiting]:
    """How much waits in each of these queues, and for how long: a few statements, none reads a queue to its end.

    For at most 100 names: they are terms of one statement.
    """
    if not names:
        return {}

    def verb(connection: BaseDatabaseWrapper) -> dict[str, Waiting]:
        sizes = dict.fromkeys(names, 0)
        oldest: dict[str, datetime] = {}
        with connection.cursor() as cursor:
            now = dialect_of(connection).now(cursor)
            for state in (State.ENQUEUED, State.BLOCKED):
                cursor.execute(*_sizes(names, state, using, most))
                for place, count in cursor.fetchall():
                    sizes[names[place]] += count
                cursor.execute(_HEADS.format(state=state, names=", ".join(["%s"] * len(names))), list(names))
                for name, at in cursor.fetchall():
                    moment = _moment(connection, at)
                    oldest[name] = min(oldest.get(name, moment), moment)
        return {
            name: Waiting(min(size, most), max(0.0, (now - oldest.get(name, now)).total_seconds()))
            for name, size in sizes.items()
        }

    return run(using, verb)


# Of each queue and priority the oldest is the first in the index FETCH uses: from one priority to the next.
_HEADS = f"""
WITH RECURSIVE heads(queue, weight) AS (
  SELECT known.name, (SELECT MIN(job.weight) FROM {JOB} AS job WHERE job.state = '{{state}}' AND job.queue = known.name)
  FROM {QUEUE} AS known WHERE known.name IN ({{names}})
  UNION ALL
  SELECT heads.queue, (SELECT MIN(job.weight) FROM {JOB} AS job
    WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.weight > heads.weight)
  FROM heads WHERE heads.weight IS NOT NULL
)
SELECT heads.queue, (SELECT MIN(job.enqueued_at) FROM {JOB} AS job
  WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.weight = heads.weight)
FROM heads WHERE heads.weight IS NOT NULL"""


def _sizes(names: Sequence[str], state: State, using: str, most: int) -> tuple[str, list[Any]]:
    """One statement with a term for each queue; Django makes the text once, for they differ by the name only."""
    waiting = Job.objects.using(using).in_state(state).filter(queue=names[0])
    some = waiting.order_by("weight", "enqueued_at", "pk").values("pk")[:most]  # as the index has them: it ends there
    sql, params = some.query.get_compiler(using).as_sql()
    parts = [f"SELECT {place}, COUNT(*) FROM ({sql}) AS some_{place}" for place in range(len(names))]
    values = [name if value == names[0] else value for name in names for value in params]
    return " UNION ALL ".join(parts), values


def _moment(connection: BaseDatabaseWrapper, value: Any) -> datetime:
    """As the ORM reads this database's times."""
    column = Job._meta.get_field("enqueued_at").get_col(JOB)  # noqa: SLF001  (Django's documented name)
    for convert in connection.ops.get_db_converters(column):
        value = convert(value, column, connection)
    found: datetime = value
    return found


def _oldest(queue: str, state: State, using: str) -> datetime | None:
    """The oldest of each priority is the first in the index FETCH uses: a look at it for each, not at every job."""
    waiting = Job.objects.using(using).in_state(state).filter(queue=queue)
    first_of_all = waiting.order_by("weight", "enqueued_at", "id").only("weight", "enqueued_at")
    oldest: datetime | None = None
    job = first_of_all.first()
    while job is not None:
        if oldest is None or (job.enqueued_at is not None and job.enqueued_at < oldest):
            oldest = job.enqueued_at
        job = first_of_all.filter(weight__gt=job.weight).first()
    return oldest


def _first(rows: Iterable[str], using: str) -> str | None:
    return run(using, lambda _: next(iter(rows), None), atomic=False)


def _in_chunks(names: Sequence[str], change: Callable[[Sequence[str]], object], using: str) -> None:
    for start in range(0, len(names), CHUNK):
        chunk = names[start : start + CHUNK]
        run(using, lambda _, chunk=chunk: change(chunk))  # type: ignore[misc]  # a default is no parameter to mypy
