"""Values of the specification: priorities, statuses, encoding of inputs and outputs. Pure.

Source: the GearMonkey specification; `docs/gearmonkey.md` decides what it leaves open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from ...core.payloads import FUNCTION

HIGH, NORMAL, LOW, SCHEDULED = "high", "normal", "low", "scheduled"
PRIORITIES = (HIGH, NORMAL, LOW, SCHEDULED)
LISTS = (HIGH, NORMAL, LOW)
"""Priorities with a list, in the order in which workers read them."""

# Set by the specification; the scripts of `lua` repeat it.
JOB_TTL_S = 90_000
"""Seconds for which a job's hash is kept after the job's end: 25 hours."""
MAX_OUTPUT_ERROR_BYTES = 64 * 1024


class Option(StrEnum):
    """Options that change how a client runs a job."""

    BLOCKING = "blocking"
    ROLLCALL = "rollcall"


OPT_BLOCKING = Option.BLOCKING
"""Option of `run`: wait until the job has ended."""
OPT_ROLLCALL = Option.ROLLCALL
"""Option of `run`: create the job only if a worker is there."""


class Status(StrEnum):
    """Status stored in a job's hash; UNKNOWN for any value that the specification does not define."""

    IDLE = "idle"
    BUSY = "busy"
    SUCCESS = "success"
    ERROR = "error"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self in (Status.SUCCESS, Status.ERROR)


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the server stores it. `output` is None until it has ended; bytes are as the peer wrote them."""

    fn: str
    id: int
    status: Status
    input: bytes | None
    output: bytes | None
    dividend: int | None
    divisor: int | None
    raw: Mapping[bytes, bytes] = field(repr=False)

    @property
    def text(self) -> str:
        """The output as text, with invalid UTF-8 replaced."""
        return (self.output or b"").decode("utf-8", "replace")

    def json(self) -> Any:
        """Return the output decoded as JSON. Raises ValueError."""
        return json.loads(self.output or b"null")


def job_of(fn: str, id: int, fields: Mapping[bytes, bytes]) -> Job:
    """Parse a job's hash, whatever a peer wrote there."""
    status = status_of(fields.get(b"status"))
    return Job(
        fn=fn,
        id=id,
        status=status,
        input=fields.get(b"input"),
        output=fields.get(b"output") if status.is_final else None,
        dividend=_parse_whole(fields.get(b"status:dividend")),
        divisor=_parse_whole(fields.get(b"status:divisor")),
        raw=dict(fields),
    )


def status_of(raw: bytes | None) -> Status:
    """Return the status stored in a hash, or UNKNOWN."""
    try:
        return Status((raw or b"").decode())
    except ValueError:  # includes UnicodeDecodeError
        # A peer may have written anything there; reading a job must not fail for it.
        return Status.UNKNOWN


def function_name(name: object) -> str:
    """Check a function's name. Raises ValueError."""
    if not isinstance(name, str) or not re.fullmatch(FUNCTION, name):
        raise ValueError(
            f"function: expected 1 to 100 characters of letters, digits and _ . - {{ }}, got {name!r:.120}"
        )
    return name


def priority(name: object) -> str:
    """Check a priority. Raises ValueError."""
    if name not in PRIORITIES:
        raise ValueError(f"prio: expected one of {', '.join(PRIORITIES)}, got {name!r:.80}")
    return str(name)


def encode(value: Any) -> bytes:
    """Encode an input or output: bytes unchanged, text as UTF-8, any other value as JSON.

    Raises TypeError or ValueError for values that JSON cannot express.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    # allow_nan=False: NaN is no JSON, and peers in other languages could not read it.
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode()


def seconds(name: str, value: object) -> int:
    """Return a moment, a number or an aware datetime, as whole seconds since 1970.

    Raises ValueError for a moment before 1970 and for a naive datetime.
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{name}: expected an aware datetime, got {value!r}")
        value = value.timestamp()
    # Redis stores the moment as a score, a double: integers above 2^53 would be rounded.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise ValueError(f"{name}: expected seconds since 1970, or an aware datetime, got {value!r:.80}")
    return int(value)


def error_text(error: BaseException) -> bytes:
    """Return the output of a failed job: type and message of the error, no traceback."""
    text = f"{type(error).__name__}: {error}"
    # A cut in the middle of a character would leave invalid UTF-8: drop the incomplete one.
    return text.encode("utf-8", "replace")[:MAX_OUTPUT_ERROR_BYTES].decode("utf-8", "ignore").encode()


def progress(dividend: object, divisor: object) -> tuple[int, int]:
    """Check the progress of a job. Raises ValueError."""
    are_whole = all(isinstance(part, int) and not isinstance(part, bool) for part in (dividend, divisor))
    if not are_whole or not 0 <= dividend <= divisor or divisor == 0:  # type: ignore[operator]  # ints, as checked
        raise ValueError(
            f"update: expected whole numbers, 0 to divisor of divisor above 0, got {dividend!r} of {divisor!r}"
        )
    return dividend, divisor  # type: ignore[return-value]


def _parse_whole(raw: bytes | None) -> int | None:
    try:
        return None if raw is None else int(raw)
    except ValueError:
        return None
