"""Parse command lines and write them. `VERBS` has the parser of each verb, `Command` is the union of all results.

Parsers check shape only. Error messages follow the original server's where it has one. Long lines are parsed in steps
(generators), so that an event loop can serve other clients in between. Rules: W5, W9, W12, W16, W17, W21.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from ...errors import InvalidPayload, UnknownCommand
from ..job_parser import MAX_MEMBERS, begin_job, parse_job, parse_long_job
from ..json import incremental, jsontext
from ..json.incremental import SHORT, Incremental, T
from ..payloads import DEFAULT_QUEUE, MAX_BACKTRACE_LINES, Beat, JobPayload, WorkerIdentity, is_queue_name
from . import batches, management, tracking
from .batches import BatchCommand
from .fields import decode_value, field, format_line, parse_object, parse_strings, parse_wid
from .limits import LOOKED_UP, check_count, check_length, check_line
from .management import ManagementCommand
from .tracking import TrackingCommand

VERSION = 2
NO_QUEUE = "*"
"""Invalid queue name, sent instead of an empty list, which would mean the default queue."""

MANY_JOBS_BYTES = 4 * 1024
"""A PUSHB above this length may have enough jobs to need parsing in steps."""

MANY_VALUES, LONG_JOB_BYTES = 4000, 1024 * 1024
"""A single job beyond one of these counts of brackets or colons, or bytes, takes more than a few milliseconds."""

CUT_AT_ONCE = 256 * 1024
"""Characters of a PUSHB up to which it is split into jobs at once, which is faster than in steps."""

JOBS_A_STEP = 20
"""Jobs of a long PUSHB that are parsed between two pauses."""


MAX_THREADS = 2**31 - 1
"""Largest number that the column of the database stores."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """HELLO: identity and password hash of a client."""

    identity: WorkerIdentity = WorkerIdentity()
    pwdhash: str = ""
    v: int = VERSION

    def line(self) -> bytes:
        """Return the line that a client sends."""
        identity = self.identity
        members: dict[str, Any] = {"v": self.v}
        if identity.wid:
            members |= {
                "wid": identity.wid,
                "hostname": identity.hostname,
                "pid": identity.pid,
                "labels": identity.labels,
            }
        if identity.threads:
            members |= {"queues": identity.queues, "threads": identity.threads}
        if self.pwdhash:
            members["pwdhash"] = self.pwdhash
        return format_line("HELLO", jsontext.encode(members))


class End(msgspec.Struct, frozen=True):
    """END: the client closes the connection."""

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return b"END\r\n"


class Info(msgspec.Struct, frozen=True):
    """INFO: the client asks for counts of jobs, queues and workers."""

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return b"INFO\r\n"


class Push(msgspec.Struct, frozen=True):
    """PUSH: a job to store."""

    job: JobPayload

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("PUSH", self.job.text)


class PushBulk(msgspec.Struct, frozen=True):
    """PUSHB: jobs to store, and refusals of the invalid ones (W12)."""

    jobs: Sequence[JobPayload | InvalidPayload]

    def line(self) -> bytes:
        """Return the line that a client sends; without refused jobs, as their text is not kept."""
        return format_line("PUSHB", f"[{','.join(job.text for job in self.jobs if isinstance(job, JobPayload))}]")


class Fetch(msgspec.Struct, frozen=True):
    """FETCH: a worker asks for a job of these queues, in this order. Empty if all names were invalid."""

    queues: tuple[str, ...] = (DEFAULT_QUEUE,)

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("FETCH", " ".join(self.queues) or NO_QUEUE)


class AckJob(msgspec.Struct, frozen=True):
    """ACK: a job has succeeded."""

    jid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("ACK", jsontext.encode({"jid": self.jid}))


class FailJob(msgspec.Struct, frozen=True):
    """FAIL: a job has failed. Its errtype and message are not cut to their limits yet."""

    jid: str
    errtype: str = ""
    message: str = ""
    backtrace: tuple[str, ...] = ()

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("FAIL", jsontext.encode(msgspec.structs.asdict(self)))


class BeatWorker(msgspec.Struct, frozen=True):
    """BEAT: heartbeat of a worker."""

    beat: Beat

    def line(self) -> bytes:
        """Return the line that a client sends."""
        members = {key: value for key, value in msgspec.structs.asdict(self.beat).items() if value}
        return format_line("BEAT", jsontext.encode(members))


Command = (
    Hello | End | Info | Push | PushBulk | Fetch | AckJob | FailJob | BeatWorker
    | BatchCommand | ManagementCommand | TrackingCommand
)  # fmt: skip


def parse(line: str) -> Command:
    """Parse one line without its end. Raises UnknownCommand or InvalidPayload; both leave the connection open."""
    # Limits count bytes. "replace": a lone surrogate must not raise UnicodeEncodeError here.
    encoded = line.encode("utf-8", "replace")
    check_line(encoded[:100], len(encoded))
    command = begin(line)
    return incremental.run(command) if isinstance(command, Generator) else command


def begin(line: str) -> Command | Incremental[Command]:
    """Parse a line of checked length; return steps for a command that may take more than a millisecond."""
    verb, _, rest = line.partition(" ")
    parser = VERBS.get(verb)
    if parser is None:
        raise UnknownCommand(f"unknown command {verb[:100]}")
    return parser(rest)


def parse_long(line: bytes) -> Incremental[Command] | None:
    """Return steps that parse a line that takes long; None for any other line. The decision itself is fast."""
    if len(line) <= MANY_JOBS_BYTES:  # no shorter line of any verb takes long
        return None
    verb, _, rest = line[:8].partition(b" ")
    parser = _LONG.get(verb) if rest else None
    if parser is None or not _takes_long(verb, line):
        return None
    return _decode_and_parse(parser, line)


def _takes_long(verb: bytes, line: bytes) -> bool:
    if verb == b"PUSHB":
        return True
    if len(line) <= SHORT:
        return False
    if verb != b"PUSH" or len(line) > LONG_JOB_BYTES:
        return True
    # The counts bound the number of values; each takes one fast pass over the bytes.
    return line.count(b"{") + line.count(b"[") > MANY_VALUES or line.count(b":") > MANY_VALUES


def _decode_and_parse(parser: Callable[[str], Incremental[Command]], line: bytes) -> Incremental[Command]:
    yield  # while the line waits for its turn only its bytes are kept
    text = decode_line(line).partition(" ")[2]
    del line  # free the bytes before the jobs are built
    yield
    return (yield from parser(text))


def decode_line(line: bytes) -> str:
    """Decode a line as UTF-8. Raises InvalidPayload if it is not."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidPayload(f"invalid JSON: the line is not UTF-8: {error.reason} at byte {error.start}") from error


def parse_hello(text: str) -> Hello:
    """Parse the text after HELLO. Raises InvalidPayload, after which the caller closes (W2)."""
    members = parse_object("HELLO", text)
    version = members.get("v", VERSION)  # a known client sends none
    if version != VERSION or isinstance(version, bool):
        raise InvalidPayload(f"invalid HELLO: v: expected {VERSION}, the protocol's version, got {ascii(version)[:40]}")
    labels = field("HELLO", members, "labels", list, [])
    if not all(isinstance(label, str) for label in labels):
        raise InvalidPayload("invalid HELLO: labels: expected an array of strings")
    identity = WorkerIdentity(
        wid=parse_wid("HELLO", members),
        hostname=field("HELLO", members, "hostname", str, ""),
        pid=field("HELLO", members, "pid", int, 0),
        labels=tuple(labels),
        **_worker_members(members),
    )
    return Hello(identity=identity, pwdhash=field("HELLO", members, "pwdhash", str, ""))


def _worker_members(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members that only our worker adds to HELLO; ignore members of other clients with these names."""
    queues, threads = members.get("queues"), members.get("threads")
    if type(threads) is not int or not 0 < threads <= MAX_THREADS or not isinstance(queues, list):
        return {}
    return {"queues": tuple(name for name in queues if isinstance(name, str)), "threads": threads}


def _parse_push(text: str) -> Push | Incremental[Push]:
    job = begin_job(text)
    return _after_first_step(_push(job)) if isinstance(job, Generator) else Push(job)


def _push(job: Incremental[JobPayload]) -> Incremental[Push]:
    return Push((yield from job))


def _after_first_step(steps: Incremental[T]) -> T | Incremental[T]:
    """Run the first step; return the result if it was the only step, as for most jobs, else the remaining steps."""
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    return steps


def _parse_push_bulk(text: str) -> PushBulk:
    return PushBulk([_job_or_refusal(item) for item in ([] if text.strip() == "null" else jsontext.items(text))])


def _job_or_refusal(text: str) -> JobPayload | InvalidPayload:
    try:
        return parse_job(text)
    except InvalidPayload as refusal:
        return refusal


def _parse_long_push(text: str) -> Incremental[Push]:
    return Push((yield from parse_long_job(text)))


def _parse_long_push_bulk(text: str) -> Incremental[PushBulk]:
    accepted: list[JobPayload] = []
    refused: dict[str, InvalidPayload] = {}  # by jid, like the reply, so that repeated jids need no memory
    jobs = looked_up = 0
    jobs_in_step = characters_in_step = 0
    parts = jsontext.items(text) if len(text) <= CUT_AT_ONCE else incremental.cut(text, "[]")
    for part in parts:
        if part is None:
            yield
            continue
        jobs += 1
        check_count("PUSHB", "jobs", jobs)
        jobs_in_step, characters_in_step = jobs_in_step + 1, characters_in_step + len(part)
        # Pause after 20 small jobs or a few large ones.
        if jobs_in_step == JOBS_A_STEP or characters_in_step > SHORT:
            jobs_in_step = characters_in_step = 0
            yield
        job = yield from _long_job_or_refusal(part)
        if isinstance(job, JobPayload):
            if job.options is not None and (job.options.may_block or job.options.lock_key is not None):
                looked_up += 1
                check_count("PUSHB", LOOKED_UP, looked_up)
            accepted.append(job)
            continue
        refused[job.jid] = job
    return PushBulk([*accepted, *refused.values()])


def _long_job_or_refusal(part: str) -> Incremental[JobPayload | InvalidPayload]:
    text = part.strip(" \t\r\n")
    try:
        return (yield from parse_long_job(text))
    except InvalidPayload as refusal:
        yield from incremental.check_value(text)  # invalid JSON rejects the whole PUSHB
        # A new exception: the traceback of the old one keeps the parts of the job in memory.
        return InvalidPayload(str(refusal), jid=refusal.jid)


def _parse_fetch(text: str) -> Fetch:
    names = text.split() or [DEFAULT_QUEUE]
    check_count("FETCH", "queues", len(names))
    # A name that no queue can have is ignored, not refused: clients name queues of other systems (ADR 0033).
    return Fetch(tuple(dict.fromkeys(filter(is_queue_name, names))))


def _parse_ack(text: str) -> AckJob:
    jid = parse_object("ACK", text).get("jid")
    if not isinstance(jid, str):
        raise InvalidPayload(f"invalid ACK {text[:200]}: jid: expected a string")
    check_length("ACK", "jid", jid)
    return AckJob(jid)


def _parse_fail(text: str) -> FailJob:
    return _build_fail(parse_object("FAIL", text))


def _build_fail(members: dict[str, Any]) -> FailJob:
    jid = field("FAIL", members, "jid", str, "")
    if not jid:
        raise InvalidPayload("missing JID: expected the jid of the job that failed")
    check_length("FAIL", "jid", jid)
    lines = field("FAIL", members, "backtrace", list, [])
    return FailJob(
        jid=jid,
        errtype=field("FAIL", members, "errtype", str, "").strip(),
        message=field("FAIL", members, "message", str, "").strip(),
        # Other elements, such as null, are left out: a job whose FAIL is refused stays working.
        backtrace=tuple([line for line in lines if isinstance(line, str)][:MAX_BACKTRACE_LINES]),
    )


def _parse_long_fail(text: str) -> Incremental[FailJob]:
    yield from incremental.check_depth(text)
    raw = yield from incremental.members(text, max_count=MAX_MEMBERS, rejects_duplicates=False)
    members = {key: decode_value(value) for key, value in raw.items() if key in ("jid", "errtype", "message")}
    lines = yield from parse_strings(raw.get("backtrace", "[]"), max_count=MAX_BACKTRACE_LINES, skips_others=True)
    # Not an array: `_build_fail` raises the error, except for null.
    members["backtrace"] = decode_value(raw["backtrace"]) if lines is None else lines
    return _build_fail(members)


def _parse_beat(text: str) -> BeatWorker:
    members = parse_object("BEAT", text)
    wid = parse_wid("BEAT", members)
    if not wid:
        raise InvalidPayload(f"invalid BEAT {text[:200]}: wid: expected the wid of a worker that has sent HELLO")
    return BeatWorker(
        Beat(
            wid=wid,
            current_state=field("BEAT", members, "current_state", str, ""),
            rss_kb=field("BEAT", members, "rss_kb", int, 0),
        )
    )


def _parse_second_hello(_: str) -> Command:
    # HELLO is valid only as the first line. The message is the original server's.
    raise UnknownCommand("unknown command HELLO")


VERBS: dict[str, Callable[[str], Command | Incremental[Any]]] = {
    "HELLO": _parse_second_hello,
    "END": lambda _: End(),
    "INFO": lambda _: Info(),
    "PUSH": _parse_push,
    "PUSHB": _parse_push_bulk,
    "FETCH": _parse_fetch,
    "ACK": _parse_ack,
    "FAIL": _parse_fail,
    "BEAT": _parse_beat,
    **batches.VERBS,
    **management.VERBS,
    **tracking.VERBS,
}

_LONG: dict[bytes, Callable[[str], Incremental[Any]]] = {
    b"PUSH": _parse_long_push,
    b"PUSHB": _parse_long_push_bulk,
    b"FAIL": _parse_long_fail,
    b"MUTATE": management.parse_mutate,
}
"""Parsers in steps, for the verbs with a job or a list."""
