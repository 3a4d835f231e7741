"""Defer a job if this worker's code lacks its task, so that a worker with newer code can run it.

`defer_to_newer_worker` returns the report. It computes when a worker fetches the job again, and when the
grace period (UNKNOWN_JOBTYPE_GRACE) is over. Independent of the broker.
"""

from __future__ import annotations

from datetime import datetime

from .. import conf
from ..core import payloads
from ..core.json import jsontext
from ..core.json.fields import parse_instant
from ..core.logs import get_logger
from ..core.payloads import LATER, Failure, Reservation
from ..errors import InvalidPayload, UnknownJobType

logger = get_logger(__name__)

FIRST_S, LONGEST_S = 2.0, 30.0
"""Bounds of the delay until a job is fetched again, which is half the time it has waited. The lower bound keeps workers
from fetching the job in a tight loop.
"""

_logged_jobtypes: set[str] = set()
"""Job types already logged: each is logged once, and the set is bounded to 1,000 names."""


def defer_to_newer_worker(job: Reservation, at: str | None, error: UnknownJobType) -> Failure | None:
    """Return the report that defers the job; None when its grace period is over.

    Another Faktory server records the report as a failure.
    """
    wait_s = seconds_until_retry(job, at, grace_s=conf.get("UNKNOWN_JOBTYPE_GRACE"))
    if wait_s is None:
        return None
    if job.jobtype not in _logged_jobtypes and len(_logged_jobtypes) < 1000:
        _logged_jobtypes.add(job.jobtype)
        logger.warning("jobs of a task this code lacks are left for newer workers jid=%s error=%s", job.jid, error)
    return payloads.failure_of(job, errtype=type(error).__name__, message=str(error), retry_in_s=wait_s, verdict=LATER)


def seconds_until_retry(job: Reservation, at: str | None, *, grace_s: float) -> float | None:
    """Return the seconds until the job is fetched again; None if the grace period is over or unknown.

    The grace period starts at the latest of these: the job was pushed, was due (`at`), or failed for another reason.
    """
    starts = (job.created_at, _parse_or_none(at), _find_failed_at(job.failure))
    grace_started_at = max(filter(None, starts), default=None)
    if grace_started_at is None or job.started_at is None:
        return None  # another Faktory server sends no times and cannot defer a job
    waited_s = max(0.0, (job.started_at - grace_started_at).total_seconds())
    if waited_s >= grace_s:
        return None
    # The last bound lets the job fail as soon as its grace period is over.
    return min(max(FIRST_S, waited_s / 2), LONGEST_S, max(0.0, grace_s - waited_s))


def _find_failed_at(failure: str) -> datetime | None:
    try:
        latest_failure = jsontext.decode(failure) if failure else {}
    except InvalidPayload:
        return None
    if not isinstance(latest_failure, dict):
        return None
    # A failure of this kind is an earlier deferral, which must not start a new grace period.
    is_deferral = latest_failure.get("errtype") == UnknownJobType.__name__
    return None if is_deferral else _parse_or_none(latest_failure.get("failed_at"))


def _parse_or_none(text: object) -> datetime | None:
    try:
        return parse_instant("at", text) if isinstance(text, str) and text else None
    except InvalidPayload:
        return None
