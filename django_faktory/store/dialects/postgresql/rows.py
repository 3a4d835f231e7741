"""Conversion of the rows of claims on PostgreSQL into reservations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....core.payloads import Reservation
from .pipeline import Rows


def reservations(claims: Sequence[Rows]) -> list[Reservation]:
    """Return the reservations of each claim, sorted by queue, priority and age, with their locks and permits.

    RETURNING has no order of its own.
    """
    return [job for rows in claims for job in (_convert(rows) if len(rows) > 1 else map(_to_reservation, rows))]


def _convert(rows: Rows) -> list[Reservation]:
    claimed = [_to_reservation(row) for row in sorted((row for row in rows if row[0] != ACQUIRED), key=_claim_order)]
    if len(claimed) == len(rows):
        return claimed
    held = {jid: (permits, token) for kind, _, _, _, jid, *_, permits, _, token in rows if kind == ACQUIRED}
    return [
        msgspec.structs.replace(job, permits=held[job.jid][0], lock_token=held[job.jid][1]) if job.jid in held else job
        for job in claimed
    ]


ACQUIRED = "acquired"


def _claim_order(row: tuple[Any, ...]) -> tuple[Any, ...]:
    # Place of the queue in the request, then priority, then age (W13).
    _, place, sort_priority, row_id, _, _, _, _, _, _, enqueued_at, *_ = row
    return place, sort_priority, enqueued_at, row_id


def _to_reservation(row: tuple[Any, ...]) -> Reservation:
    # `is_batchless` decides by which call an atomic task may end its job (ADR 0007).
    (kind, _, _, _, jid, queue, text, wid, attempt, created_at, enqueued_at, started_at, failure, history, reserve_for,
     result_ttl, jobtype, lock_key, limit_key, permits, is_batchless, lock_token) = row  # fmt: skip
    return Reservation(
        jid=jid,
        queue=queue,
        jobtype=jobtype,
        text=text,
        wid=wid,
        attempt=attempt,
        created_at=created_at,
        enqueued_at=enqueued_at,
        started_at=started_at,
        failure=failure,
        history=history,
        reserve_for=reserve_for,
        result_ttl=result_ttl,
        lock_key=lock_key,
        lock_token=lock_token,
        limit_key=limit_key,
        permits=permits,
        is_batchless=is_batchless,
        is_prefetched=kind == "prefetched",
    )
