"""What crosses a seam: jobs, reservations, and the reports of their end. Checked here, once.

Pure: no Django, I/O, clock or chance. Rules: `docs/protocol.md`, W9 to W11, W17.
A job is kept as the JSON text its client sent; the attributes beside it are what we must query.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from . import jsontext
from .errors import InvalidPayload
from .jsonfields import parse_instant as parse_instant  # noqa: PLC0414  (many look for it here)
from .jsonfields import quoted
from .jsonfields import rfc3339 as rfc3339  # noqa: PLC0414
from .options import JobOptions, kept_for, read_options

DEFAULT_QUEUE = "default"
DEFAULT_RETRY = 25
DEFAULT_RESERVE_FOR = 1800
MIN_RESERVE_FOR, MAX_RESERVE_FOR = 60, 86_400
MIN_JID, MAX_NAME = 8, 255
MAX_ERRTYPE_BYTES, MAX_MESSAGE_BYTES, MAX_BACKTRACE_LINES = 100, 1000, 200
DEFAULT_BACKTRACE_LINES = 30
MAX_DESC_BYTES = 1000
MAX_BACKTRACE_LINE_BYTES = 1000

FUNCTION = r"[A-Za-z0-9_.{}-]{1,100}"
"""What a GearMonkey function may be called: no colon, which ends names in keys, and nothing that cannot be seen."""

_queue_name = re.compile(r"[A-Za-z0-9._-]{1,255}")
_nests = re.compile(r"[{\[\]]")


class JobPayload(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job on its way in: `text` as it will be stored, and beside it what the store queries.

    `priority` is Django's, -100 to 100, larger first; `at` is aware; `retry` is how many times a
    failed job runs again, negative means never and keep it as dead, 0 means never and drop it.
    """

    jid: str
    jobtype: str
    text: str
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    retry: int = DEFAULT_RETRY
    reserve_for: int = DEFAULT_RESERVE_FOR
    backtrace: int = 0
    at: datetime | None = None
    result_ttl: int | None = None
    """Seconds a row is kept after its end; None: it goes at once, as the protocol says."""
    options: JobOptions | None = None

    def __repr__(self) -> str:
        """Without its arguments: reprs end in logs, and in reports of errors."""
        return f"JobPayload(jid={self.jid!r}, jobtype={self.jobtype!r}, queue={self.queue!r})"


class Reservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job handed to one worker. `attempt` fences it: an older attempt's report changes nothing."""

    jid: str
    queue: str
    text: str
    """The job's JSON as its client sent it."""
    wid: str
    attempt: int
    jobtype: str = ""
    """As the row has it; empty where only the text is known."""
    created_at: datetime | None = None
    enqueued_at: datetime | None = None
    started_at: datetime | None = None
    failure: str = ""
    """JSON of the latest failure; empty if it never failed."""
    history: str = ""
    """JSON array of the failed attempts, for results; empty if none."""
    reserve_for: int = DEFAULT_RESERVE_FOR
    result_ttl: int | None = None
    lock_key: str | None = None
    lock_token: int | None = None
    """Of its lock, where it has one: later locks of the same key have higher ones."""
    limit_key: str | None = None
    passes: str | None = None
    """The gates it holds passes of; empty: it has yet to pass; None: no limit counts it (ADR 0016)."""
    is_batchless: bool = False
    """Whether it is known to be of no batch, and no batch's callback."""
    is_ahead: bool = False
    """Whether it was read ahead, and is nobody's until it is handed out (ADR 0022)."""

    def __repr__(self) -> str:
        """Without its arguments: reprs end in logs, and in reports of errors."""
        return f"Reservation(jid={self.jid!r}, jobtype={self.jobtype!r}, queue={self.queue!r}, attempt={self.attempt})"

    @property
    def waited_s(self) -> float:
        """How long it was ready before it was handed out."""
        if self.started_at is None or self.enqueued_at is None:
            return 0.0
        return max(0.0, (self.started_at - self.enqueued_at).total_seconds())

    @property
    def ends_alone(self) -> bool:
        """Whether its end is known to concern nobody else: no batch, nobody who waits for its lock or its place."""
        return self.is_batchless and self.lock_token is None and self.passes is None

    def wire(self) -> str:
        """The job as FETCH gives it: the stored text, with what the server knows at the end."""
        added: list[tuple[str, str]] = []
        if self.created_at is not None and not _has_member(self.text, "created_at"):
            added.append(("created_at", f'"{rfc3339(self.created_at)}"'))
        if self.enqueued_at is not None:
            added.append(("enqueued_at", f'"{rfc3339(self.enqueued_at)}"'))
        if self.failure:
            added.append(("failure", self.failure))
        return jsontext.append(self.text, added)


class Ack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """This job is done. `wid` "" and `attempt` None mean: the sender cannot say (W16)."""

    jid: str
    wid: str = ""
    attempt: int | None = None
    result: str | None = None
    """JSON of what the task returned, kept where the job has a `result_ttl`."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """This job failed; fenced like an Ack. Texts are cut to their limits when it is built by `failure`."""

    jid: str
    wid: str = ""
    attempt: int | None = None
    errtype: str = "unknown"
    message: str = "unknown"
    backtrace: tuple[str, ...] = ()
    retry_in_s: float | None = None
    """The task's own wish; None: the protocol's backoff."""
    verdict: str = ""
    """"" as the retry count says; "kill" to dead at once; "discard" gone at once; "later": it was
    not begun, waits for `retry_in_s` and uses no retry, where the broker can do that."""


INTERRUPTED = "interrupted"
"""The kind of an entry in a job's history that is no failed attempt."""


class Interruption(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker that stops gives back this job, which it has begun and not ended; fenced like an Ack."""

    jid: str
    wid: str
    attempt: int
    queue: str
    message: str
    """Why; the failure's message, where the interruption has to count as one."""


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Who said HELLO: a worker process, or a producer (wid "")."""

    wid: str = ""
    hostname: str = ""
    pid: int = 0
    labels: tuple[str, ...] = ()


class Beat(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sign of life. `current_state` is what the worker says of itself, "" if nothing."""

    wid: str
    current_state: str = ""
    rss_kb: int = 0
    held: tuple[tuple[str, int], ...] = ()
    """Jid and attempt of each job that the worker process has: their reservations are extended. Not on the wire."""
    keeps_delivered: bool = False
    """Whether the reservations of all jobs known to be delivered to this wid are extended (`BEAT_KEEPS_JOBS`)."""


class TrackUpdate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a job says of itself while it runs, or anybody after it; None leaves what was said before."""

    jid: str
    wid: str = ""
    """Who says so: only the holder can lengthen a reservation, or one who has no wid."""
    percent: int | None = None
    desc: str | None = None
    reserve_until: datetime | None = None
    part: tuple[int, int] | None = None
    """So much of so much, where a task told it in whole numbers; not on the wire."""
    attempt: int | None = None
    """If given, the update counts only while this attempt runs; not on the wire."""


class Tracked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a job is doing, in the words of TRACK GET: enqueued, working, success, failed, dead; or unknown."""

    jid: str
    percent: int | None = None
    desc: str | None = None
    state: str = "unknown"
    updated_at: datetime | None = None


class NewBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A batch to be made; the callbacks carry their `_bid` and `_cb` once they are enqueued."""

    bid: str = ""
    """Drawn by the caller that may have to send it twice; "": the store draws one."""
    description: str = ""
    parent_bid: str = ""
    complete: JobPayload | None = None
    success: JobPayload | None = None


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a batch is doing. `complete_st` and `success_st` are "" not yet, "1" enqueued, "2" finished well."""

    bid: str
    parent_bid: str = ""
    description: str = ""
    created_at: datetime | None = None
    total: int = 0
    pending: int = 0
    failed: int = 0
    complete_st: str = ""
    success_st: str = ""
    is_broken: bool = False


class Lease(StrEnum):
    """What a claim's reservation lasts until, see `docs/adr/0026-leases.md`."""

    RESERVE_FOR = ""
    """The job's own `reserve_for`."""
    HEARTBEAT = "heartbeat"
    """Each BEAT of its worker, which names the job, extends it. For workers that use this broker themselves."""
    DELIVERY = "delivery"
    """A short lease until `Broker.confirm`; then `reserve_for`. For a server, whose clients get the jobs."""


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Up to `count` jobs from `queues`, tried in that order, for `wid` ("" for a nameless connection).

    `ahead` more of the first queue may come with them, for whoever asks next; `count` may be 0 then (ADR 0022).
    """

    queues: tuple[str, ...]
    wid: str = ""
    count: int = 1
    ahead: int = 0
    crowd: tuple[str, ...] = ()
    """The workers that may ask next: where one of them is to get no jobs, nothing is read ahead."""
    lease: Lease = Lease.RESERVE_FOR


class HandedOut(NamedTuple):
    """A job to confirm: claimed with `Lease.DELIVERY` or read ahead, and sent to its wid `ago_s` seconds ago."""

    job: Reservation
    ago_s: float


def shutdown_failure(interruption: Interruption) -> Failure:
    """The failure that stands for an interruption where one cannot be given back."""
    return failure(
        jid=interruption.jid,
        wid=interruption.wid,
        attempt=interruption.attempt,
        errtype="WorkerShutdown",
        message=interruption.message,
    )


class JobForm:
    """What jobs made together share; `job` adds the rest of each.

    Of Python values of known good shape (tasks validate before); arguments and `custom` must be JSON types.
    """

    def __init__(
        self,
        *,
        jobtype: str,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        retry: int = DEFAULT_RETRY,
        reserve_for: int = DEFAULT_RESERVE_FOR,
        backtrace: int = 0,
        at: datetime | None = None,
        created_at: datetime | None = None,
        result_ttl: int | None = None,
    ) -> None:
        behind: dict[str, Any] = {"retry": retry}
        if priority:
            behind["priority"] = priority_to_wire(priority)
        if reserve_for != DEFAULT_RESERVE_FOR:
            behind["reserve_for"] = reserve_for
        if backtrace:
            behind["backtrace"] = backtrace
        if at is not None:
            behind["at"] = rfc3339(at)
        if created_at is not None:
            behind["created_at"] = rfc3339(created_at)
        self._before_args = jsontext.encode({"jobtype": jobtype, "queue": queue})[1:-1]
        self._behind_args = jsontext.encode(behind)[1:-1]
        self._kept: dict[str, Any] = {} if result_ttl is None else {"result_ttl": result_ttl}
        self._usual_custom = self._custom({})
        self._jobtype, self._queue, self._result_ttl = jobtype, queue, result_ttl
        self._columns: dict[str, Any] = {
            "jobtype": jobtype,
            "queue": queue,
            "priority": priority,
            "retry": retry,
            "reserve_for": reserve_for,
            "backtrace": backtrace,
            "at": at,
        }

    def job(
        self,
        jid: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        custom: Mapping[str, Any] | None = None,
    ) -> JobPayload:
        """One of them: its text as `jsontext.encode` would write it, of which only its own part is encoded."""
        told: dict[str, str] = {}
        last, options, result_ttl, args_text = self._usual_custom, None, self._result_ttl, jsontext.encode(args)
        if custom or kwargs:
            extra = {**custom} if custom else {}
            if kwargs:
                extra["kwargs"] = kwargs
            last = self._custom(extra)
            if custom:
                told = {key: jsontext.encode(value) for key, value in (extra | self._kept).items()}
                options = read_options(self._jobtype, self._queue, args_text, told)
                result_ttl = kept_for(told, result_ttl)
        text = f'{{"jid":{jsontext.encode(jid)},{self._before_args},"args":{args_text},{self._behind_args}{last}}}'
        return JobPayload(jid=jid, text=text, result_ttl=result_ttl, options=options, **self._columns)

    def _custom(self, extra: dict[str, Any]) -> str:
        """The member that says it, behind others; "" for nothing."""
        extra = extra | self._kept
        return f',"custom":{jsontext.encode(extra)}' if extra else ""


def new_job(
    *,
    jid: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    custom: Mapping[str, Any] | None = None,
    **shared: Any,
) -> JobPayload:
    """A job that shares nothing; see JobForm."""
    return JobForm(**shared).job(jid, args, kwargs, custom)


def failure(
    *,
    jid: str,
    wid: str = "",
    attempt: int | None = None,
    errtype: str = "",
    message: str = "",
    backtrace: Sequence[str] = (),
    retry_in_s: float | None = None,
    verdict: str = "",
) -> Failure:
    """Build a Failure whose texts are within the protocol's limits (W17)."""
    return Failure(
        jid=jid,
        wid=wid,
        attempt=attempt,
        errtype=cut(errtype, MAX_ERRTYPE_BYTES) or "unknown",
        message=cut(message, MAX_MESSAGE_BYTES) or "unknown",
        backtrace=tuple(cut(line, MAX_BACKTRACE_LINE_BYTES) for line in backtrace[:MAX_BACKTRACE_LINES]),
        retry_in_s=retry_in_s,
        verdict=verdict,
    )


def kept_lines(backtrace: Sequence[str], wanted: int) -> Sequence[str]:
    """The lines a job keeps: as many as it asks for, none where negative, 30 where it does not say (W17)."""
    if wanted < 0:
        return ()
    return backtrace[: min(wanted, MAX_BACKTRACE_LINES) or DEFAULT_BACKTRACE_LINES]


def cut(text: str, max_bytes: int) -> str:
    """Shorten to at most `max_bytes` of UTF-8 on a character boundary; lone surrogates become '?'."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode() if not text.isascii() else text
    return raw[:max_bytes].decode("utf-8", "ignore")


def is_storable(text: str) -> bool:
    """Whether a database can hold, and so could know, this text: no NUL, no lone surrogate."""
    try:
        return b"\x00" not in text.encode()
    except UnicodeEncodeError:
        return False


def priority_from_wire(wire: int) -> int:
    """1..9 → -100..100 in steps of 25; 5 is 0."""
    return (wire - 5) * 25


def priority_to_wire(priority: int) -> int:
    """-100..100 → the nearest of 1..9; halves go away from 5."""
    steps = int(abs(priority) / 25 + 0.5)
    return 5 + (steps if priority > 0 else -steps)


def is_queue_name(name: str) -> bool:
    """Whether a queue can have this name."""
    return _queue_name.fullmatch(name) is not None


def queue_name(value: str) -> str:
    """Check a queue's name and return it; "" is `default`. Raises InvalidPayload."""
    if not value:
        return DEFAULT_QUEUE
    if not _queue_name.fullmatch(value):
        raise InvalidPayload(
            rf"cannot get {quoted(value)} queue: queue names must match \A[a-zA-Z0-9._-]+\z"
            " and have at most 255 characters"
        )
    return value


def _has_member(text: str, key: str) -> bool:
    """Whether the stored object has this member; the cheap looks answer nearly always."""
    at = text.find(f'"{key}"')
    if at < 0:
        return False
    rest = text[at + len(key) + 2 :]
    # Compact, and between here and the end of the object nothing begins or ends: it is a member of the object itself.
    if text[at - 1] in ",{" and rest[:1] == ":" and rest.count("}") == 1 and not _nests.search(rest):
        return True
    return key in jsontext.members(text)
