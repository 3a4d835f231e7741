"""Parse and write TRACK SET and TRACK GET.

`parse_track` parses a command; `format_tracked` and `parse_tracked` write and read the reply to GET. Checks shape only.
Rules: W5, W27.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InvalidPayload
from ..json import jsontext
from ..json.fields import abbreviate
from ..payloads import MAX_DESC_BYTES, Tracked, TrackUpdate, cut, parse_instant, rfc3339
from .fields import field, format_line, parse_object
from .limits import check_length


class TrackSet(msgspec.Struct, frozen=True):
    """TRACK SET: report the progress of a job, and extend its reservation."""

    update: TrackUpdate

    def line(self) -> bytes:
        """Return the line that a client sends."""
        update = self.update
        reserve_until = update.reserve_until and rfc3339(update.reserve_until)
        members = {"jid": update.jid, "percent": update.percent, "desc": update.desc, "reserve_until": reserve_until}
        return format_line(
            "TRACK", f"SET {jsontext.encode({key: value for key, value in members.items() if value is not None})}"
        )


class TrackGet(msgspec.Struct, frozen=True):
    """TRACK GET: ask for the state and progress of a job."""

    jid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("TRACK", f"GET {self.jid}")


TrackingCommand = TrackSet | TrackGet


def parse_track(text: str) -> TrackingCommand:
    """Parse the text after TRACK: a sub-verb in any case, then an object or a jid. Raises InvalidPayload."""
    verb, _, arguments = text.strip().partition(" ")
    match verb.upper():
        case "SET":
            return TrackSet(_parse_update(arguments))
        case "GET" if arguments.strip():
            check_length("TRACK GET", "jid", arguments.strip())
            return TrackGet(arguments.strip())
        case "GET":
            raise InvalidPayload("invalid TRACK GET: expected the jid of a job")
    raise InvalidPayload(f"invalid TRACK: expected SET {{…}} or GET jid, got {abbreviate(verb) or 'nothing'}")


def format_tracked(tracked: Tracked) -> str:
    """Return the JSON of the reply to TRACK GET; percent and desc only if they are known."""
    members: dict[str, Any] = {"jid": tracked.jid, "percent": tracked.percent, "desc": tracked.desc}
    members = {key: value for key, value in members.items() if value is not None}
    updated_at = "" if tracked.updated_at is None else rfc3339(tracked.updated_at)
    # A job that is not tracked has a state only: it is known here, unlike in the original server.
    return jsontext.encode(members | {"state": tracked.state, "updated_at": updated_at})


def parse_tracked(members: dict[str, Any]) -> Tracked:
    """Parse the reply to TRACK GET of any server; missing members get defaults."""
    updated_at = field("TRACK", members, "updated_at", str, "")
    return Tracked(
        jid=field("TRACK", members, "jid", str, ""),
        percent=field("TRACK", members, "percent", int, None),
        desc=field("TRACK", members, "desc", str, None),
        state=field("TRACK", members, "state", str, "unknown"),
        updated_at=parse_instant("updated_at", updated_at) if updated_at else None,
    )


def _parse_update(text: str) -> TrackUpdate:
    members = parse_object("TRACK SET", text)
    jid = field("TRACK SET", members, "jid", str, "")
    if not jid:
        raise InvalidPayload("invalid TRACK SET: jid: expected the jid of a job")
    check_length("TRACK SET", "jid", jid)
    # None means that the member is absent and keeps the stored value.
    percent = field("TRACK SET", members, "percent", int, None)
    if percent is not None and not 0 <= percent <= 100:
        raise InvalidPayload(f"invalid TRACK SET: percent: expected an integer from 0 to 100, got {str(percent)[:20]}")
    desc = field("TRACK SET", members, "desc", str, None)
    reserve_until = field("TRACK SET", members, "reserve_until", str, None)
    return TrackUpdate(
        jid=jid,
        percent=percent,
        # PostgreSQL cannot store NUL in a text column.
        desc=None if desc is None else cut(desc.replace("\x00", "\ufffd"), MAX_DESC_BYTES),
        reserve_until=None if reserve_until is None else parse_instant("reserve_until", reserve_until),
    )


VERBS = {"TRACK": parse_track}
