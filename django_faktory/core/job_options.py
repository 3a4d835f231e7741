"""Job options that clients set in `custom`: uniqueness, locks, limits, expiry, tracking, batches (W27).

Pure. Semantics: docs/job-options.md. `read_options` parses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from ..errors import InvalidPayload
from .json import incremental, jsontext
from .json.fields import ABSENT, abbreviate, instant, later, seconds, string
from .json.incremental import Incremental
from .queries import is_about

SEALED, SAME = "$encrypted", "same"
"""Members of the envelope of encrypted arguments: the token, and the fingerprint that equal arguments share."""

TRACKED_FOR_S = 1800
"""Seconds after its end for which the progress of a tracked job is kept."""

_WITHIN = "custom."
MAX_BID = 255
_KEYS = frozenset({"unique_for", "expires_at", "expires_in", "bid", "lock", "limit", "about"})
MAX_LOCK_KEY = 255
MAX_COMPARED = 10_000
"""Maximum object members, at all levels, in compared arguments: sorting keeps them in memory."""

COMPARED_AT_ONCE = 1000
"""Characters of arguments that are compared in one step: this takes less than a millisecond."""


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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

    @property
    def may_block(self) -> bool:
        """True if its push may have to wait for another transaction.

        That transaction has just taken the same unique key, or changes the same batch.
        """
        return self.unique_key is not None or self.bid is not None

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
    return incremental.run(read_options_in_steps(jobtype, queue, args, custom))


def takes_long(args: str, custom: Mapping[str, str]) -> bool:
    """Return True if the options must be read in steps, because long arguments have to be compared."""
    # Only a unique key and a default lock key are computed from arguments; the other options take constant time.
    size = len(args) + len(custom.get("kwargs", ""))
    return size > COMPARED_AT_ONCE and ("unique_for" in custom or "lock" in custom)


def read_options_in_steps(
    jobtype: str, queue: str, args: str, custom: Mapping[str, str]
) -> Incremental[JobOptions | None]:
    """Parse the options in steps of about a millisecond; see `read_options`."""
    unique_for = seconds(custom, "unique_for", within=_WITHIN)
    expires_at = instant(custom, "expires_at", within=_WITHIN)
    expires_in = seconds(custom, "expires_in", within=_WITHIN)
    bid, about = _read_bid(custom), _read_about(custom)
    lock = yield from _read_lock_key(jobtype, args, custom)
    limit = _read_limit_key(custom)
    # A key may be present without an option, for example `"lock": false`.
    if (unique_for, expires_at, expires_in, bid, lock, limit, about) == (None,) * 7:
        return None
    key = None
    if unique_for is not None:
        key = yield from _derive_unique_key(jobtype, queue, args, custom.get("kwargs", ABSENT))
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


def _read_lock_key(jobtype: str, args: str, custom: Mapping[str, str]) -> Incremental[str | None]:
    raw = custom.get("lock", ABSENT)
    # `false` also opts out of LOCKET, whatever the settings say for the queue (docs/locks.md).
    if raw in (ABSENT, "false"):
        return None
    if raw == "true":
        return (yield from _derive_lock_key(jobtype, args, custom.get("kwargs", ABSENT)))
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
    return incremental.run(_derive_lock_key(jobtype, args, kwargs))


def _derive_lock_key(jobtype: str, args: str, kwargs: str) -> Incremental[str]:
    keyword_args = [] if kwargs in (ABSENT, "{}") else [kwargs]
    digest = yield from _hash_values(jsontext.encode(jobtype), [(yield from _comparable_args(args)), *keyword_args])
    # The prefix keeps default keys apart from keys that tasks choose themselves.
    return f"locket:job_locks:{digest}"


def compute_ttl(custom: Mapping[str, str], result_ttl: int | None) -> int | None:
    """Return the seconds a row is kept after its end; the row of a tracked job is kept to show its outcome."""
    if custom.get("track", ABSENT) in (ABSENT, "false", "0", '""'):
        return result_ttl
    return max(result_ttl or 0, TRACKED_FOR_S)


def unique_key(jobtype: str, queue: str, args: str, kwargs: str = ABSENT) -> str:
    """Return the same key for equal JSON values, independent of spacing, escapes and key order; 1 and 1.0 differ.

    A Django task's keyword arguments count as arguments, although they are in `custom`.
    """
    return incremental.run(_derive_unique_key(jobtype, queue, args, kwargs))


def _derive_unique_key(jobtype: str, queue: str, args: str, kwargs: str) -> Incremental[str]:
    keyword_args = "" if kwargs in (ABSENT, "{}") else kwargs
    # The queue is part of this key, but not of a lock key: uniqueness holds for one queue, a lock across queues.
    head = f"{jsontext.encode(jobtype)},{jsontext.encode(queue)}"
    return (yield from _hash_values(head, [(yield from _comparable_args(args)), keyword_args]))


def _hash_values(head: str, values: Sequence[str]) -> Incremental[str]:
    """Return the SHA-256 of a text and canonical JSON values, joined by commas. Only objects are kept in memory whole.

    Raises InvalidPayload for more than MAX_COMPARED members of nested objects.
    """
    digest, canonical_part = hashlib.sha256(head.encode()), bytearray()
    for value in values:
        # A separator, so that the same texts split differently have another hash.
        digest.update(b",")
        try:
            for _ in incremental.canonical(value, canonical_part, max_count=MAX_COMPARED) if value else ():
                digest.update(canonical_part)
                canonical_part.clear()
                yield
        except InvalidPayload as error:
            raise InvalidPayload(
                f"args: {error}, because custom.unique_for and a lock without its own key compare them; got more"
            ) from None
        digest.update(canonical_part)
        canonical_part.clear()
    return digest.hexdigest()


def _is_until_start(custom: Mapping[str, str]) -> bool:
    raw = custom.get("unique_until", ABSENT)
    if raw == ABSENT:
        return False
    until = string(raw)
    if until not in ("success", "start"):
        raise InvalidPayload(f'{_WITHIN}unique_until: expected "success" or "start", got {abbreviate(raw)}')
    return until == "start"


def _comparable_args(args: str) -> Incremental[str]:
    """Return the text that identifies arguments: for encrypted ones, the fingerprint that equal arguments share."""
    # Encryption uses a random value, so the tokens of equal arguments differ.
    if SEALED not in args:
        return args
    elements: list[str] = []
    for element in incremental.cut(args, "[]"):
        if element is None:
            yield
        # An envelope is the only argument, and an object; anything else is compared as it is.
        elif elements or not element.lstrip().startswith("{"):
            return args
        else:
            elements.append(element)
    if not elements:
        return args
    members = yield from incremental.members(elements[0], max_count=MAX_COMPARED, rejects_duplicates=False)
    fingerprint = string(members.get(SAME, ABSENT))
    return args if fingerprint is None else jsontext.encode([fingerprint])


def canonical(text: str) -> str:
    """Return canonical JSON: equal for equal values, independent of spacing, escapes and key order."""
    out = bytearray()
    incremental.run(incremental.canonical(text, out))
    return out.decode()
