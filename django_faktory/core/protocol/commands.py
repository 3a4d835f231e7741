"""Parse command lines and write them. `VERBS` has the parser of each verb, `Command` is the union of all results.

Parsers check shape only. Error messages follow the original server's where it has one. A long PUSHB is parsed in parts,
so that an event loop can serve other clients in between. Rules: W5, W9, W12, W16, W17, W21.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec

from ...errors import InvalidPayload, UnknownCommand
from ..job_parser import parse_job
from ..json import jsontext
from ..payloads import DEFAULT_QUEUE, MAX_BACKTRACE_LINES, MAX_NAME, Beat, JobPayload, WorkerIdentity, is_queue_name
from . import batches, management, tracking
from .batches import BatchCommand
from .fields import field, format_line, parse_object, parse_wid
from .limits import LOOKED_UP, check_count, check_length, check_line
from .management import ManagementCommand
from .tracking import TrackingCommand

VERSION = 2
NO_QUEUE = "*"
"""Invalid queue name, sent instead of an empty list, which would mean the default queue."""

PART = 64 * 1024
"""Characters of jobs of a PUSHB that are parsed between two pauses: 10 ms, or 30 ms if all arguments are compared."""

WHOLE_BYTES = 4096
"""Longest line that is parsed without being buffered."""

CACHED_CHARACTERS, CACHED_FETCHES = 512, 256
"""Maximum length and number of cached FETCH commands: clients send the same few lines all the time."""

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
    return parse_checked(line)


def parse_checked(line: str) -> Command:
    """Parse a line whose length has been checked."""
    verb, _, rest = line.partition(" ")
    parser = VERBS.get(verb)
    if parser is None:
        raise UnknownCommand(f"unknown command {verb[:100]}")
    return parser(rest)


def parse_whole(data: bytes) -> Command | None:
    """Return the command if `data` is one whole valid PUSH, FETCH or ACK, else None (ADR 0005).

    Then the line is buffered and parsed again, which raises the error.
    """
    if len(data) > WHOLE_BYTES or data.find(b"\n") != len(data) - 1:
        return None
    try:
        verb, _, rest = str(data, "utf-8").removesuffix("\n").removesuffix("\r").partition(" ")
        if verb == "PUSH":
            return Push(parse_job(rest))
        return _parse_ack(rest) if verb == "ACK" else _parse_fetch(rest) if verb == "FETCH" else None
    except (InvalidPayload, UnicodeDecodeError):
        return None


def parse_long(line: bytearray) -> Generator[None, None, Command]:
    """Parse a long line whose length has been checked, with pauses; empties `line`."""
    text = decode_line(line)
    line.clear()  # free the bytes before the jobs are built
    yield
    verb, _, text = text.partition(" ")
    if verb == "PUSH":
        return Push((yield from _parse_long_job(text)))
    if verb == "PUSHB":
        jobs: list[JobPayload | InvalidPayload] = []
        yield from _parse_jobs(text, jobs)
        return PushBulk(jobs)
    return VERBS[verb](text)


def _parse_long_job(text: str) -> Generator[None, None, JobPayload]:
    yield from jsontext.check_depth_in_parts(text)
    return parse_job(text, is_shallow=True)


def decode_line(line: bytes | bytearray) -> str:
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


def _parse_push(text: str) -> Push:
    return Push(parse_job(text))


def _parse_push_bulk(text: str) -> PushBulk:
    jobs: list[JobPayload | InvalidPayload] = []
    for _ in _parse_jobs(text, jobs):
        pass
    return PushBulk(jobs)


def _parse_jobs(text: str, jobs: list[JobPayload | InvalidPayload]) -> Generator[None]:
    """Add the jobs in `text` to `jobs`, and the refusals; pause after each part."""
    refused: dict[str, InvalidPayload] = {}  # by jid, like the reply, so that repeated jids need no memory
    items = [] if text.strip() == "null" else jsontext.items(text)
    check_count("PUSHB", "jobs", len(items))
    looked_up = characters = 0
    for item in items:
        try:
            job = (yield from _parse_long_job(item)) if len(item) > PART else parse_job(item)
        except InvalidPayload as refusal:
            # Without its traceback, which keeps the parts of the job in memory.
            refused[refusal.jid] = refusal.with_traceback(None)
        else:
            if job.options is not None and (job.options.may_block or job.options.lock_key is not None):
                looked_up += 1
                check_count("PUSHB", LOOKED_UP, looked_up)
            jobs.append(job)
        characters += len(item)
        if characters > PART:
            characters = 0
            yield
    jobs += refused.values()


def _parse_fetch(text: str) -> Fetch:
    return _parse_cached_fetch(text) if len(text) <= CACHED_CHARACTERS else _build_fetch(text)


def _build_fetch(text: str) -> Fetch:
    names = text.split() or [DEFAULT_QUEUE]
    check_count("FETCH", "queues", len(names))
    # A name that no queue can have is ignored, not refused: clients name queues of other systems (ADR 0033).
    return Fetch(tuple(dict.fromkeys(filter(is_queue_name, names))))


_parse_cached_fetch = lru_cache(CACHED_FETCHES)(_build_fetch)


class _Ack(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    jid: str


_ack_decoder = msgspec.json.Decoder(_Ack)


def _parse_ack(text: str) -> AckJob:
    try:
        jid: Any = _ack_decoder.decode(text).jid
    except jsontext.REFUSALS:
        jid = parse_object("ACK", text).get("jid")
    if not isinstance(jid, str):
        raise InvalidPayload(f"invalid ACK {text[:200]}: jid: expected a string")
    if len(jid) > MAX_NAME:
        check_length("ACK", "jid", jid)
    return AckJob(jid)


class _Fail(msgspec.Struct, gc=False):
    """The members of a FAIL that are read."""

    jid: str | None = None
    errtype: str | None = None
    message: str | None = None
    backtrace: msgspec.Raw = msgspec.Raw(b"[]")


_fail_decoder = msgspec.json.Decoder(_Fail)


def _parse_fail(text: str) -> FailJob:
    try:
        members = msgspec.structs.asdict(_fail_decoder.decode(text))
    except jsontext.REFUSALS as error:
        jsontext.refuse_long(text, error)
        members = parse_object("FAIL", text)
    else:
        raw = str(members["backtrace"], "utf-8")
        members["backtrace"] = _first_strings(raw) if raw.startswith("[") else jsontext.decode(raw)
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


def _first_strings(array: str) -> list[str]:
    strings = (jsontext.decode(item) for item in jsontext.items(array) if item.startswith('"'))
    return list(islice(strings, MAX_BACKTRACE_LINES))


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


VERBS: dict[str, Callable[[str], Command]] = {
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
