"""Convert a job between its form in the original's Redis and the values of a row; sends no query.

The job's text is stored as the original wrote it. Its record of earlier failures becomes columns, and text again on
export.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from ...core.job_parser import parse_job
from ...core.json import jsontext
from ...core.json.fields import ABSENT, integer, string
from ...core.lifecycle import State
from ...core.payloads import MAX_ERRTYPE_BYTES, JobPayload, cut, rfc3339
from ...errors import InvalidPayload
from ...models import Job

QUEUE, WORKING = "queue", "working"


class Arrival(NamedTuple):
    """A job with the state and failures it had in the original."""

    job: JobPayload
    """`job.at` is the next time to run; None: now, or never."""
    state: State
    ends_at: datetime | None = None
    """Time until which a dead job is kept."""
    failures: int = 0
    failure: str = ""
    """JSON of the latest failure, as the original wrote it; "" if there was none."""
    errtype: str = ""


def parse_arrival(kind: str, name: str, raw: bytes, score: float) -> Arrival:
    """Parse an entry of a queue or set. Raises InvalidPayload, with the jid if it is known."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InvalidPayload("expected UTF-8") from None
    if kind == WORKING:
        # The entries of the working set wrap the job in a reservation.
        text = jsontext.members(text).get("job", ABSENT)
    members = jsontext.members(text)
    job = parse_job(text)
    try:
        return _build_arrival(kind, name, job, members, score)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=job.jid) from None


def _build_arrival(kind: str, name: str, job: JobPayload, members: dict[str, str], score: float) -> Arrival:
    failed = _parse_failure(members)
    if kind == QUEUE:
        # The row takes its queue from the job's text: do not move a job to another queue unnoticed.
        if job.queue != name:
            raise InvalidPayload(f"waits in the queue {name}, and says {job.queue}")
        return Arrival(_with_at(job, None), State.ENQUEUED, None, *failed)
    moment = _parse_score(score)
    if kind == State.DEAD:
        # The score of a dead job is the end of its storage, not a time to run.
        return Arrival(_with_at(job, None), State.DEAD, moment, *failed)
    # A job in progress is scheduled for the end of its reservation: until then its worker may still finish it.
    state = State.RETRIES if kind == State.RETRIES or (kind == WORKING and failed[0]) else State.SCHEDULED
    return Arrival(_with_at(job, moment), state, None, *failed)


def format_original(row: Job) -> bytes:
    """Return a job as the original would have written it: its text plus the columns' values."""
    text, state, run_at = row.payload, row.state, row.run_at
    extra_members: list[tuple[str, str]] = []
    members = jsontext.members(text)
    if "created_at" not in members:
        extra_members.append(("created_at", f'"{rfc3339(row.created_at)}"'))
    # The column decides when the job runs; the `at` of the stored text may differ from it.
    if state == State.SCHEDULED and run_at is not None:
        members.pop("at", None)
        text = jsontext.join(members.items())
        extra_members.append(("at", f'"{rfc3339(run_at)}"'))
    if state in (State.ENQUEUED, State.BLOCKED) and row.enqueued_at is not None:
        extra_members.append(("enqueued_at", f'"{rfc3339(row.enqueued_at)}"'))
    if row.failure:
        values = jsontext.members(row.failure)
        if state == State.RETRIES and run_at is not None:
            values["next_at"] = f'"{rfc3339(run_at)}"'
        extra_members.append(("failure", jsontext.join(values.items())))
    return jsontext.append(text, extra_members).encode()


def score_of(moment: datetime) -> float:
    """Return the score as the original computes it: whole seconds plus the fraction."""
    return int(moment.timestamp()) + moment.microsecond * 1000 / 1_000_000_000


def _with_at(job: JobPayload, at: datetime | None) -> JobPayload:
    return msgspec.structs.replace(job, at=at)


def _parse_failure(members: dict[str, str]) -> tuple[int, str, str]:
    raw = members.get("failure", ABSENT)
    if raw == ABSENT:
        return 0, "", ""
    if not raw.startswith("{"):
        raise InvalidPayload("failure: expected an object or null")
    values = jsontext.last_members(raw)
    count = integer(values, "retry_count", default=0, low=0, high=2**31 - 2, within="failure.")
    errtype = cut(string(values.get("errtype", ABSENT)) or "unknown", MAX_ERRTYPE_BYTES)
    # The original numbers retries from 0: after the first failure retry_count is 0. PostgreSQL stores no NUL.
    return count + 1, raw, errtype.replace("\x00", "\ufffd")


def _parse_score(score: float) -> datetime:
    try:
        # A score may be any float, infinity and NaN included.
        return datetime.fromtimestamp(score, UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidPayload(f"expected a time as its score, got {score}") from None
