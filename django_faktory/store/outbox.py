"""Jobs on their way elsewhere: rows of the caller's transaction, handed on in order (ADR 0008).

A row is deleted when its job was taken. Whoever hands rows on leases them first, in a short transaction, so that
no transaction waits for a network; a lease that ends without that is anybody's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ..models import OutboxEntry
from ..payloads import JobPayload
from .dialects import dialect_of
from .transactions import run

CHUNK = 500
LEASE_S = 30.0

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JobPayload)


class Leased(NamedTuple):
    """A row to hand on; `job` is None where it cannot be read."""

    id: int
    job: JobPayload | None


def add(jobs: Sequence[JobPayload], *, using: str) -> None:
    """Store jobs in the caller's transaction, or in one of their own."""
    entries = [OutboxEntry(jid=job.jid, queue=job.queue, job=_encoder.encode(job).decode()) for job in jobs]
    run(using, lambda _: OutboxEntry.objects.using(using).bulk_create(entries, batch_size=CHUNK))


def lease(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> list[Leased]:
    """The oldest rows, for the caller to hand on within `LEASE_S`; none where somebody else is at it."""

    def verb(connection: BaseDatabaseWrapper) -> list[Leased]:
        with connection.cursor() as cursor:
            clock = now or dialect_of(connection).now(cursor)
        waiting = OutboxEntry.objects.using(using).filter(error="").order_by("id")
        if connection.features.has_select_for_update:
            waiting = waiting.select_for_update()  # without SKIP LOCKED: the oldest first, or none
        free: list[OutboxEntry] = []
        for entry in waiting[:limit]:
            if entry.leased_until and entry.leased_until > clock:
                break
            free.append(entry)
        held = OutboxEntry.objects.using(using).filter(pk__in=[entry.pk for entry in free])
        held.update(leased_until=clock + timedelta(seconds=LEASE_S))
        return [Leased(entry.pk, _read(entry.job)) for entry in free]

    if not run(using, lambda _: OutboxEntry.objects.using(using).filter(error="").exists(), atomic=False):
        return []  # nearly always: one statement, no transaction
    return run(using, verb)


def settle(
    *, using: str, done: Collection[int] = (), free: Collection[int] = (), refused: Mapping[int, str] | None = None
) -> None:
    """End leases: these rows are done, those go on waiting, and those stay for a person, each with its error."""

    def verb(_: BaseDatabaseWrapper) -> None:
        entries = OutboxEntry.objects.using(using)
        entries.filter(pk__in=done).delete()
        entries.filter(pk__in=free).update(leased_until=None)
        for pk, error in (refused or {}).items():
            entries.filter(pk=pk).update(leased_until=None, error=error)

    run(using, verb)


def _read(text: str) -> JobPayload | None:
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None
