"""Keys for jobs that were pushed before their queue was locketed. Jobs that run get theirs when they wait again.

A claim takes no look at it: a job that has no key when it is claimed runs without a lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import InvalidPayload
from ..lifecycle import State
from ..logs import get_logger
from ..models import Job
from ..payloads import JobPayload
from . import locks, walking
from .transactions import run
from .upkeep import skip_locked

logger = get_logger(__name__)

CHUNK = 200
WAITING = (State.ENQUEUED, State.SCHEDULED, State.RETRIES)

Keyed = Callable[[JobPayload], JobPayload]
"""The job with its key, or as it is where it takes no part; raises InvalidPayload where that cannot be told."""


Position = tuple[int, tuple[Any, ...] | None]
"""The number of a walk, see `_walks`, and the place in it."""


def give_keys(
    keyed: Keyed, queues: Collection[str] | None, *, using: str, after: Position | None = None, limit: int = CHUNK
) -> Position | None:
    """Give keys to jobs without one that wait in these queues, None for all: looks at `limit` jobs, by their index.

    Returns the position to go on after, None at the end.
    """
    walks = _walks(queues)
    number, place = after or (0, None)
    if number >= len(walks):  # fewer queues are locketed than a moment ago
        return None
    state, queue = walks[number]
    rows, place = walking.portion(state, ("pk",), using=using, queue=queue, after=place, size=limit)
    if rows:
        run(using, partial(_give_keys, keyed=keyed, queues=queues, ids=[pk for (pk,) in rows]))
    if place is not None:
        return number, place
    return (number + 1, None) if number + 1 < len(walks) else None


def _walks(queues: Collection[str] | None) -> list[tuple[State, str | None]]:
    """The walks that lead past all jobs that wait in these queues: by state, and by queue where the index allows it."""
    enqueued = [(State.ENQUEUED, None)] if queues is None else [(State.ENQUEUED, queue) for queue in sorted(queues)]
    return [*enqueued, (State.SCHEDULED, None), (State.RETRIES, None)]


def _give_keys(
    connection: BaseDatabaseWrapper, *, keyed: Keyed, queues: Collection[str] | None, ids: Sequence[int]
) -> None:
    jobs = Job.objects.using(connection.alias).in_state(*WAITING).filter(lock_key__isnull=True)
    found = jobs.filter(pk__in=ids) if queues is None else jobs.filter(pk__in=ids, queue__in=queues)
    theirs: dict[str, list[int]] = defaultdict(list)
    for row in skip_locked(found.order_by("pk").only("jid", "jobtype", "queue", "weight", "payload")):
        if key := _key_of(row, keyed):
            theirs[key].append(row.pk)
    for key, some in theirs.items():
        jobs.filter(pk__in=some).update(lock_key=key)
    locks.arrived(connection, [pk for some in theirs.values() for pk in some])


def _key_of(row: Job, keyed: Keyed) -> str | None:
    job = JobPayload(jid=row.jid, jobtype=row.jobtype, text=row.payload, queue=row.queue, priority=row.priority)
    try:
        options = keyed(job).options
    except InvalidPayload as error:  # it was accepted: it runs without
        logger.warning("a job pushed before its queue was locketed gets no key jid=%s error=%s", row.jid, error)
        return None
    return options.lock_key if options else None
