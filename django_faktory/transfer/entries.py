"""One job of the original's Redis, read and written. Knows neither Redis nor rows.

A job is kept as the original wrote it; what it says of earlier failures becomes columns, and text again on the way
back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from .. import jsontext
from ..admission import parse_job
from ..errors import InvalidPayload
from ..jsonfields import ABSENT, integer, string
from ..lifecycle import State
from ..payloads import MAX_ERRTYPE_BYTES, JobPayload, cut, rfc3339

QUEUE, WORKING = "queue", "working"


class Arrival(NamedTuple):
    """A job that comes with a past."""

    job: JobPayload
    """Its `at` is when it is to run next; None: now, or never."""
    state: State
    ends_at: datetime | None = None
    """Until when a dead one is kept."""
    failures: int = 0
    failure: str = ""
    errtype: str = ""


def arrival(kind: str, name: str, raw: bytes, score: float) -> Arrival:
    """What lies in a queue or a set, ready to be stored. Raises InvalidPayload, with the jid where it is known."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InvalidPayload("expected UTF-8") from None
    if kind == WORKING:
        text = jsontext.members(text).get("job", ABSENT)
    found = jsontext.members(text)
    job = parse_job(text)
    try:
        return _arrival(kind, name, job, found, score)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=job.jid) from None


def _arrival(kind: str, name: str, job: JobPayload, found: dict[str, str], score: float) -> Arrival:
    failures, failure, errtype = _past(found)
    if kind == QUEUE:
        if job.queue != name:
            raise InvalidPayload(f"waits in the queue {name}, and says {job.queue}")
        return Arrival(_at(job, None), State.ENQUEUED, None, failures, failure, errtype)
    moment = _moment(score)
    if kind == State.DEAD:
        return Arrival(_at(job, None), State.DEAD, moment, failures, failure, errtype)
    # A job somebody works on comes back when its reservation is over: until then it may still be done.
    state = State.RETRIES if kind == State.RETRIES or (kind == WORKING and failures) else State.SCHEDULED
    return Arrival(_at(job, moment), state, None, failures, failure, errtype)


def departure(
    *,
    text: str,
    state: str,
    created_at: datetime,
    run_at: datetime | None,
    failure: str,
    enqueued_at: datetime | None,
) -> bytes:
    """A job as the original would have written it: the stored text, with what is known beside it."""
    added: list[tuple[str, str]] = []
    found = jsontext.members(text)
    if "created_at" not in found:
        added.append(("created_at", f'"{rfc3339(created_at)}"'))
    if state == State.SCHEDULED and run_at is not None:
        found.pop("at", None)
        text = jsontext.join(found.items())
        added.append(("at", f'"{rfc3339(run_at)}"'))
    if state in (State.ENQUEUED, State.BLOCKED) and enqueued_at is not None:
        added.append(("enqueued_at", f'"{rfc3339(enqueued_at)}"'))
    if failure:
        told = jsontext.members(failure)
        if state == State.RETRIES and run_at is not None:
            told["next_at"] = f'"{rfc3339(run_at)}"'
        added.append(("failure", jsontext.join(told.items())))
    return jsontext.append(text, added).encode()


def score_of(moment: datetime) -> float:
    """As the original computes it: whole seconds, and the fraction added."""
    return int(moment.timestamp()) + moment.microsecond * 1000 / 1_000_000_000


def _at(job: JobPayload, at: datetime | None) -> JobPayload:
    return msgspec.structs.replace(job, at=at)


def _past(found: dict[str, str]) -> tuple[int, str, str]:
    raw = found.get("failure", ABSENT)
    if raw == ABSENT:
        return 0, "", ""
    if not raw.startswith("{"):
        raise InvalidPayload("failure: expected an object or null")
    told = jsontext.last_members(raw)
    count = integer(told, "retry_count", default=0, low=0, high=2**31 - 2, within="failure.")
    errtype = cut(string(told.get("errtype", ABSENT)) or "unknown", MAX_ERRTYPE_BYTES)
    return count + 1, raw, errtype.replace("\x00", "\ufffd")


def _moment(score: float) -> datetime:
    try:
        return datetime.fromtimestamp(score, UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidPayload(f"expected a time as its score, got {score}") from None
