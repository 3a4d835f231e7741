"""Validated data types that cross layer boundaries: jobs, reservations, reports of a job's end.

Pure: no Django, I/O, clock or randomness. Rules: W9 to W11, W17. A job is kept as the JSON text that
its client sent; the other attributes are the fields that the store queries. Structs are declared `gc=False`: they
contain no reference cycles, so the garbage collector does not need to track them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from ..errors import FaktoryError, InvalidPayload, WorkerTrouble, translatable
from .job_options import JobOptions, compute_ttl, read_options
from .json import jsontext
from .json.fields import parse_instant as parse_instant  # noqa: PLC0414  (other modules import it from here)
from .json.fields import quote_abbreviated
from .json.fields import rfc3339 as rfc3339  # noqa: PLC0414

# Defaults, ranges and lengths of the protocol: W9 for pushed jobs, W17 for failures.
DEFAULT_QUEUE = "default"
DEFAULT_RETRY = 25
DEFAULT_RESERVE_FOR = 1800
# Less than the minimum counts as the minimum, more than the maximum is refused, as in the original server.
MIN_RESERVE_FOR, MAX_RESERVE_FOR = 60, 86_400
MIN_JID, MAX_NAME = 8, 255
MAX_ERRTYPE_BYTES, MAX_MESSAGE_BYTES, MAX_BACKTRACE_LINES = 100, 1000, 200
DEFAULT_BACKTRACE_LINES = 30
MAX_DESC_BYTES = 1000
MAX_BACKTRACE_LINE_BYTES = 1000

FUNCTION = r"[A-Za-z0-9_.{}-]{1,100}"
"""Pattern of a GearMonkey function name: no colon, because a colon ends names in keys, and no invisible characters."""

# W9. A name without white space can be an argument of FETCH and QUEUE.
_queue_name = re.compile(r"[A-Za-z0-9._-]{1,255}")
_nesting = re.compile(r"[{\[\]]")


class JobPayload(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A job to be stored: `text` is stored as it is, the other attributes are the columns that the store queries.

    `priority` is Django's, -100 to 100, larger first. `at` is an aware datetime. `retry` is the maximum number of
    retries. A job with a negative number is never retried and kept as dead; with 0 it is never retried and dropped
    (kept as dead if it has a `result_ttl`).
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
    """Seconds a row is kept after its end; None: it is deleted at once, as the protocol requires."""
    options: JobOptions | None = None
    has_new_jid: bool = False
    """True if this process has drawn the jid at random for this job, so that no stored job can have it."""

    def __repr__(self) -> str:
        """Return a repr without the arguments, because reprs end up in logs and error reports."""
        return f"JobPayload(jid={self.jid!r}, jobtype={self.jobtype!r}, queue={self.queue!r})"


class Reservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job claimed for one worker. `attempt` is a fence: a report of an older attempt changes nothing."""

    jid: str
    queue: str
    text: str
    """The job's JSON as its client sent it."""
    wid: str
    attempt: int
    jobtype: str = ""
    """The column of the row; empty where only the text is known."""
    created_at: datetime | None = None
    enqueued_at: datetime | None = None
    started_at: datetime | None = None
    failure: str = ""
    """JSON of the latest failure; empty if the job never failed."""
    history: str = ""
    """JSON array of the recorded runs, for task results; empty if there are none."""
    reserve_for: int = DEFAULT_RESERVE_FOR
    result_ttl: int | None = None
    lock_key: str | None = None
    lock_token: int | None = None
    """Fencing token of its lock, if it has one: later locks of the same key have higher tokens."""
    limit_key: str | None = None
    permits: str | None = None
    """Limiters that gave it permits. Empty: it must still acquire them; None: no limit applies to it (ADR 0016)."""
    is_batchless: bool = False
    """True if the job is known to be neither a member nor a callback of a batch."""
    is_prefetched: bool = False
    """True if the job was prefetched; it belongs to no worker until it is delivered (ADR 0026)."""

    def __repr__(self) -> str:
        """Return a repr without the arguments, because reprs end up in logs and error reports."""
        return f"Reservation(jid={self.jid!r}, jobtype={self.jobtype!r}, queue={self.queue!r}, attempt={self.attempt})"

    @property
    def waited_s(self) -> float:
        """Seconds between enqueue and start; 0.0 if either time is unknown."""
        if self.started_at is None or self.enqueued_at is None:
            return 0.0
        return max(0.0, (self.started_at - self.enqueued_at).total_seconds())

    def wire(self) -> str:
        """Return the job as FETCH sends it: the stored text, with the server's own members appended."""
        # Appended as text, without a parse: the client's numbers must come back digit for digit (W11).
        server_members: list[tuple[str, str]] = []
        # A client may have sent `created_at` itself; a second member of that name would make the object ambiguous.
        if self.created_at is not None and not _has_member(self.text, "created_at"):
            server_members.append(("created_at", f'"{rfc3339(self.created_at)}"'))
        # The other two need no check: a client's own values were dropped when the job was pushed (W11).
        if self.enqueued_at is not None:
            server_members.append(("enqueued_at", f'"{rfc3339(self.enqueued_at)}"'))
        if self.failure:
            server_members.append(("failure", self.failure))
        return jsontext.append(self.text, server_members)


class Ack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Report that a job is done. `wid` "" and `attempt` None mean that the sender does not know them (W16)."""

    jid: str
    wid: str = ""
    attempt: int | None = None
    result: str | None = None
    """JSON of the task's return value; stored if the job has a `result_ttl`."""
    log: tuple[str, ...] = ()
    """The latest lines that the task logged; stored by `keep_logs`."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Report that a job failed; fenced like an Ack. `failure` builds it and cuts its texts to their limits."""

    jid: str
    wid: str = ""
    attempt: int | None = None
    errtype: str = "unknown"
    message: str = "unknown"
    backtrace: tuple[str, ...] = ()
    retry_in_s: float | None = None
    """Delay that the task chose; None: the protocol's backoff."""
    verdict: str = ""
    """Empty: the job is retried while it has retries left. "kill": it is dead at once. "discard": it is dropped at
    once. LATER: it was not begun, so it waits `retry_in_s` and uses no retry, if the broker supports that.
    """
    log: tuple[str, ...] = ()
    """The latest lines that the task logged; not on the wire."""
    release: str = ""
    """The project's release that the worker runs; not on the wire."""
    has_progressed: bool = False
    """True if the run committed a step: earlier failures and losses no longer count (ADR 0051). Not on the wire."""


LATER = "later"
"""Verdict of the report that defers a job."""
INTERRUPTED, LOGGED = "interrupted", "log"
"""Kinds of history entries other than failed attempts: a run interrupted by the end of its worker, and the log lines of
a run that reported success.
"""


class Interruption(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Release a job whose run ended early for a reason outside the task; fenced like an Ack."""

    jid: str
    wid: str
    attempt: int
    queue: str
    message: str
    """The reason; used as the failure's message where the interruption has to count as a failure."""
    errtype: str = "WorkerShutdown"
    summary: str = "interrupted by shutdown"
    """Text for the job's history and the log."""


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sender of a HELLO: a worker process, or a producer (wid "")."""

    wid: str = ""
    hostname: str = ""
    pid: int = 0
    labels: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    """Queues that it serves, reported by our worker only; for display."""
    threads: int = 0
    """Number of its threads, reported by our worker only; 0: unknown."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A heartbeat of a worker process. `current_state` is the state that the worker reports, "" if none."""

    wid: str
    current_state: str = ""
    rss_kb: int = 0
    held: tuple[tuple[str, int], ...] | None = None
    """Jid and attempt of each job that the worker process has; their reservations are extended. Not on the wire.

    None: the worker does not say, as all clients of the protocol.
    """
    keeps_delivered: bool = False
    """True if the reservations of all jobs known to be delivered to this wid are extended (`BEAT_KEEPS_JOBS`)."""


class TrackUpdate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Progress of a job, set while it runs or later by any client. None leaves the stored value unchanged."""

    jid: str
    wid: str = ""
    """The sender: only the worker that has the job, or a sender without a wid, can lengthen the reservation."""
    percent: int | None = None
    desc: str | None = None
    reserve_until: datetime | None = None
    part: tuple[int, int] | None = None
    """(done, total), if the task reported whole numbers; not on the wire."""
    attempt: int | None = None
    """If given, the update counts only while this attempt runs; not on the wire."""


class Tracked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Progress of a job in the terms of TRACK GET."""

    jid: str
    percent: int | None = None
    """0 to 100; None: not reported."""
    desc: str | None = None
    """The latest note; None: not reported."""
    state: str = "unknown"
    """enqueued, working, success, failed, dead or unknown."""
    updated_at: datetime | None = None
    """Time of the latest report."""


class NewBatch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A batch to create. Its callbacks get their `_bid` and `_cb` when they are enqueued."""

    bid: str = ""
    """Set by a caller that may have to send the batch twice; "": the store chooses one."""
    description: str = ""
    parent_bid: str = ""
    complete: JobPayload | None = None
    success: JobPayload | None = None


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Progress of a batch."""

    bid: str
    parent_bid: str = ""
    """The batch that it was created in; "": none."""
    description: str = ""
    created_at: datetime | None = None
    total: int = 0
    """Number of jobs, those that were added later included."""
    pending: int = 0
    """Number of jobs that may still run: they neither succeeded nor were dropped."""
    failed: int = 0
    """Number of jobs of which the latest run failed."""
    complete_st: str = ""
    """The callback `complete`: "" not yet, "1" enqueued, "2" succeeded."""
    success_st: str = ""
    """The callback `success`, alike."""
    is_broken: bool = False
    """True if `success` is never enqueued, because a job was dropped."""


class Lease(StrEnum):
    """How long a claim reserves its job, see `docs/adr/0026-leases.md`."""

    RESERVE_FOR = ""
    """Until the job's own `reserve_for` has passed."""
    HEARTBEAT = "heartbeat"
    """Extended by each BEAT of its worker that names the job. For workers that use this broker directly."""
    DELIVERY = "delivery"
    """A short lease until `Broker.confirm`, then `reserve_for`. For a server, which claims jobs for its clients."""


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Claim up to `count` jobs from `queues`, tried in that order, for `wid` ("": a connection without a wid).

    `prefetch` is the number of jobs of the first queue to claim for later requests; `count` may then be 0 (ADR 0026).
    """

    queues: tuple[str, ...]
    wid: str = ""
    count: int = 1
    prefetch: int = 0
    candidate_wids: tuple[str, ...] = ()
    """Wids that may receive the prefetched jobs. If one of them must not get jobs, nothing is prefetched."""
    lease: Lease = Lease.RESERVE_FOR


class ExchangeReply(NamedTuple):
    """Results of `push`, `ack` and `fetch` from one `exchange`, each in the order of its input."""

    pushed: Sequence[FaktoryError | None]
    acked: Sequence[FaktoryError | bool]
    fetched: list[list[Reservation]]


class Delivery(NamedTuple):
    """A delivery to confirm: claimed with `Lease.DELIVERY` or prefetched, and sent to its wid `ago_s` seconds ago."""

    job: Reservation
    ago_s: float


def interruption(job: Reservation, message: str) -> Interruption:
    """Return the report of a job that the shutdown of its worker interrupted."""
    return Interruption(jid=job.jid, wid=job.wid, attempt=job.attempt, queue=job.queue, message=message)


def trouble(job: Reservation, error: WorkerTrouble) -> Interruption:
    """Return the report of a job that the trouble of its worker interrupted."""
    report = interruption(job, str(error))
    return msgspec.structs.replace(report, errtype=type(error).__name__, summary=error.summary)


def interruption_failure(interruption: Interruption) -> Failure:
    """Return the failure that replaces an interruption where the job cannot be released."""
    return failure(
        jid=interruption.jid,
        wid=interruption.wid,
        attempt=interruption.attempt,
        errtype=interruption.errtype,
        message=interruption.message,
    )


class JobTemplate:
    """Template for jobs of one task; `job` builds each of them. Encodes the shared members once.

    Input must be Python values of valid shape (tasks validate earlier); arguments and `custom` must be JSON types.
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
        result_ttl: int | None = None,
        has_new_jids: bool = False,
    ) -> None:
        trailing: dict[str, Any] = {"retry": retry}
        # Members at the protocol's default are left out: the text is shorter, and its meaning is the same.
        if priority:
            trailing["priority"] = priority_to_wire(priority)
        if reserve_for != DEFAULT_RESERVE_FOR:
            trailing["reserve_for"] = reserve_for
        if backtrace:
            trailing["backtrace"] = backtrace
        if at is not None:
            trailing["at"] = rfc3339(at)
        # Without their braces: `job` writes the arguments between these two parts, which are encoded once.
        self._before_args = jsontext.encode({"jobtype": jobtype, "queue": queue})[1:-1]
        self._after_args = jsontext.encode(trailing)[1:-1]
        self._shared_custom: dict[str, Any] = {} if result_ttl is None else {"result_ttl": result_ttl}
        # Most jobs add nothing to `custom`, so its default text is encoded once too.
        self._default_custom = self._encode_custom({})
        self._jobtype, self._queue, self._result_ttl = jobtype, queue, result_ttl
        self._columns: dict[str, Any] = {
            "jobtype": jobtype,
            "queue": queue,
            "priority": priority,
            "retry": retry,
            "reserve_for": reserve_for,
            "backtrace": backtrace,
            "at": at,
            "has_new_jid": has_new_jids,
        }

    def job(
        self,
        jid: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        custom: Mapping[str, Any] | None = None,
        created_at: str = "",
    ) -> JobPayload:
        """Build one job. Only its own members are encoded; the text equals that of `jsontext.encode`.

        `created_at` is in the form of RFC 3339; "" leaves it to the server.
        """
        custom_texts: dict[str, str] = {}
        custom_member, options, result_ttl = self._default_custom, None, self._result_ttl
        args_text = jsontext.encode(args)
        if custom or kwargs:
            members = {**custom} if custom else {}
            if kwargs:
                members["kwargs"] = kwargs
            custom_member = self._encode_custom(members)
            if custom:
                # Raw JSON texts, as for jobs from the wire: both ways of pushing share the rules of `read_options`.
                custom_texts = {key: jsontext.encode(value) for key, value in (members | self._shared_custom).items()}
                options = read_options(self._jobtype, self._queue, args_text, custom_texts)
                result_ttl = compute_ttl(custom_texts, result_ttl)
        # Last: nothing is nested behind it, so FETCH finds it without a parse (`_has_member`).
        created_member = f',"created_at":"{created_at}"' if created_at else ""
        text = (
            f'{{"jid":{jsontext.encode(jid)},{self._before_args},"args":{args_text},'
            f"{self._after_args}{custom_member}{created_member}}}"
        )
        return JobPayload(jid=jid, text=text, result_ttl=result_ttl, options=options, **self._columns)

    def _encode_custom(self, members: dict[str, Any]) -> str:
        """Return the `custom` member, with the comma before it; "" if there is nothing to write."""
        members = members | self._shared_custom
        return f',"custom":{jsontext.encode(members)}' if members else ""


def new_job(
    *,
    jid: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    custom: Mapping[str, Any] | None = None,
    created_at: str = "",
    **shared: Any,
) -> JobPayload:
    """Build a single job; `shared` are the arguments of `JobTemplate`, the others are those of its `job`."""
    return JobTemplate(**shared).job(jid, args, kwargs, custom, created_at)


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
    log: Sequence[str] = (),
    release: str = "",
    has_progressed: bool = False,
) -> Failure:
    """Build a Failure with texts cut to the protocol's limits (W17)."""
    return Failure(
        jid=jid,
        wid=wid,
        attempt=attempt,
        # Clients may leave these texts out.
        errtype=cut(errtype, MAX_ERRTYPE_BYTES) or "unknown",
        message=cut(message, MAX_MESSAGE_BYTES) or "unknown",
        backtrace=tuple(cut(line, MAX_BACKTRACE_LINE_BYTES) for line in backtrace[:MAX_BACKTRACE_LINES]),
        retry_in_s=retry_in_s,
        verdict=verdict,
        log=tuple(log),
        release=cut(release, MAX_NAME),
        has_progressed=has_progressed,
    )


def failure_of(job: Reservation, **details: Any) -> Failure:
    """Build the Failure of a reserved job; `details` are further arguments of `failure`."""
    return failure(jid=job.jid, wid=job.wid, attempt=job.attempt, **details)


def limit_backtrace(backtrace: Sequence[str], requested: int) -> Sequence[str]:
    """Return the backtrace lines that a job keeps (W17).

    `requested` is the job's `backtrace`: a negative number keeps none, 0 (not set) keeps 30.
    """
    # The specification honours the job's number; the original server ignores it and keeps up to 50 lines.
    if requested < 0:
        return ()
    return backtrace[: min(requested, MAX_BACKTRACE_LINES) or DEFAULT_BACKTRACE_LINES]


def cut(text: str, max_bytes: int) -> str:
    """Shorten to at most `max_bytes` of UTF-8 at a character boundary; lone surrogates become '?'."""
    # Lone surrogates are legal in JSON, but neither UTF-8 nor the databases can store them.
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode() if not text.isascii() else text
    # "ignore" drops the bytes of a character that the limit cut in two.
    return raw[:max_bytes].decode("utf-8", "ignore")


def in_ascii(text: str) -> str:
    """Return the text with escapes for all other characters, so that a database of any encoding can store it."""
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode()


def failure_in_ascii(report: Failure) -> Failure:
    """Return the report with its texts in ASCII."""
    return failure(
        jid=report.jid,
        wid=report.wid,
        attempt=report.attempt,
        errtype=in_ascii(report.errtype),
        message=in_ascii(report.message),
        backtrace=[*map(in_ascii, report.backtrace)],
        retry_in_s=report.retry_in_s,
        verdict=report.verdict,
        log=[*map(in_ascii, report.log)],
        release=in_ascii(report.release),
        has_progressed=report.has_progressed,
    )


def is_storable(text: str) -> bool:
    """Return True if a database can store this text: no NUL, no lone surrogate.

    A text that is not storable can be in no row, so callers answer without a query.
    """
    try:
        # PostgreSQL stores no NUL in a text, and UTF-8 has no form for a lone surrogate.
        return b"\x00" not in text.encode()
    except UnicodeEncodeError:
        return False


def make_storable(text: str) -> str:
    """Replace the characters that a database refuses; see `is_storable`."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def priority_from_wire(wire: int) -> int:
    """Convert 1..9 to -100..100 in steps of 25; 5 becomes 0."""
    return (wire - 5) * 25


def priority_to_wire(priority: int) -> int:
    """Convert -100..100 to the nearest of 1..9; halves are rounded away from 5."""
    steps = int(abs(priority) / 25 + 0.5)
    return 5 + (steps if priority > 0 else -steps)


def is_queue_name(name: str) -> bool:
    """Return True if a queue can have this name."""
    return _queue_name.fullmatch(name) is not None


def queue_name(value: str) -> str:
    """Check a queue name and return it; "" becomes `default`. Raises InvalidPayload."""
    if not value:
        return DEFAULT_QUEUE
    # The message begins like the original server's.
    if not _queue_name.fullmatch(value):
        raise InvalidPayload(
            translatable(
                r"cannot get %(name)s queue: queue names must match \A[a-zA-Z0-9._-]+\z and have at most 255 characters"
            ),
            name=quote_abbreviated(value),
        )
    return value


def _has_member(text: str, key: str) -> bool:
    """Return True if the stored object has this member. Two text searches decide nearly always, without a parse."""
    at = text.find(f'"{key}"')
    if at < 0:
        return False
    remaining = text[at + len(key) + 2 :]
    # The text is compact and no nested value or end of the object follows: the member belongs to the object itself.
    if text[at - 1] in ",{" and remaining[:1] == ":" and remaining.count("}") == 1 and not _nesting.search(remaining):
        return True
    return key in jsontext.members(text)
