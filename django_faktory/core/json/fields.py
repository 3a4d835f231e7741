"""Convert one member of a job's JSON from raw text to a value.

Raises InvalidPayload, which names the field and the rule. Pure. Source: W9. Numbers keep every digit until they are
known to be in range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from ...errors import InvalidPayload
from . import jsontext

_rfc3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)")
_epoch = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, tzinfo=UTC)
# At most 4,000 digits: int() of a longer text raises ValueError (limit 4,300), and its cost grows quadratically.
_integer = re.compile(r"-?\d{1,4000}", re.ASCII)
_number = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
LONGEST_S = 100.0 * 365 * 86_400
"""Longest duration in seconds, a century; longer ones are reduced to it."""

ABSENT = "null"
"""JSON text that is treated like a missing member."""


def integer(
    members: Mapping[str, str],
    field: str,
    *,
    default: int,
    low: int | None = None,
    high: int | None = None,
    within: str = "",
) -> int:
    """Return the integer in `field`, or `default` if it is absent or null. Raises InvalidPayload."""
    raw = members.get(field, ABSENT)
    if raw == ABSENT:
        return default
    if _integer.fullmatch(raw):
        number = int(raw)
        if (low is None or number >= low) and (high is None or number <= high):
            return number
    span = f" from {low} to {high}" if low is not None else ""
    raise InvalidPayload(f"{within}{field}: expected an integer{span}, got {abbreviate(raw)}")


def seconds(members: Mapping[str, str], field: str, *, within: str = "") -> float | None:
    """Return the number of seconds above 0 in `field`; None if it is absent or null. Raises InvalidPayload."""
    raw = members.get(field, ABSENT)
    if raw == ABSENT:
        return None
    # float() also accepts "nan", "inf" and "1_000", so the syntax of JSON numbers is checked first.
    if _number.fullmatch(raw):
        number = float(raw)
        if number > 0:
            return min(number, LONGEST_S)
    raise InvalidPayload(f"{within}{field}: expected a number of seconds above 0, got {abbreviate(raw)}")


def instant(members: Mapping[str, str], field: str, *, within: str = "") -> datetime | None:
    """Return the time in `field`; None if it is absent or null. Raises InvalidPayload."""
    raw = members.get(field, ABSENT)
    if raw == ABSENT:
        return None
    value = string(raw)
    if value is None:
        raise InvalidPayload(
            f"invalid timestamp for '{within}{field}': expected an RFC 3339 string, got {abbreviate(raw)}"
        )
    return parse_instant(within + field, value)


def string(raw: str) -> str | None:
    """Return the decoded string; None if the raw text is another JSON type."""
    if not raw.startswith('"'):
        return None
    if "\\" not in raw:  # fast path: no escapes to decode
        return raw[1:-1]
    value = jsontext.decode(raw)
    return value if isinstance(value, str) else None


def rfc3339(moment: datetime) -> str:
    """Format as UTC with microseconds and a Z; trailing zeros are trimmed as in the original server."""
    text = (moment if moment.tzinfo is UTC else moment.astimezone(UTC)).isoformat()[: -len("+00:00")]
    return f"{text.rstrip('0') if moment.microsecond else text}Z"


def parse_instant(field: str, value: str) -> datetime:
    """Parse RFC 3339 with an offset; fractions below a microsecond are cut. Raises InvalidPayload.

    Times before 1970 become 1970.
    """
    # fromisoformat() also accepts other forms of ISO 8601, such as week dates, so the expression comes first.
    if _rfc3339.fullmatch(value):
        try:
            return max(datetime.fromisoformat(value.upper()).astimezone(UTC), _epoch)
        # An impossible date such as February 30, or a time that the offset moves out of the calendar.
        except (ValueError, OverflowError):
            pass
    raise InvalidPayload(
        f"invalid timestamp for '{field}': {quote_abbreviated(value)}: expected RFC 3339, such as 2026-11-21T14:05:00Z"
    )


def later(moment: datetime, seconds: float) -> datetime:
    """Return `moment` plus `seconds`, limited to the end of the calendar."""
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return LAST


def abbreviate(raw: str) -> str:
    """Return the raw value in printable ASCII, short enough for a one-line error message."""
    if raw == ABSENT:
        return "null or nothing"
    return ascii(raw)[1:-1] if len(raw) <= 60 else f"{ascii(raw[:57])[1:-1]}…"


def quote_abbreviated(value: str) -> str:
    """Return `abbreviate(value)` in double quotes, as in the error messages of the original server."""
    return f'"{abbreviate(value)}"'
