"""Limit the size of commands and their fields: one table, checked before a command is executed (ADR 0033).

Pure. `docs/reference/command-limits.md` has this table, written by `make docs`. Rules: W7, W13.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import InvalidPayload, UnknownCommand
from ..job_options import MAX_BID, MAX_COMPARED
from ..job_parser import MAX_MEMBERS, MAX_OTHER
from ..json.jsontext import MAX_DEPTH
from ..mutation import MAX_REGEXP, MAX_SEGMENT, MAX_STARS
from ..payloads import (
    MAX_BACKTRACE_LINES,
    MAX_DESC_BYTES,
    MAX_ERRTYPE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME,
    MIN_JID,
)

MAX_HELLO_BYTES = 4 * 1024
# The documented number: a lower one would break clients that use it (ADR 0033).
MAX_FETCH_QUEUES = 1000
MAX_QUEUES = 1000
MAX_JIDS = 20_000
# The jobs of a PUSHB are stored in one transaction (W12). On SQLite all other writers wait for it: 16 µs for each job,
# 130 to 190 µs for one whose key or batch must be looked up.
MAX_BULK_JOBS = 10_000
MAX_LOOKED_UP_JOBS = 2_000

LOOKED_UP = "jobs with `unique_for`, `lock` or a batch"
WIDEST = "part of regexp between two stars, with `?` or `[…]`"
REFUSED, DROPPED, CUT = "refused", "left out", "cut"
CLOSED = "refused, then closed"
ONLY_ITS_JOB = "that job is refused"


class FieldLimit(NamedTuple):
    """Maximum of a field of a verb, and the consequence beyond it. `maximum` 0 means MAX_COMMAND_BYTES."""

    verb: str
    field: str
    maximum: int
    unit: str
    beyond: str = REFUSED

    @property
    def text(self) -> str:
        """The limit with its unit for documentation: `1,000 names`."""
        number = f"{self.maximum:,}" if self.maximum else "`MAX_COMMAND_BYTES`"
        return f"{number} {self.unit}"


# 0 for the verbs with a job or a backtrace. A MUTATE is shorter: its parsed jids take ten times the memory of the line.
_LINES = (
    FieldLimit("HELLO", "line", MAX_HELLO_BYTES, "bytes", CLOSED),
    FieldLimit("END", "line", 1024, "bytes"),
    FieldLimit("INFO", "line", 1024, "bytes"),
    FieldLimit("FLUSH", "line", 1024, "bytes"),
    FieldLimit("ACK", "line", 16 * 1024, "bytes"),
    FieldLimit("BEAT", "line", 16 * 1024, "bytes"),
    FieldLimit("TRACK", "line", 256 * 1024, "bytes"),
    FieldLimit("FETCH", "line", 256 * 1024, "bytes"),
    FieldLimit("QUEUE", "line", 256 * 1024, "bytes"),
    FieldLimit("BATCH", "line", 256 * 1024, "bytes"),
    FieldLimit("PUSH", "line", 0, "bytes", CLOSED),
    FieldLimit("PUSHB", "line", 0, "bytes", CLOSED),
    FieldLimit("FAIL", "line", 0, "bytes", CLOSED),
    FieldLimit("MUTATE", "line", 2 * 1024 * 1024, "bytes"),
)

# A name or jid beyond MAX_NAME cannot exist in the database, so it is the sender's mistake (ADR 0033).
_FIELDS = (
    FieldLimit("HELLO", "wid", MAX_NAME, "printable characters", CLOSED),
    FieldLimit("BEAT", "wid", MAX_NAME, "printable characters"),
    FieldLimit("ACK", "jid", MAX_NAME, "characters"),
    FieldLimit("FAIL", "jid", MAX_NAME, "characters"),
    FieldLimit("FAIL", "errtype", MAX_ERRTYPE_BYTES, "bytes", CUT),
    FieldLimit("FAIL", "message", MAX_MESSAGE_BYTES, "bytes", CUT),
    FieldLimit("FAIL", "backtrace", MAX_BACKTRACE_LINES, "lines", CUT),
    FieldLimit("TRACK GET", "jid", MAX_NAME, "characters"),
    FieldLimit("TRACK SET", "jid", MAX_NAME, "characters"),
    FieldLimit("TRACK SET", "desc", MAX_DESC_BYTES, "bytes", CUT),
    FieldLimit("FETCH", "queues", MAX_FETCH_QUEUES, "names"),
    FieldLimit("FETCH", "queue", MAX_NAME, "of `A-Z a-z 0-9 . _ -`", DROPPED),
    FieldLimit("QUEUE", "queues", MAX_QUEUES, "names"),
    FieldLimit("QUEUE", "queue", MAX_NAME, "of `A-Z a-z 0-9 . _ -`"),
    FieldLimit("BATCH OPEN", "bid", MAX_NAME, "printable characters"),
    FieldLimit("BATCH COMMIT", "bid", MAX_NAME, "printable characters"),
    FieldLimit("BATCH STATUS", "bid", MAX_NAME, "printable characters"),
    FieldLimit("BATCH NEW", "parent_bid", MAX_NAME, "printable characters"),
    FieldLimit("PUSH", "jid", MAX_NAME, f"characters, at least {MIN_JID}, no NUL"),
    FieldLimit("PUSH", "jobtype", MAX_NAME, "characters, at least 1, no NUL"),
    FieldLimit("PUSH", "queue", MAX_NAME, "of `A-Z a-z 0-9 . _ -`"),
    FieldLimit("PUSH", "custom.bid", MAX_BID, "characters"),
    FieldLimit("PUSH", "levels of nested JSON", MAX_DEPTH, "levels"),
    FieldLimit("PUSH", "members", MAX_MEMBERS, "members"),
    FieldLimit("PUSH", "characters besides `args` and `custom`", MAX_OTHER, "characters"),
    FieldLimit("PUSH", "args with `unique_for` or `lock: true`", MAX_COMPARED, "characters"),
    FieldLimit("PUSHB", "each job", 0, "bytes, and as PUSH", ONLY_ITS_JOB),
    FieldLimit("PUSHB", "jobs", MAX_BULK_JOBS, "jobs"),
    FieldLimit("PUSHB", LOOKED_UP, MAX_LOOKED_UP_JOBS, "jobs"),
    FieldLimit("MUTATE", "jids", MAX_JIDS, "jids"),
    FieldLimit("MUTATE", "jid", MAX_NAME, "characters"),
    FieldLimit("MUTATE", "jobtype", MAX_NAME, "characters"),
    FieldLimit("MUTATE", "regexp", MAX_REGEXP, "characters"),
    FieldLimit("MUTATE", "stars of regexp", MAX_STARS, "stars"),
    FieldLimit("MUTATE", WIDEST, MAX_SEGMENT, "characters"),
)

LIMITS = _LINES + _FIELDS
_MAXIMUMS = {(limit.verb, limit.field): limit.maximum for limit in LIMITS}
_LINE_BYTES = {limit.verb.encode(): limit.maximum for limit in _LINES}
ANY_LINE_BYTES = 1024
"""Lowest limit of all verbs. A longer line of an unknown verb is refused before it is decoded."""


def is_too_long(start: bytes, length: int) -> bool:
    """Return whether a line of this length that begins with `start` is refused for its length."""
    # Bytes are checked before the line is decoded. A short line of an unknown verb is refused later.
    maximum = _LINE_BYTES.get(start.partition(b" ")[0])
    return length > ANY_LINE_BYTES and (maximum is None or 0 < maximum < length)


def check_line(start: bytes, length: int) -> None:
    """Refuse a line that is too long for its verb. Raises InvalidPayload or UnknownCommand."""
    if not is_too_long(start, length):
        return
    verb = start.partition(b" ")[0]
    # The same error as for a short line of an unknown verb.
    if verb not in _LINE_BYTES:
        raise UnknownCommand(f"unknown command {verb.decode(errors='replace')}")
    raise InvalidPayload(f"{verb.decode()}: line: expected at most {_LINE_BYTES[verb]} bytes, got {length}")


def check_length(verb: str, field: str, text: str) -> None:
    """Refuse a text that is longer than its field may be. Raises InvalidPayload."""
    maximum = _MAXIMUMS[verb, field]
    if len(text) > maximum:
        raise InvalidPayload(f"invalid {verb}: {field}: expected at most {maximum} characters, got {len(text)}")


def check_name(verb: str, field: str, text: str) -> None:
    """Refuse a name that is too long or has characters that cannot be printed. Raises InvalidPayload."""
    check_length(verb, field, text)
    if not text.isprintable():
        raise InvalidPayload(f"invalid {verb}: {field}: expected printable characters, got {ascii(text)[:60]}")


def check_count(verb: str, field: str, count: int) -> None:
    """Refuse a list with too many items. Raises InvalidPayload."""
    maximum = _MAXIMUMS[verb, field]
    if count > maximum:
        raise InvalidPayload(f"invalid {verb}: {field}: expected at most {maximum}, got {count}")
