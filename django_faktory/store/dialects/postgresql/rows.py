"""Columns that a claim on PostgreSQL returns, and their conversion into reservations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....core.payloads import Reservation
from .pipeline import Rows

# `is_batchless` decides by which statement an atomic task may end its job (ADR 0007). Columns are named, because a
# later release may add some while this one runs.
RETURNED = (
    "j.jid, j.queue, j.payload, j.wid, j.attempt, j.created_at, j.enqueued_at, j.started_at, j.failure, j.history,"
    " j.reserve_for, j.result_ttl, j.jobtype, j.lock_key, j.limit_key, j.permits,"
    " j.bid IS NULL AND j.callback_of IS NULL AS is_batchless"
)


def reservations(claims: Sequence[Rows]) -> list[Reservation]:
    """Return the reservations of each claim, sorted by queue, priority and age.

    RETURNING has no order of its own.
    """
    return [
        _to_reservation(row) for rows in claims for row in (sorted(rows, key=_claim_order) if len(rows) > 1 else rows)
    ]


def prefetched_reservations(rows: Rows) -> list[Reservation]:
    """Return the reservations of prefetched jobs, marked `is_prefetched`."""
    return [msgspec.structs.replace(job, is_prefetched=True) for job in reservations([rows])]


def with_tokens(claimed: list[Reservation], next_holders: Rows) -> list[Reservation]:
    """Return the claimed jobs, with the tokens of locks that were passed on to some of them."""
    tokens = {jid: token for jid, token, _ in next_holders}
    return [msgspec.structs.replace(job, lock_token=tokens.get(job.jid)) for job in claimed]


def _claim_order(row: tuple[Any, ...]) -> tuple[Any, ...]:
    # Place of the queue in the request, then priority, then age (W13).
    place, sort_priority, row_id, _, _, _, _, _, _, enqueued_at, *_ = row
    return place, sort_priority, enqueued_at, row_id


def _to_reservation(row: tuple[Any, ...]) -> Reservation:
    (_, _, _, jid, queue, text, wid, attempt, created_at, enqueued_at, started_at, failure, history, reserve_for,
     result_ttl, jobtype, lock_key, limit_key, permits, is_batchless) = row  # fmt: skip
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
        limit_key=limit_key,
        permits=permits,
        is_batchless=is_batchless,
    )
