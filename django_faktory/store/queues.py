"""Queues as a whole: their names, pauses and latency. Rule: W24. A pause is a row; claims look at it each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..lifecycle import State
from ..models import Job, Queue
from .dialects import dialect_of
from .transactions import run

CHUNK = 500


def known_names(*, using: str) -> list[str]:
    """Every queue there is, by name: those remembered, and those that jobs wait in. One look at an index for each."""
    remembered = run(using, lambda _: set(Queue.objects.using(using).values_list("name", flat=True)), atomic=False)
    return sorted(remembered | set(_names_in_use(using)))


def _names_in_use(using: str) -> list[str]:
    ready = Job.objects.using(using).in_state(State.ENQUEUED).order_by("queue").values_list("queue", flat=True)
    names: list[str] = []
    while (name := _first(ready.filter(queue__gt=names[-1] if names else "")[:1], using)) is not None:
        names.append(name)
    return names


def pause(queues: Sequence[str] | None, *, using: str) -> None:
    """Give out no job of these queues, or of all that are known, from now on; a name never used becomes a queue."""

    def pause_these(names: Sequence[str]) -> None:
        rows = Queue.objects.using(using)
        rows.bulk_create([Queue(name=name) for name in names], ignore_conflicts=True)
        rows.filter(name__in=names, paused_at__isnull=True).update(paused_at=Now())

    _in_chunks(known_names(using=using) if queues is None else sorted(queues), pause_these, using)


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
        oldest = {queue: _oldest(queue, using) for queue in queues}
        return {queue: max(0.0, (now - (at or now)).total_seconds()) for queue, at in oldest.items()}

    return run(using, verb)


def _oldest(queue: str, using: str) -> datetime | None:
    """The oldest of each priority is the first in the index FETCH uses: a look at it for each, not at every job."""
    ready = Job.objects.using(using).in_state(State.ENQUEUED).filter(queue=queue)
    first_of_all = ready.order_by("weight", "enqueued_at", "id").only("weight", "enqueued_at")
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
