"""Decode the replies of a Faktory server, the original included.

`parse_reservation` reads a job, `parse_state` the reply to BEAT; error replies become exceptions of this package.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from typing import Any

from ...errors import (
    BrokerUnavailable,
    CommandRefused,
    FaktoryError,
    InvalidPayload,
    JobNotFound,
    NotUnique,
    ProtocolError,
    UnknownBatch,
    UnknownWorker,
)
from ..json import jsontext
from ..payloads import DEFAULT_QUEUE, DEFAULT_RESERVE_FOR, Reservation, parse_instant
from .resp import BulkString, Error, Reply, Simple

_PERMANENT = re.compile(
    r"invalid (JSON|HELLO|PUSHB?|FETCH|ACK|FAIL|BEAT|MUTATE|TRACK|BATCH|FLUSH|payload|format|target|timestamp)\b"
    r"|malformed|command too long|missing JID|job not found|jobs must have |jobs cannot be |must call fetch "
    r"|unknown (command|mutate|worker)\b|no such (batch|queue)\b|batch \S+: |(batch|tracking) subsystem is only "
    r"|QUEUE LATENCY does not|FLUSH is disabled|.*(\bexpected\b|queue names must match|the job was not stored)",
    re.IGNORECASE,
)
"""Beginnings of the errors by which a server, the original or ours, refuses a command for good. Errors of its Redis,
such as MISCONF and LOADING, have no list that is complete, so any other text counts as temporary."""


def refusal_of(message: str, code: str = "ERR") -> FaktoryError:
    """Return CommandRefused if the command is surely refused for good, else BrokerUnavailable: it may be repeated."""
    if code == NotUnique.code or _PERMANENT.match(message):
        return CommandRefused(message, code=code)
    return BrokerUnavailable(f"the Faktory server answered {code} {message}")


def parse_refusal(reply: Reply) -> FaktoryError | None:
    """Return the error of a reply (see `refusal_of`), or None if it is no error."""
    return refusal_of(reply.message, reply.code) if isinstance(reply, Error) else None


def check_ok(reply: Reply) -> None:
    """Raise ProtocolError for a reply that is neither OK nor an error: nothing says that the command took effect."""
    if reply != Simple("OK") and not isinstance(reply, Error):
        raise ProtocolError(f"expected OK, got {_describe(reply)}")


def translate_batch_refusal(refusal: FaktoryError, bid: str) -> FaktoryError:
    """Return UnknownBatch if the server's message says so, else the refusal itself."""
    unknown = str(refusal).lower().startswith("no such batch")  # the original's spelling has changed once
    return UnknownBatch(bid) if unknown else refusal


def parse_bulk_refusal(text: str, jid: str) -> FaktoryError:
    """Return the error for one job from the text in PUSHB's reply."""
    return NotUnique(jid) if text.startswith(NotUnique.code) else refusal_of(text)


def parse_bulk(reply: Reply) -> str | None:
    """Return the text of a bulk reply. Raises the error of `refusal_of`, or ProtocolError for another kind."""
    if refusal := parse_refusal(reply):
        raise refusal
    if not isinstance(reply, BulkString):
        raise ProtocolError(f"expected a bulk reply, got {_describe(reply)}")
    return reply.text


def parse_bid(reply: Reply) -> str:
    """Return the bid in the reply to BATCH NEW or OPEN. Raises the same errors as `parse_bulk`."""
    if bid := parse_bulk(reply):
        return bid
    raise ProtocolError(f"expected the id of a batch, got {_describe(reply)}")


def parse_object_reply(reply: Reply) -> dict[str, Any]:
    """Return the JSON object of a bulk reply. Raises the same errors as `parse_bulk`."""
    text = parse_bulk(reply)
    with suppress(InvalidPayload):
        members = jsontext.decode(text or "null")
        if isinstance(members, dict):
            return members
    raise ProtocolError(f"expected a JSON object in the reply, got {_describe(reply)}")


def _describe(reply: Reply) -> str:
    if isinstance(reply, BulkString):
        return "null" if reply.text is None else ascii(reply.text)[:80]
    return ascii(reply.text if isinstance(reply, Simple) else reply.message)[:80]


def parse_fail(reply: Reply, jid: str) -> FaktoryError | bool:
    """Return the answer to FAIL: True, JobNotFound or the error of `refusal_of`."""
    if isinstance(reply, Error) and reply.message.startswith("Job not found"):
        return JobNotFound(jid)
    return parse_refusal(reply) or True


def parse_state(reply: Reply, wid: str) -> FaktoryError | str:
    """Return the answer to BEAT: "", the state to enter, or an error."""
    if isinstance(reply, Error):
        unknown = reply.message.lower().startswith("unknown worker")  # the original's spelling has changed once
        return UnknownWorker(wid) if unknown else refusal_of(reply.message, reply.code)
    if isinstance(reply, Simple) and reply.text == "OK":
        return ""
    try:
        parsed = jsontext.decode(reply.text or "{}")  # real servers send a bulk string, the specification a simple one
    except InvalidPayload as error:
        return ProtocolError(f"expected a state in the reply to BEAT: {error}")
    return str(parsed.get("state", "")) if isinstance(parsed, dict) else ""


def parse_reservation(text: str, wid: str) -> Reservation:
    """Decode a job from FETCH's reply; invalid optional members get defaults.

    The server has already reserved the job, and an exception here would lose it until its reservation expires.
    `attempt` is derived from the failure count; it does not fence reports, because the server fences by wid.
    """
    try:
        members = jsontext.members(text)
    except InvalidPayload as error:
        raise ProtocolError(f"expected a job in the reply to FETCH: {error}") from error
    jid, queue, seconds = (_decode_member(members, name) for name in ("jid", "queue", "reserve_for"))
    if not isinstance(jid, str):
        raise ProtocolError("expected a job with a jid in the reply to FETCH")
    failure = _decode_member(members, "failure")
    retry_count = failure.get("retry_count") if isinstance(failure, dict) else None
    # `retry_count` is 0 after the first failure, so the run after it is attempt 2.
    return Reservation(
        jid=jid,
        queue=queue if isinstance(queue, str) else DEFAULT_QUEUE,
        text=text,
        wid=wid,
        attempt=retry_count + 2 if isinstance(retry_count, int) else 1,
        created_at=_parse_instant_or_none("created_at", _decode_member(members, "created_at")),
        failure=members["failure"] if isinstance(failure, dict) else "",
        reserve_for=seconds if isinstance(seconds, int) and seconds > 0 else DEFAULT_RESERVE_FOR,
    )


def _decode_member(members: dict[str, str], name: str) -> Any:
    with suppress(InvalidPayload):
        return jsontext.decode(members.get(name, "null"))
    return None


def _parse_instant_or_none(field: str, value: object) -> datetime | None:
    with suppress(InvalidPayload):
        return parse_instant(field, value) if isinstance(value, str) else None
    return None
