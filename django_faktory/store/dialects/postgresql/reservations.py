"""Confirm and extend reservations on PostgreSQL (ADR 0026)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ....core.payloads import Delivery
from .calls import call


def confirm(connection: BaseDatabaseWrapper, deliveries: Sequence[Delivery], now: datetime | None) -> set[str]:
    """Start the reservations of delivered jobs; return the jids of locked rows."""
    jobs = [delivery.job for delivery in deliveries]
    values = [
        [job.jid for job in jobs], [job.attempt for job in jobs], [job.wid for job in jobs],
        [delivery.ago_s for delivery in deliveries], now,
    ]  # fmt: skip
    return {jid for (jid,) in call(connection, "faktory_confirm_1", values)}


def extend(
    connection: BaseDatabaseWrapper, held_jobs: Sequence[tuple[str, str, int]], at_least_s: float, now: datetime | None
) -> None:
    """Extend the reservations of these jobs (wid, jid, attempt) that are half over."""
    values = [
        [jid for _, jid, _ in held_jobs],
        [attempt for *_, attempt in held_jobs],
        [wid for wid, *_ in held_jobs],
        at_least_s,
        now,
    ]
    call(connection, "faktory_extend_1", values)
