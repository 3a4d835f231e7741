"""Queues as a whole: their names, pauses and latency. Rule: W24.

A pause is a column of the queue's row, which every claim reads.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef
from django.db.models.functions import Now

from ..core.json import jsontext
from ..core.lifecycle import State
from ..core.limits import Scope
from ..core.payloads import make_storable
from ..models import Job, Limit, Queue
from .chunks import chunks
from .dialects import dialect_of
from .dialects.base import JOB
from .store import Store
from .transactions import read, run, select

QUEUE = Queue._meta.db_table  # noqa: SLF001  (documented)
CHUNK = 100
"""Names that one transaction changes: on SQLite every other writer waits for it."""

NAMES_AT_ONCE = 200
"""Names that one statement finds among the waiting jobs; each takes one index lookup of a few pages."""

UNUSED_S = 14 * 86_400
"""Seconds that an empty queue is kept, unless it is paused or has a limit."""

USED_AGAIN_S = 3600
"""Minimum seconds between two updates of a queue's last use."""


class Waiting(NamedTuple):
    """Size and latency of a queue."""

    ready: int = 0
    """Number of enqueued jobs, which a worker may take."""
    held: int = 0
    """Number of blocked jobs: a limit or a lock holds them back."""
    latency_s: float = 0.0
    """Seconds the oldest job has waited; 0.0 if none waits."""
    ready_latency_s: float = 0.0
    """Seconds the oldest enqueued job has waited."""

    @property
    def size(self) -> int:
        """Number of waiting jobs."""
        return self.ready + self.held


def known_names(*, using: str) -> list[str]:
    """Return every queue name, sorted: remembered queues and queues with waiting jobs."""
    all_names = run(using, lambda _: set(Queue.objects.using(using).values_list("name", flat=True)), atomic=False)
    names = find_names_in_use(using=using)
    while names:
        all_names.update(names)
        names = find_names_in_use(using=using, after=names[-1])
    return sorted(all_names)


def find_names_in_use(*, using: str, after: str = "") -> list[str]:
    """Return the next queue names with waiting jobs, at most `NAMES_AT_ONCE`, sorted."""
    return [name for (name,) in select(_SELECT_NAMES_IN_USE, [after, after], using=using)]


# A loose index scan: each step jumps to the next name in FETCH's index. SELECT DISTINCT would read every waiting job.
_NAMES_IN_STATE = f"""
{{state}}(name, place) AS (
  SELECT MIN(job.queue), 1 FROM {JOB} AS job WHERE job.state = '{{state}}' AND job.queue > %s
  UNION ALL
  SELECT (SELECT MIN(job.queue) FROM {JOB} AS job WHERE job.state = '{{state}}' AND job.queue > prior.name), place + 1
  FROM {{state}} AS prior WHERE prior.name IS NOT NULL AND place < {NAMES_AT_ONCE}
)"""
_QUEUED = (State.ENQUEUED, State.BLOCKED)
_SELECT_NAMES_IN_USE = (
    f"WITH RECURSIVE {', '.join(_NAMES_IN_STATE.format(state=state) for state in _QUEUED)} "
    + " UNION ".join(f"SELECT name FROM {state} WHERE name IS NOT NULL" for state in _QUEUED)
    + f" ORDER BY name LIMIT {NAMES_AT_ONCE}"
)


def add(names: Iterable[str], *, using: str) -> None:
    """Remember these queues, so that they are listed while empty, and record that they are used.

    Existing rows are updated first: `forget_unused` keeps a row with a recent use. Then missing ones are inserted,
    including any that was forgotten at that moment.
    """
    names = sorted(names)
    if not names:
        return
    rows = Queue.objects.using(using)
    unused = rows.filter(name__in=names, used_at__lt=Now() - timedelta(seconds=USED_AGAIN_S))
    run(using, lambda _: unused.update(used_at=Now()), atomic=False, writes=True)
    new = [Queue(name=name) for name in names]
    run(using, lambda _: rows.bulk_create(new, ignore_conflicts=True), atomic=False, writes=True)


def forget_unused(
    *, using: str, after: str = "", unused_s: float = UNUSED_S, portion_size: int = NAMES_AT_ONCE
) -> tuple[int, str]:
    """Delete empty queues that were not used for `unused_s`, are not paused and have no limit.

    Checks the next `portion_size` queues by name. Returns how many were deleted, and the last name, "" at the end.
    Scheduled and retrying jobs bring their queue back when they are enqueued.
    """
    rows, jobs = Queue.objects.using(using), Job.live.filter(queue=OuterRef("name"))
    limit = Limit.objects.filter(scope=Scope.QUEUE, name=OuterRef("name"))
    unused = rows.filter(~Exists(limit), paused_at=None, used_at__lt=Now() - timedelta(seconds=unused_s))
    next_names = rows.filter(name__gt=after).order_by("name").values_list("name", flat=True)[:portion_size]
    names = read(next_names)
    empty = unused.filter(*(~Exists(jobs.in_state(state)) for state in _QUEUED), name__in=names)
    candidates = read(empty.values_list("name", flat=True))

    def verb(_: BaseDatabaseWrapper) -> int:
        # Check again with the rows locked: a queue that was used, paused or limited in between stays. A row that
        # another transaction has locked is in use and skipped.
        unchanged = unused.filter(name__in=candidates).order_by("name").select_for_update(skip_locked=True)
        return rows.filter(name__in=list(unchanged.values_list("name", flat=True))).delete()[0]

    count = run(using, verb) if candidates else 0
    return count, names[-1] if len(names) == portion_size else ""


def pause(store: Store, queues: Sequence[str] | None, *, by: str = "", reason: str = "") -> list[str]:
    """Stop claims of jobs from these queues, or from all known ones; return the queues not paused before.

    A name that was never used becomes a queue. `by` and `reason` are shown: see `pause_columns`.
    """
    paused = Queue.objects.using(store.alias).filter(paused_at__isnull=False)
    already_paused: set[str] = run(store.alias, lambda _: set(paused.values_list("name", flat=True)), atomic=False)
    names = known_names(using=store.alias) if queues is None else sorted(set(queues))
    names = [name for name in names if name not in already_paused]  # a second PAUSE writes nothing
    columns = pause_columns(by, reason)

    def pause_names(names: Sequence[str]) -> None:
        rows = Queue.objects.using(store.alias)
        rows.filter(name__in=names).update(used_at=Now())  # from now on `forget_unused` leaves these rows alone
        rows.bulk_create([Queue(name=name) for name in names], ignore_conflicts=True)
        rows.filter(name__in=names, paused_at__isnull=True).update(paused_at=Now(), **columns)

    _run_in_chunks(names, pause_names, store.alias)
    return names


def pause_columns(by: str, reason: str) -> dict[str, str]:
    """Return the columns of a pause, cut to their lengths. Without `by` it is this host and process."""
    author = by or f"{socket.gethostname()}:{os.getpid()}"
    return {"paused_by": make_storable(author)[:255], "pause_reason": make_storable(reason)[:500]}


def read_paused(*, using: str) -> set[str]:
    """Return the names of the paused queues."""
    rows = Queue.objects.using(using).filter(paused_at__isnull=False).values_list("name", flat=True)
    return run(using, lambda _: set(rows), atomic=False)


def resume(store: Store, queues: Sequence[str] | None) -> list[str]:
    """Allow claims from these queues again, or from all paused ones; return the queues that were paused."""
    paused = Queue.objects.using(store.alias).filter(paused_at__isnull=False)
    names: list[str] = read(paused.values_list("name", flat=True))
    resumed = sorted(names if queues is None else {*names} & {*queues})
    values = {"paused_at": None, "used_at": Now()}
    _run_in_chunks(resumed, lambda chunk: paused.filter(name__in=chunk).update(**values), store.alias)
    store.announce(resumed)
    return resumed


def latency(store: Store, queues: Sequence[str]) -> dict[str, float]:
    """Return the seconds the oldest waiting job of each queue has waited; 0.0 for queues without one.

    Includes blocked jobs. One statement for any number of names; it reads the first job of each priority from the
    index.
    """
    return dict.fromkeys(queues, 0.0) | {name: max(ages) for name, ages in read_ages(queues, using=store.alias).items()}


def read_ages(names: Sequence[str], *, using: str) -> dict[str, tuple[float, float]]:
    """Return the seconds the oldest enqueued and the oldest blocked job of each queue has waited, 0.0 for none.

    Queues without waiting jobs are left out. One statement for any number of names.
    """
    if not names:
        return {}
    found: dict[str, tuple[float, float]] = {}
    for name, state, age in select(_build_ages_sql(using), [jsontext.encode(list(names))], using=using):
        # A job may carry a later time than the statement's clock.
        ready, held = found.get(name, (0.0, 0.0))
        found[name] = (max(0.0, age), held) if state == State.ENQUEUED else (ready, max(0.0, age))
    return found


# The oldest job of each queue and priority is first in FETCH's index: jump from one priority to the next.
_HEADS = f"""
{{state}}(queue, sort_priority) AS (
  SELECT known.name, (SELECT MIN(job.sort_priority) FROM {JOB} AS job
    WHERE job.state = '{{state}}' AND job.queue = known.name)
  FROM known
  UNION ALL
  SELECT heads.queue, (SELECT MIN(job.sort_priority) FROM {JOB} AS job
    WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.sort_priority > heads.sort_priority)
  FROM {{state}} AS heads WHERE heads.sort_priority IS NOT NULL
)"""
_OLDEST = f"""
SELECT heads.queue, '{{state}}' AS state, (SELECT MIN(job.enqueued_at) FROM {JOB} AS job
  WHERE job.state = '{{state}}' AND job.queue = heads.queue AND job.sort_priority = heads.sort_priority) AS moment
FROM {{state}} AS heads WHERE heads.sort_priority IS NOT NULL"""


def _build_ages_sql(using: str) -> str:
    """Build a SELECT of name, state and the age of the oldest job. Its parameter is a JSON array of names."""
    dialect = dialect_of(connections[using])
    heads = ", ".join(_HEADS.format(state=state) for state in _QUEUED)
    oldest = " UNION ALL ".join(_OLDEST.format(state=state) for state in _QUEUED)
    return (
        f"WITH RECURSIVE known(name) AS ({dialect.names_of_json}), {heads}"
        f" SELECT queue, state, {dialect.age('MIN(moment)')} FROM ({oldest}) AS oldest GROUP BY queue, state"
    )


def _run_in_chunks(names: Sequence[str], change: Callable[[Sequence[str]], object], using: str) -> None:
    for chunk in chunks(names, CHUNK):
        run(using, lambda _, chunk=chunk: change(chunk))  # type: ignore[misc]  # a default is no parameter to mypy
