"""Outbox of jobs for another broker: rows in the caller's transaction, sent in order (ADR 0008).

A row is deleted once its job was accepted. The relay leases rows first, in a short transaction, so that no transaction
waits for the network. After a lease ends without a result, any process may lease the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.payloads import JobPayload, in_ascii
from ..errors import InvalidPayload
from ..models import OutboxEntry
from .dialects import clock_of
from .transactions import run

CHUNK = 500
LEASE_S = 30.0
MAX_ERROR = 1000
"""Characters of the error that is stored if the database refuses the whole of it."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JobPayload)


class LeasedEntry(NamedTuple):
    """A row to send; `job` is None if it cannot be decoded."""

    id: int
    job: JobPayload | None


def add(jobs: Sequence[JobPayload], *, using: str) -> None:
    """Store jobs in the caller's transaction, or in a new one."""
    entries = [OutboxEntry(jid=job.jid, queue=job.queue, job=_encoder.encode(job).decode()) for job in jobs]
    run(using, lambda _: OutboxEntry.objects.using(using).bulk_create(entries, batch_size=CHUNK))


def has_waiting(jid: str, *, using: str) -> bool:
    """Return whether this job waits here, and was not refused."""
    rows = OutboxEntry.objects.using(using).filter(jid=jid, error="")
    return run(using, lambda _: rows.exists(), atomic=False)


def lease(*, using: str, now: datetime | None = None, limit: int = CHUNK) -> list[LeasedEntry]:
    """Lease the oldest rows for `LEASE_S`; an empty list while another process has leased them."""

    def verb(connection: BaseDatabaseWrapper) -> list[LeasedEntry]:
        clock = clock_of(connection, now)
        # Without SKIP LOCKED: skipping rows would break the order.
        waiting = OutboxEntry.objects.using(using).filter(error="").order_by("id").select_for_update()
        free: list[OutboxEntry] = []
        for entry in waiting[:limit]:
            # A leased row blocks all later ones: they must not overtake it.
            if entry.leased_until and entry.leased_until > clock:
                break
            free.append(entry)
        leased = OutboxEntry.objects.using(using).filter(pk__in=[entry.pk for entry in free])
        leased.update(leased_until=clock + timedelta(seconds=LEASE_S))
        return [LeasedEntry(entry.pk, _decode(entry.job)) for entry in free]

    if not run(using, lambda _: OutboxEntry.objects.using(using).filter(error="").exists(), atomic=False):
        return []  # the usual case: one statement, no transaction
    return run(using, verb)


def settle(
    *, using: str, done: Collection[int] = (), free: Collection[int] = (), refused: Mapping[int, str] | None = None
) -> None:
    """End leases: delete `done` rows, make `free` rows available, and keep `refused` rows with their errors.

    Refused rows are not leased again until a person clears the error.
    """

    def verb(_: BaseDatabaseWrapper, refused: Mapping[int, str] = refused or {}) -> None:
        entries = OutboxEntry.objects.using(using)
        entries.filter(pk__in=done).delete()
        entries.filter(pk__in=free).update(leased_until=None)
        for pk, error in refused.items():
            entries.filter(pk=pk).update(leased_until=None, error=error)

    try:
        run(using, verb)
    except InvalidPayload:  # the error quotes the target, or the job
        in_short = {pk: in_ascii(error)[:MAX_ERROR] for pk, error in (refused or {}).items()}
        run(using, partial(verb, refused=in_short))


def _decode(text: str) -> JobPayload | None:
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None
