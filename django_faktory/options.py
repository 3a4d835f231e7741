"""What a job asks for beyond the ordinary, by its `custom`: to be the only one, to expire, to be tracked (W27).

Pure. Semantics: docs/job-options.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from . import jsonsteps, jsontext
from .errors import InvalidPayload
from .jsonfields import ABSENT, instant, later, seconds, shown, string
from .jsonsteps import Steps
from .queries import is_about

SEALED, SAME = "$encrypted", "same"
"""The members of the envelope of encrypted arguments: what they are, and a mark that equal ones have in common."""

TRACKED_FOR_S = 1800
"""How long after its end a tracked job tells of itself."""

_WITHIN = "custom."
MAX_BID = 255
_KEYS = frozenset({"unique_for", "expires_at", "expires_in", "bid", "lock", "limit", "about"})
MAX_LOCK_KEY = 255
MAX_COMPARED = 10_000
"""Members of objects within each other in arguments that are compared: they are sorted, and kept until then."""

COMPARED_AT_ONCE = 1000
"""Characters of arguments that are compared without steps: they take less than a millisecond."""


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a job asks for beyond the ordinary. Jobs that ask for nothing have none.

    Durations are seconds; what counts from PUSH is added up by the store, whose clock it is.
    """

    unique_key: str | None = None
    """64 hex digits: the same for the same task, arguments and queue. None: as many as there are."""
    unique_for: float = 0
    unique_until_start: bool = False
    """Whether the lock ends when a worker takes the job, not when the job succeeds."""
    expires_at: datetime | None = None
    expires_in: float | None = None
    """Counts from PUSH, or from `at` where that comes later; of two ends the earlier one holds."""
    lock_key: str | None = None
    """Of the jobs with one key one runs at a time. None: it takes part in no lock."""
    limit_key: str | None = None
    """The key whose limit it is under. None: that of its queue and task alone."""
    bid: str | None = None
    """The batch it is to be a member of."""
    about: str | None = None
    """The object it is about, as `app.model/pk`."""
    by: str = ""
    """The wid of who pushes it: once a batch is committed, only its own jobs may add to it."""

    @property
    def is_apart(self) -> bool:
        """Whether its push may have to wait for another transaction: one that has just taken its key, or changes its
        batch."""
        return self.unique_key is not None or self.bid is not None

    def lock_ends(self, begins: datetime) -> datetime | None:
        """When the lock is over whatever happens, for a job that may run from `begins` on."""
        return later(begins, self.unique_for) if self.unique_key else None

    def expiry(self, begins: datetime) -> datetime | None:
        """When the job is over unless it was taken before."""
        ends = self.expires_at, None if self.expires_in is None else later(begins, self.expires_in)
        return min((end for end in ends if end), default=None)


def read_options(jobtype: str, queue: str, args: str, custom: Mapping[str, str]) -> JobOptions | None:
    """The options in a job's `custom`, given as raw texts; None for the ordinary job, which has none.

    `args` is JSON. Raises InvalidPayload naming the field.
    """
    if _KEYS.isdisjoint(custom):
        return None
    return jsonsteps.run(read_options_in_steps(jobtype, queue, args, custom))


def takes_long(args: str, custom: Mapping[str, str]) -> bool:
    """Whether the options are to be read in steps: long arguments are compared with those of other jobs."""
    size = len(args) + len(custom.get("kwargs", ""))
    return size > COMPARED_AT_ONCE and ("unique_for" in custom or "lock" in custom)


def read_options_in_steps(jobtype: str, queue: str, args: str, custom: Mapping[str, str]) -> Steps[JobOptions | None]:
    """The same in steps of about a millisecond."""
    unique_for = seconds(custom, "unique_for", within=_WITHIN)
    expires_at = instant(custom, "expires_at", within=_WITHIN)
    expires_in = seconds(custom, "expires_in", within=_WITHIN)
    bid, about = _bid(custom), _about(custom)
    locked_by = yield from _lock_key(jobtype, args, custom)
    limited_by = _limit_key(custom)
    if (unique_for, expires_at, expires_in, bid, locked_by, limited_by, about) == (None,) * 7:
        return None
    key = None
    if unique_for is not None:
        key = yield from _unique_key(jobtype, queue, args, custom.get("kwargs", ABSENT))
    return JobOptions(
        unique_key=key,
        unique_for=unique_for or 0,
        unique_until_start=unique_for is not None and _is_until_start(custom),
        expires_at=expires_at,
        expires_in=expires_in,
        lock_key=locked_by,
        limit_key=limited_by,
        bid=bid,
        about=about,
    )


def _bid(custom: Mapping[str, str]) -> str | None:
    raw = custom.get("bid", ABSENT)
    if raw in (ABSENT, '""'):
        return None
    bid = string(raw)
    if bid is None or len(bid) > MAX_BID:
        raise InvalidPayload(
            f"{_WITHIN}bid: expected the id of a batch, at most {MAX_BID} characters, got {shown(raw)}"
        )
    return bid


def _about(custom: Mapping[str, str]) -> str | None:
    """The object's name. Other things under this key are their client's own: they are kept, and mean nothing here."""
    about = string(custom.get("about", ABSENT))
    return about if about is not None and is_about(about) else None


def _lock_key(jobtype: str, args: str, custom: Mapping[str, str]) -> Steps[str | None]:
    raw = custom.get("lock", ABSENT)
    if raw in (ABSENT, "false"):
        return None
    if raw == "true":
        return (yield from _default_lock_key(jobtype, args, custom.get("kwargs", ABSENT)))
    key = string(raw)
    try:
        return lock_key(key)
    except ValueError:
        raise InvalidPayload(f"{_WITHIN}lock: expected a key, true or false, got {shown(raw)}") from None


def _limit_key(custom: Mapping[str, str]) -> str | None:
    raw = custom.get("limit", ABSENT)
    if raw in (ABSENT, "null", "false"):
        return None
    try:
        return limit_key(string(raw))
    except ValueError:
        raise InvalidPayload(f"{_WITHIN}limit: expected a key, got {shown(raw)}") from None


def limit_key(key: object) -> str:
    """The key as it is kept: a long one by its hash, behind the name of its kind. Raises ValueError for none."""
    kept = lock_key(key)
    kind, colon, _ = str(key).partition(":")
    if kept == key or not colon:
        return kept
    named = f"{kind}:{kept}"
    return named if len(named.encode()) <= MAX_LOCK_KEY else kept


def lock_key(key: object) -> str:
    """The key as it is kept: a long one by its hash. Raises ValueError for what can be none."""
    if not isinstance(key, str) or not key or "\x00" in key:
        raise ValueError("expected a string of one character or more, without NUL")
    raw = key.encode()  # UnicodeEncodeError is a ValueError
    return key if len(raw) <= MAX_LOCK_KEY else f"sha256:{hashlib.sha256(raw).hexdigest()}"


def default_lock_key(jobtype: str, args: str, kwargs: str = ABSENT) -> str:
    """The same for the same jobtype and arguments, in whatever queue. Raises InvalidPayload, see `_digest`."""
    return jsonsteps.run(_default_lock_key(jobtype, args, kwargs))


def _default_lock_key(jobtype: str, args: str, kwargs: str) -> Steps[str]:
    named = [] if kwargs in (ABSENT, "{}") else [kwargs]
    digest = yield from _digest(jsontext.encode(jobtype), [(yield from _identity(args)), *named])
    return f"locket:job_locks:{digest}"


def kept_for(custom: Mapping[str, str], result_ttl: int | None) -> int | None:
    """Seconds the row stays after its end: a tracked job's tells for a while how it ended."""
    if custom.get("track", ABSENT) in (ABSENT, "false", "0", '""'):
        return result_ttl
    return max(result_ttl or 0, TRACKED_FOR_S)


def unique_key(jobtype: str, queue: str, args: str, kwargs: str = ABSENT) -> str:
    """The same for the same JSON values, however they are spaced, escaped or ordered by key; 1 and 1.0 differ.

    A Django task's keyword arguments count as arguments: they have no other place.
    """
    return jsonsteps.run(_unique_key(jobtype, queue, args, kwargs))


def _unique_key(jobtype: str, queue: str, args: str, kwargs: str) -> Steps[str]:
    named = "" if kwargs in (ABSENT, "{}") else kwargs
    head = f"{jsontext.encode(jobtype)},{jsontext.encode(queue)}"
    return (yield from _digest(head, [(yield from _identity(args)), named]))


def _digest(head: str, values: Sequence[str]) -> Steps[str]:
    """SHA-256 of a text and JSON values in one spelling, joined by commas. Nothing but an object is kept whole.

    Raises InvalidPayload for more than MAX_COMPARED members of objects within each other.
    """
    digest, written = hashlib.sha256(head.encode()), bytearray()
    for value in values:
        digest.update(b",")
        try:
            for _ in jsonsteps.canonical(value, written, most=MAX_COMPARED) if value else ():
                digest.update(written)
                written.clear()
                yield
        except InvalidPayload as error:
            raise InvalidPayload(
                f"args: {error}, as custom.unique_for, and a lock without a key of its own, compare them; got more"
            ) from None
        digest.update(written)
        written.clear()
    return digest.hexdigest()


def _is_until_start(custom: Mapping[str, str]) -> bool:
    raw = custom.get("unique_until", ABSENT)
    if raw == ABSENT:
        return False
    until = string(raw)
    if until not in ("success", "start"):
        raise InvalidPayload(f'{_WITHIN}unique_until: expected "success" or "start", got {shown(raw)}')
    return until == "start"


def _identity(args: str) -> Steps[str]:
    """What arguments are compared by: of an envelope, the mark that equal ones have in common."""
    if SEALED not in args:
        return args
    found: list[str] = []
    for part in jsonsteps.cut(args, "[]"):
        if part is None:
            yield
        elif found or not part.lstrip().startswith("{"):
            return args
        else:
            found.append(part)
    if not found:
        return args
    members = yield from jsonsteps.members(found[0], most=MAX_COMPARED, refuses_twice=False)
    mark = string(members.get("same", ABSENT))
    return args if mark is None else jsontext.encode([mark])


def canonical(text: str) -> str:
    """JSON in one spelling: the same for the same values, however they are spaced, escaped or ordered by key."""
    written = bytearray()
    jsonsteps.run(jsonsteps.canonical(text, written))
    return written.decode()
