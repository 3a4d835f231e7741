"""Keys for jobs that were pushed before their queue was locketed. Jobs that run get theirs when they wait again.

A claim takes no look at it: a job that has no key when it is claimed runs without a lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import InvalidPayload
from ..lifecycle import State
from ..logs import get_logger
from ..models import Job
from ..payloads import JobPayload
from . import locks
from .transactions import run
from .upkeep import skip_locked

logger = get_logger(__name__)

CHUNK = 500
WAITING = (State.ENQUEUED, State.SCHEDULED, State.RETRIES)

Keyed = Callable[[JobPayload], JobPayload]
"""The job with its key, or as it is where it takes no part; raises InvalidPayload where that cannot be told."""


def give_keys(
    keyed: Keyed, queues: Collection[str] | None, *, using: str, after: int = 0, limit: int = CHUNK
) -> int | None:
    """Give keys to jobs without one that wait in these queues, None for all: at most `limit`, by their ids.

    Returns the id to go on after, None at the end.
    """

    def verb(connection: BaseDatabaseWrapper) -> int | None:
        jobs = Job.objects.using(using).in_state(*WAITING).filter(lock_key__isnull=True)
        found = jobs.filter(pk__gt=after) if queues is None else jobs.filter(pk__gt=after, queue__in=queues)
        rows = list(skip_locked(found.order_by("pk").only("jid", "jobtype", "queue", "weight", "payload"))[:limit])
        theirs: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            if key := _key_of(row, keyed):
                theirs[key].append(row.pk)
        for key, ids in theirs.items():
            jobs.filter(pk__in=ids).update(lock_key=key)
        locks.arrived(connection, [pk for ids in theirs.values() for pk in ids])
        return rows[-1].pk if len(rows) == limit else None

    return run(using, verb)


def _key_of(row: Job, keyed: Keyed) -> str | None:
    job = JobPayload(jid=row.jid, jobtype=row.jobtype, text=row.payload, queue=row.queue, priority=row.priority)
    try:
        options = keyed(job).options
    except InvalidPayload as error:  # it was accepted: it runs without
        logger.warning("a job pushed before its queue was locketed gets no key jid=%s error=%s", row.jid, error)
        return None
    return options.lock_key if options else None
