"""Queues as a whole: their names, pauses and latency. Rule: W24. A pause is a row; claims look at it each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from .. import jsontext
from ..lifecycle import State
from ..models import Job, Queue
from .dialects import dialect_of
from .dialects.base import JOB
from .shared import shared
from .transactions import run

CHUNK = 500
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

    def pause_these(names: Sequence[str]) -> None:
        rows = Queue.objects.using(using)
        rows.bulk_create([Queue(name=name) for name in names], ignore_conflicts=True)
        rows.filter(name__in=names, paused_at__isnull=True).update(paused_at=Now())

    _in_chunks(names, pause_these, using)
    return [name for name in names if name not in before]


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
    """Seconds the oldest job of each has waited; 0.0 for a queue without enqueued or blocked jobs.

    One statement for any number of names, which reads the first job of each priority from the index.
    """

    def verb(connection: BaseDatabaseWrapper) -> dict[str, float]:
        heads, ages = _heads(connection)
        with connection.cursor() as cursor:
            cursor.execute(f"{heads} {ages}", [jsontext.encode(list(queues))])
            found = dict.fromkeys(queues, 0.0)
            found.update((name, max(0.0, age)) for name, _, age in cursor.fetchall())
        return found

    return run(using, verb, atomic=False) if queues else {}


def shared_latency(queues: Sequence[str], *, using: str) -> dict[str, float]:
    """`latency`, shared by the callers of this process that name the same queues: see `shared`."""
    now = partial(latency, queues, using=using)
    return now() if connections[using].in_atomic_block else shared((latency, using, *queues), now, exact=True)


def waiting(names: Sequence[str], *, using: str, most: int = COUNTED) -> dict[str, Waiting]:
    """How much waits in each of these queues, and for how long: a statement for each state, none reads a queue to its
    end.

    For at most 100 names: they are terms of one statement.
    """
    if not names:
        return {}

    def verb(connection: BaseDatabaseWrapper) -> dict[str, Waiting]:
        found = dict.fromkeys(names, Waiting(0, 0.0))
        with connection.cursor() as cursor:
            for state in _WAITING:
                heads, ages = _heads(connection, [state])
                sizes, values = _sizes(names, state, using, most)
                cursor.execute(f"{heads} {ages} UNION ALL {sizes}", [jsontext.encode(list(names)), *values])
                for name, size, age in cursor.fetchall():
                    had = found[name]
                    found[name] = Waiting(min(had.size + size, most), max(had.latency_s, age))
        return found

    return run(using, verb, atomic=False)


# Of each queue and priority the oldest is the first in the index FETCH uses: from one priority to the next.
_HEADS = f"""
{{state}}(queue, weight) AS (
  SELECT known.name, (SELECT MIN(job.weight) FROM {JOB} AS job WHERE job.state = '{{state}}' AND job.queue = known.name)
  FROM known
  UNION ALL
  SELECT heads.queue, (SELECT MIN(job.weight) FROM {JOB} AS job
    WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.weight > heads.weight)
  FROM {{state}} AS heads WHERE heads.weight IS NOT NULL
)"""
_OLDEST = f"""
SELECT heads.queue, (SELECT MIN(job.enqueued_at) FROM {JOB} AS job
  WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.weight = heads.weight) AS moment
FROM {{state}} AS heads WHERE heads.weight IS NOT NULL"""
_WAITING = (State.ENQUEUED, State.BLOCKED)


def _heads(connection: BaseDatabaseWrapper, states: Sequence[State] = _WAITING) -> tuple[str, str]:
    """A WITH clause, whose parameter is a JSON array of names, and a SELECT of name, 0 and age of the oldest job."""
    dialect = dialect_of(connection)
    heads = ", ".join(_HEADS.format(state=state) for state in states)
    oldest = " UNION ALL ".join(_OLDEST.format(state=state) for state in states)
    return (
        f"WITH RECURSIVE known(name) AS ({dialect.names_of_json}), {heads}",
        f"SELECT queue, 0, {dialect.age('MIN(moment)')} FROM ({oldest}) AS oldest GROUP BY queue",
    )


def _sizes(names: Sequence[str], state: State, using: str, most: int) -> tuple[str, list[Any]]:
    """A SELECT with a term for each queue; Django makes the text once, for they differ by the name only."""
    any_name = "\n"  # no queue has this name, no state either
    jobs = Job.objects.using(using).in_state(state).filter(queue=any_name)
    some = jobs.order_by("weight", "enqueued_at", "pk").values("pk")[:most]  # as the index has them: it ends there
    sql, params = some.query.get_compiler(using).as_sql()
    parts = [f"SELECT %s, COUNT(*), 0 FROM ({sql}) AS some_{place}" for place in range(len(names))]
    values = [name if value == any_name else value for name in names for value in (name, *params)]
    return " UNION ALL ".join(parts), values


def _first(rows: Iterable[str], using: str) -> str | None:
    return run(using, lambda _: next(iter(rows), None), atomic=False)


def _in_chunks(names: Sequence[str], change: Callable[[Sequence[str]], object], using: str) -> None:
    for start in range(0, len(names), CHUNK):
        chunk = names[start : start + CHUNK]
        run(using, lambda _, chunk=chunk: change(chunk))  # type: ignore[misc]  # a default is no parameter to mypy
