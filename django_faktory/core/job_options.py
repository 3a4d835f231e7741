"""Job options that clients set in `custom`: uniqueness, locks, limits, expiry, tracking, batches (W27).

Pure. Semantics: docs/job-options.md. `read_options` parses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime

import msgspec

from ..errors import InvalidPayload
from .json import jsontext
from .json.fields import ABSENT, abbreviate, instant, later, seconds, string
from .queries import is_about

SEALED, SAME = "$encrypted", "same"
"""Members of the envelope of encrypted arguments: the token, and the fingerprint that equal arguments share."""

TRACKED_FOR_S = 1800
"""Seconds after its end for which the progress of a tracked job is kept."""

_WITHIN = "custom."
MAX_BID = 255
_KEYS = frozenset({"unique_for", "expires_at", "expires_in", "bid", "lock", "limit", "about", "signals"})
MAX_LOCK_KEY = 255
MAX_COMPARED = 64 * 1024
"""Maximum characters of compared arguments: comparing them takes up to 30 ms, in which no other client is served."""

READ_KEYS = (*sorted(_KEYS), "unique_until", "kwargs", "track", "result_ttl")
"""Members of `custom` that the functions here and the parser of jobs read."""


class _Envelope(msgspec.Struct):
    """The only argument of a job with encrypted arguments. Other members are ignored."""

    same: str


_sealed_decoder = msgspec.json.Decoder(tuple[_Envelope])


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Options of a job. A job without options has no JobOptions.

    Durations are seconds; the store counts them from PUSH by its own clock.
    """

    unique_key: str | None = None
    """64 hex digits, equal for the same task, arguments and queue. None: not unique."""
    unique_for: float = 0
    unique_until_start: bool = False
    """True if the uniqueness ends when a worker takes the job, not when the job succeeds."""
    expires_at: datetime | None = None
    expires_in: float | None = None
    """Counts from PUSH, or from `at` if that is later; the earlier of two expiry times applies."""
    lock_key: str | None = None
    """Jobs with the same key run one at a time. None: no lock."""
    limit_key: str | None = None
    """Key of the limit that applies to the job. None: only the limits of its queue and task."""
    bid: str | None = None
    """Batch that the job joins."""
    about: str | None = None
    """Object that the job is about, as `app.model/pk`."""
    caller_wid: str = ""
    """Wid of the pushing worker: once a batch is committed, only its own running jobs may add to it."""
    signals: str | None = None
    """The job to which this is a signal: nothing else is stored (ADR 0052)."""

    @property
    def may_block(self) -> bool:
        """True if its push may have to wait for another transaction.

        That transaction has just taken the same unique key, or changes the same batch.
        """
        return (self.unique_key or self.bid or self.signals) is not None

    def unique_ends(self, begins: datetime) -> datetime | None:
        """Return when the uniqueness ends at the latest, for a job that may run from `begins` on."""
        return later(begins, self.unique_for) if self.unique_key else None

    def expiry(self, begins: datetime) -> datetime | None:
        """Return when the job expires unless a worker took it before."""
        ends = self.expires_at, None if self.expires_in is None else later(begins, self.expires_in)
        return min((end for end in ends if end), default=None)


def read_options(jobtype: str, queue: str, args: str, custom: Mapping[str, str]) -> JobOptions | None:
    """Parse the options in a job's `custom`, given as raw JSON texts; None for a job without options.

    `args` is JSON. Raises InvalidPayload with the name of the field.
    """
    # Fast path: most jobs have no options.
    if _KEYS.isdisjoint(custom):
        return None
    unique_for = seconds(custom, "unique_for", within=_WITHIN)
    expires_at = instant(custom, "expires_at", within=_WITHIN)
    expires_in = seconds(custom, "expires_in", within=_WITHIN)
    bid, about = _read_bid(custom), _read_about(custom)
    lock = _read_lock_key(jobtype, args, custom)
    limit = _read_limit_key(custom)
    # A key may be present without an option, for example `"lock": false`.
    signals = string(custom.get("signals", ABSENT))
    if (unique_for, expires_at, expires_in, bid, lock, limit, about, signals) == (None,) * 8:
        return None
    key = None
    if unique_for is not None:
        key = unique_key(jobtype, queue, args, custom.get("kwargs", ABSENT))
    return JobOptions(
        unique_key=key,
        unique_for=unique_for or 0,
        unique_until_start=unique_for is not None and _is_until_start(custom),
        expires_at=expires_at,
        expires_in=expires_in,
        lock_key=lock,
        limit_key=limit,
        bid=bid,
        about=about,
        signals=signals,
    )


def _read_bid(custom: Mapping[str, str]) -> str | None:
    raw = custom.get("bid", ABSENT)
    if raw in (ABSENT, '""'):
        return None
    bid = string(raw)
    if bid is None or len(bid) > MAX_BID:
        raise InvalidPayload(
            f"{_WITHIN}bid: expected the id of a batch, at most {MAX_BID} characters, got {abbreviate(raw)}"
        )
    return bid


def _read_about(custom: Mapping[str, str]) -> str | None:
    """Return the object's name. Clients may use this key for other values: these are kept and ignored here."""
    about = string(custom.get("about", ABSENT))
    return about if about is not None and is_about(about) else None


def _read_lock_key(jobtype: str, args: str, custom: Mapping[str, str]) -> str | None:
    raw = custom.get("lock", ABSENT)
    # `false` also opts out of LOCKET, whatever the settings say for the queue (docs/locks.md).
    if raw in (ABSENT, "false"):
        return None
    if raw == "true":
        return default_lock_key(jobtype, args, custom.get("kwargs", ABSENT))
    key = string(raw)
    try:
        return lock_key(key)
    except ValueError:
        raise InvalidPayload(f"{_WITHIN}lock: expected a key, true or false, got {abbreviate(raw)}") from None


def _read_limit_key(custom: Mapping[str, str]) -> str | None:
    raw = custom.get("limit", ABSENT)
    if raw in (ABSENT, "false"):
        return None
    try:
        return limit_key(string(raw))
    except ValueError:
        raise InvalidPayload(f"{_WITHIN}limit: expected a key, got {abbreviate(raw)}") from None


def limit_key(key: object) -> str:
    """Return the stored form of a limit key: a long key is hashed and keeps its prefix. Raises ValueError."""
    stored = lock_key(key)
    # The prefix before the colon stays readable, because a limit for all keys with a prefix is found by it.
    prefix, colon, _ = str(key).partition(":")
    if stored == key or not colon:
        return stored
    stored_with_prefix = f"{prefix}:{stored}"
    return stored_with_prefix if len(stored_with_prefix.encode()) <= MAX_LOCK_KEY else stored


def lock_key(key: object) -> str:
    """Return the stored form of a key: a long one is hashed. Raises ValueError for an invalid key."""
    if not isinstance(key, str) or not key or "\x00" in key:
        raise ValueError("expected a string of one character or more, without NUL")
    raw = key.encode()  # UnicodeEncodeError is a ValueError
    # The prefix shows that the column has a hash, not the key itself.
    return key if len(raw) <= MAX_LOCK_KEY else f"sha256:{hashlib.sha256(raw).hexdigest()}"


def default_lock_key(jobtype: str, args: str, kwargs: str = ABSENT) -> str:
    """Return the same key for the same jobtype and arguments, in any queue. Raises InvalidPayload."""
    keyword_args = [] if kwargs in (ABSENT, "{}") else [kwargs]
    values = _canonical([args, *keyword_args], "a lock without its own key compares them", "give the lock a key")
    # The prefix keeps default keys apart from keys that tasks choose themselves.
    return f"locket:job_locks:{_hash(jsontext.encode(jobtype), *values)}"


def compute_ttl(custom: Mapping[str, str], result_ttl: int | None) -> int | None:
    """Return the seconds a row is kept after its end; the row of a tracked job is kept to show its outcome."""
    if custom.get("track", ABSENT) in (ABSENT, "false", "0", '""'):
        return result_ttl
    return max(result_ttl or 0, TRACKED_FOR_S)


def unique_key(jobtype: str, queue: str, args: str, kwargs: str = ABSENT) -> str:
    """Return the same key for equal JSON values, independent of spacing, escapes and key order; 1 and 1.0 differ.

    A Django task's keyword arguments count as arguments, although they are in `custom`.
    """
    keyword_args = "" if kwargs in (ABSENT, "{}") else kwargs
    values = _canonical([args, keyword_args], "custom.unique_for compares them", "pass a key of the data instead")
    # The queue is part of this key, but not of a lock key: uniqueness holds for one queue, a lock across queues.
    return _hash(jsontext.encode(jobtype), jsontext.encode(queue), *values)


def _hash(*texts: str) -> str:
    # A separator, so that the same texts split differently have another hash.
    return hashlib.sha256(",".join(texts).encode()).hexdigest()


def _canonical(values: list[str], reason: str, remedy: str) -> list[str]:
    """Return the texts that identify arguments and keyword arguments. Raises InvalidPayload if they are too long."""
    values[0] = _comparable_args(values[0])
    size = sum(map(len, values))
    if size > MAX_COMPARED:
        raise InvalidPayload(
            f"args: expected at most {MAX_COMPARED} characters, because {reason}, got {size}; {remedy}"
        )
    return [jsontext.canonical(value) if value else "" for value in values]


def _is_until_start(custom: Mapping[str, str]) -> bool:
    raw = custom.get("unique_until", ABSENT)
    if raw == ABSENT:
        return False
    until = string(raw)
    if until not in ("success", "start"):
        raise InvalidPayload(f'{_WITHIN}unique_until: expected "success" or "start", got {abbreviate(raw)}')
    return until == "start"


def _comparable_args(args: str) -> str:
    """Return the text that identifies arguments: for encrypted ones, the fingerprint that equal arguments share."""
    # Encryption uses a random value, so the tokens of equal arguments differ.
    if SEALED not in args:
        return args
    try:
        return jsontext.encode([_sealed_decoder.decode(args)[0].same])
    except jsontext.REFUSALS:  # not an envelope: compared as it is
        return args
