"""Give lock keys to jobs that were pushed before their queue used locks.

Claims do not wait for it: a job without a key when it is claimed runs without a lock. A running job receives its key
when it is enqueued again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.lifecycle import State
from ...core.logs import get_logger
from ...core.payloads import JobPayload
from ...errors import InvalidPayload
from ...models import Job
from .. import scan
from ..transactions import run
from . import locks

logger = get_logger(__name__)

CHUNK = 200
BACKFILLED = (State.ENQUEUED, State.SCHEDULED, State.RETRIES)

AddKey = Callable[[JobPayload], JobPayload]
"""Returns the job with its key, or unchanged if it takes no lock.

Raises InvalidPayload if its key cannot be computed.
"""


Position = tuple[int, tuple[Any, ...] | None]
"""The index of a walk in `_walks`, and the position in it."""


def give_keys(
    add_key: AddKey, queues: Collection[str] | None, *, using: str, after: Position | None = None, limit: int = CHUNK
) -> Position | None:
    """Give keys to the next `limit` waiting jobs without one in these queues, None for all.

    Returns the position to continue at, None at the end.
    """
    walks = _walks(queues)
    number, place = after or (0, None)
    if number >= len(walks):  # fewer queues use locks than at the previous call
        return None
    state, queue = walks[number]
    rows, place = scan.portion(state, ("pk",), using=using, queue=queue, after=place, size=limit)
    if rows:
        run(using, partial(_give_keys, add_key=add_key, queues=queues, ids=[pk for (pk,) in rows]))
    if place is not None:
        return number, place
    return (number + 1, None) if number + 1 < len(walks) else None


def _walks(queues: Collection[str] | None) -> list[tuple[State, str | None]]:
    """Return the index walks that cover all waiting jobs of these queues: by state, and by queue for enqueued jobs."""
    # Of these three states only the index of enqueued jobs starts with the queue.
    enqueued = [(State.ENQUEUED, None)] if queues is None else [(State.ENQUEUED, queue) for queue in sorted(queues)]
    return [*enqueued, (State.SCHEDULED, None), (State.RETRIES, None)]


def _give_keys(
    connection: BaseDatabaseWrapper, *, add_key: AddKey, queues: Collection[str] | None, ids: Sequence[int]
) -> None:
    jobs = Job.live.using(connection.alias).in_state(*BACKFILLED).filter(lock_key__isnull=True)
    matching = jobs.filter(pk__in=ids) if queues is None else jobs.filter(pk__in=ids, queue__in=queues)
    ids_by_key: dict[str, list[int]] = defaultdict(list)
    # Waiting for a claim's transaction would gain nothing: the claimed job already runs without a key.
    rows = matching.order_by("pk").only("jid", "jobtype", "queue", "sort_priority", "payload")
    for row in rows.select_for_update(skip_locked=True):
        if key := _key_of(row, add_key):
            ids_by_key[key].append(row.pk)
    for key, job_ids in ids_by_key.items():
        jobs.filter(pk__in=job_ids).update(lock_key=key)
    locks.block_if_locked(connection, [pk for job_ids in ids_by_key.values() for pk in job_ids])


def _key_of(row: Job, add_key: AddKey) -> str | None:
    job = JobPayload(jid=row.jid, jobtype=row.jobtype, text=row.payload, queue=row.queue, priority=row.priority)
    try:
        options = add_key(job).options
    except InvalidPayload as error:  # the job was accepted, so it runs without a lock
        logger.warning("a job pushed before its queue was locketed gets no key jid=%s error=%s", row.jid, error)
        return None
    return options.lock_key if options else None
