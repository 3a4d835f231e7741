"""A job whose task this worker's code does not have: for a while it is left for workers with newer code.

Knows no broker: it says when the job is to be looked at again, and when there has been waiting enough.
"""

from __future__ import annotations

from datetime import datetime

from .. import conf, jsontext, payloads
from ..errors import InvalidPayload, UnknownJobType
from ..jsonfields import parse_instant
from ..logs import get_logger
from ..payloads import Failure, Reservation

logger = get_logger(__name__)

FIRST_S, LONGEST_S = 2.0, 30.0
"""Between two looks at one job: half the time it has waited, within these. No worker fetches it in a circle."""

_told: set[str] = set()
"""Jobtypes that were told of in the log: once each, and not without end."""


def left_for_newer(job: Reservation, at: str | None, error: UnknownJobType) -> Failure | None:
    """What to report of it while it may wait; None: it has failed. A server elsewhere takes this as a failure too."""
    wait_s = look_again_in_s(job, at, grace_s=conf.get("UNKNOWN_JOBTYPE_GRACE"))
    if wait_s is None:
        return None
    if job.jobtype not in _told and len(_told) < 1000:
        _told.add(job.jobtype)
        logger.warning("jobs of a task this code lacks are left for newer workers jid=%s error=%s", job.jid, error)
    return payloads.failure(
        jid=job.jid, wid=job.wid, attempt=job.attempt, errtype=type(error).__name__, message=str(error),
        retry_in_s=wait_s, verdict="later",
    )  # fmt: skip


def look_again_in_s(job: Reservation, at: str | None, *, grace_s: float) -> float | None:
    """Seconds until a worker may look at the job again; None: its time is over, or cannot be told.

    The grace counts from when it could run first: pushed, due (`at`), or failed for another reason.
    """
    began = max(filter(None, (job.created_at, _instant(at), _failed_at(job.failure))), default=None)
    if began is None or job.started_at is None:
        return None  # a server elsewhere does not tell, and could not put it off
    waited_s = max(0.0, (job.started_at - began).total_seconds())
    if waited_s >= grace_s:
        return None
    return min(max(FIRST_S, waited_s / 2), LONGEST_S, max(0.0, grace_s - waited_s))


def _failed_at(failure: str) -> datetime | None:
    try:
        told = jsontext.decode(failure) if failure else {}
    except InvalidPayload:
        return None
    is_ours = isinstance(told, dict) and told.get("errtype") == UnknownJobType.__name__
    return None if is_ours or not isinstance(told, dict) else _instant(told.get("failed_at"))


def _instant(text: object) -> datetime | None:
    try:
        return parse_instant("at", text) if isinstance(text, str) and text else None
    except InvalidPayload:
        return None
