"""Parse and write TRACK SET and TRACK GET. Checks shape only. Rules: W5, W27."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InvalidPayload
from ..json import jsontext
from ..json.fields import shown
from ..payloads import MAX_DESC_BYTES, Tracked, TrackUpdate, cut, parse_instant, rfc3339
from .fields import field, line, parse_object
from .limits import check_length


class TrackSet(msgspec.Struct, frozen=True):
    """TRACK SET: report the progress of a job, and extend its reservation."""

    update: TrackUpdate

    def line(self) -> bytes:
        """Return the line that a client sends."""
        one = self.update
        until = one.reserve_until and rfc3339(one.reserve_until)
        members = {"jid": one.jid, "percent": one.percent, "desc": one.desc, "reserve_until": until}
        return line(
            "TRACK", f"SET {jsontext.encode({key: value for key, value in members.items() if value is not None})}"
        )


class TrackGet(msgspec.Struct, frozen=True):
    """TRACK GET: ask for the state and progress of a job."""

    jid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return line("TRACK", f"GET {self.jid}")


TrackingCommand = TrackSet | TrackGet


def parse_track(text: str) -> TrackingCommand:
    """Parse the text after TRACK: a sub-verb in any case, then an object or a jid. Raises InvalidPayload."""
    verb, _, rest = text.strip().partition(" ")
    match verb.upper():
        case "SET":
            return TrackSet(_update(rest))
        case "GET" if rest.strip():
            check_length("TRACK GET", "jid", rest.strip())
            return TrackGet(rest.strip())
        case "GET":
            raise InvalidPayload("invalid TRACK GET: expected the jid of a job")
    raise InvalidPayload(f"invalid TRACK: expected SET {{…}} or GET jid, got {shown(verb) or 'nothing'}")


def format_tracked(tracked: Tracked) -> str:
    """Return the JSON of the reply to TRACK GET; percent and desc only if they are known."""
    members: dict[str, Any] = {"jid": tracked.jid, "percent": tracked.percent, "desc": tracked.desc}
    members = {key: value for key, value in members.items() if value is not None}
    updated_at = "" if tracked.updated_at is None else rfc3339(tracked.updated_at)
    return jsontext.encode(members | {"state": tracked.state, "updated_at": updated_at})


def parse_tracked(found: dict[str, Any]) -> Tracked:
    """Parse the reply to TRACK GET of any server; missing members get defaults."""
    updated_at = field("TRACK", found, "updated_at", str, "")
    return Tracked(
        jid=field("TRACK", found, "jid", str, ""),
        percent=field("TRACK", found, "percent", int, None),
        desc=field("TRACK", found, "desc", str, None),
        state=field("TRACK", found, "state", str, "unknown"),
        updated_at=parse_instant("updated_at", updated_at) if updated_at else None,
    )


def _update(text: str) -> TrackUpdate:
    found = parse_object("TRACK SET", text)
    jid = field("TRACK SET", found, "jid", str, "")
    if not jid:
        raise InvalidPayload("invalid TRACK SET: jid: expected the jid of a job")
    check_length("TRACK SET", "jid", jid)
    # None means that the member is absent and keeps the stored value.
    percent = field("TRACK SET", found, "percent", int, None)
    if percent is not None and not 0 <= percent <= 100:
        raise InvalidPayload(f"invalid TRACK SET: percent: expected an integer from 0 to 100, got {str(percent)[:20]}")
    desc = field("TRACK SET", found, "desc", str, None)
    until = field("TRACK SET", found, "reserve_until", str, None)
    return TrackUpdate(
        jid=jid,
        percent=percent,
        # PostgreSQL cannot store NUL in a text column.
        desc=None if desc is None else cut(desc.replace("\x00", "\ufffd"), MAX_DESC_BYTES),
        reserve_until=None if until is None else parse_instant("reserve_until", until),
    )


VERBS = {"TRACK": parse_track}
