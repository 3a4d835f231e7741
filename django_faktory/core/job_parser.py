"""Parse and validate a pushed job; each error names the field and the rule (W9 to W11).

Pure: no I/O. `parse_job` decodes the members that the server reads with one typed decoder; arguments stay text. The
client's text is stored verbatim; only empty members and members reserved for the server are removed or filled in.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ..errors import InvalidPayload
from .job_options import READ_KEYS, compute_ttl, read_options
from .json import jsontext
from .json.fields import ABSENT, abbreviate, integer, parse_instant
from .payloads import (
    DEFAULT_RESERVE_FOR,
    DEFAULT_RETRY,
    MAX_BACKTRACE_LINES,
    MAX_NAME,
    MAX_RESERVE_FOR,
    MIN_JID,
    MIN_RESERVE_FOR,
    JobPayload,
    priority_from_wire,
    queue_name,
)

MAX_OTHER = 1024 * 1024
"""Characters of a job besides its arguments and `custom`: its keys are scanned if one may be repeated."""

MAX_MEMBERS = 100
"""Members of a job. Bounds the cost of reading it; real jobs have far fewer."""

MAX_INTEGER = 2**31 - 1
"""The largest value of an integer column."""

_SHORT = 4096
"""Characters of a job up to which counting quotes is faster than scanning its keys."""

_EXPECTED = {
    "jid": f"jobs must have a reasonable jid parameter: jid: expected a string of {MIN_JID} to {MAX_NAME}"
    " characters without NUL",
    "jobtype": f"jobs must have a jobtype parameter: jobtype: expected a string of 1 to {MAX_NAME}"
    " characters without NUL",
    "args": "jobs must have an args parameter: args: expected an array",
    "queue": "queue: expected a string",
    "at": "invalid timestamp for 'at': expected an RFC 3339 string",
    "created_at": "invalid timestamp for 'created_at': expected an RFC 3339 string",
    "priority": "priority: expected an integer from 1 to 9",
    "retry": "retry: expected an integer",
    "reserve_for": "reserve_for: expected an integer",
    "backtrace": "backtrace: expected an integer",
    "custom": "custom: expected an object or null",
}
"""Beginning of the error for each member; where the original server has a message, it begins with that."""


class _Job(msgspec.Struct, gc=False):
    """The members that the server reads."""

    jid: str | UnsetType | None = UNSET
    jobtype: str | UnsetType | None = UNSET
    args: Raw | UnsetType = UNSET
    queue: str | UnsetType | None = UNSET
    retry: int | UnsetType | None = UNSET
    created_at: str | UnsetType | None = UNSET
    custom: Raw | UnsetType = UNSET
    at: str | UnsetType | None = UNSET
    priority: int | UnsetType | None = UNSET
    reserve_for: int | UnsetType | None = UNSET
    backtrace: int | UnsetType | None = UNSET
    # Only the server writes these (W11); a client's values for them are dropped.
    enqueued_at: Raw | UnsetType = UNSET
    failure: Raw | UnsetType = UNSET


_RAW = ("args", "custom", "enqueued_at", "failure")
_COUNT = len(_Job.__struct_fields__)
_job_decoder = msgspec.json.Decoder(_Job)
# Other members of `custom` are skipped, however many.
_custom_decoder = msgspec.json.Decoder(
    msgspec.defstruct("_Custom", [(key, Raw | UnsetType, UNSET) for key in READ_KEYS], gc=False)
)


def parse_job(text: str, *, is_shallow: bool = False) -> JobPayload:
    """Validate a job sent by a client and return it ready to store. `is_shallow`: its depth has been checked.

    Raises InvalidPayload naming the field (W9).
    """
    try:
        job = _job_decoder.decode(text)
    except jsontext.REFUSALS as error:
        jsontext.refuse_long(text, error)
        job = _read_each_member(text)
    # msgspec accepts too many levels and repeated keys, W7 does not.
    if not is_shallow:
        jsontext.check_depth(text)
    args = ABSENT if job.args is UNSET else str(job.args, "utf-8")
    custom_text = ABSENT if job.custom is UNSET else str(job.custom, "utf-8")
    # A job has no repeated and no other key if there is one quote and colon for each member that was read. Without
    # escapes a string contains no quote, and a quote before a colon ends a key.
    if (
        len(text) > _SHORT
        or ("\\" in text and text.count("\\") > args.count("\\") + custom_text.count("\\"))
        or (" :" in text or "\t:" in text or "\r:" in text or "\n:" in text)
        or text.count('":') - args.count('":') - custom_text.count('":')
        != _COUNT - msgspec.structs.astuple(job).count(UNSET)
    ):
        _refuse_repeated_keys(text, args, custom_text)
    jid = job.jid
    # First, so that every later error carries the jid, by which PUSHB reports it (W12).
    if not isinstance(jid, str) or not MIN_JID <= len(jid) <= MAX_NAME or "\x00" in jid:
        raise _refusal("jid", jid, jid)
    try:
        return _build(job, jid, text, args, custom_text)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=jid) from None


def _build(job: _Job, jid: str, text: str, args: str, custom_text: str) -> JobPayload:
    jobtype = job.jobtype
    if not isinstance(jobtype, str) or not 0 < len(jobtype) <= MAX_NAME or "\x00" in jobtype:
        raise _refusal("jobtype", jobtype)
    if not args.startswith("["):
        raise InvalidPayload(f"{_EXPECTED['args']}, got {abbreviate(args)}")
    reserve_for = job.reserve_for if isinstance(job.reserve_for, int) else DEFAULT_RESERVE_FOR
    if reserve_for > MAX_RESERVE_FOR:
        raise InvalidPayload(
            f"jobs cannot be reserved for more than one day: reserve_for: expected at most {MAX_RESERVE_FOR}"
            f" seconds, got {abbreviate(str(reserve_for))}"
        )
    # Validated only (W9): `created_at` stays in the text as it was sent (W11).
    if job.created_at:
        parse_instant("created_at", job.created_at)
    queue = queue_name(job.queue or "")
    priority = job.priority if isinstance(job.priority, int) else 5
    if not 1 <= priority <= 9:
        raise _refusal("priority", priority)
    retry = job.retry if isinstance(job.retry, int) else DEFAULT_RETRY
    backtrace = job.backtrace if isinstance(job.backtrace, int) else 0
    custom = {} if custom_text in (ABSENT, "{}") else _read_custom(custom_text)
    is_complete = bool(job.queue) and isinstance(job.retry, int) and job.created_at != ""
    if not is_complete or job.enqueued_at is not UNSET or job.failure is not UNSET:
        text = _complete(job, text, queue)
    return JobPayload(
        jid=jid,
        jobtype=jobtype,
        # The common case, a complete job, is stored byte for byte, without building the text a second time.
        text=text.strip(" \t\r\n"),
        queue=queue,
        # The original server drops `priority`; the specification and this server honour it.
        priority=0 if priority == 5 else priority_from_wire(priority),
        retry=max(-1, min(retry, MAX_INTEGER)),
        # A value below the minimum is raised, not refused, as in the original server.
        reserve_for=max(reserve_for, MIN_RESERVE_FOR),
        backtrace=max(-1, min(backtrace, MAX_BACKTRACE_LINES)),
        at=parse_instant("at", job.at) if job.at else None,
        result_ttl=compute_ttl(custom, _result_ttl(custom)) if custom else None,
        options=read_options(jobtype, queue, args, custom) if custom else None,
    )


def _refusal(name: str, value: object, jid: str | UnsetType | None = "") -> InvalidPayload:
    raw = ABSENT if value is UNSET else jsontext.encode(value)
    return InvalidPayload(f"{_EXPECTED[name]}, got {abbreviate(raw)}", jid=jid if isinstance(jid, str) else "")


def _read_each_member(text: str) -> _Job:
    """Read a job that msgspec refuses as a whole; the error names the member that is wrong.

    Half a surrogate pair, which msgspec refuses, is allowed in arguments, in `custom` and in members that are not read.
    """
    members, job = jsontext.members(text), _Job()
    for name in _Job.__struct_fields__:
        raw = members.get(name, ABSENT)
        if name in members and name in _RAW:
            setattr(job, name, Raw(raw.encode()))
        elif name in members:
            try:
                setattr(job, name, getattr(_job_decoder.decode(f'{{"{name}":{raw}}}'), name))
            except jsontext.REFUSALS:
                jid = job.jid if isinstance(job.jid, str) else ""
                raise InvalidPayload(f"{_EXPECTED[name]}, got {abbreviate(raw)}", jid=jid) from None
    return job


def _refuse_repeated_keys(text: str, args: str, custom: str) -> None:
    if (size := len(text) - len(args) - len(custom)) > MAX_OTHER:
        raise InvalidPayload(
            f"invalid JSON: expected at most {MAX_OTHER} characters besides args and custom, got {size}"
        )
    jsontext.refuse_repeated_keys(text, {"args": args, "custom": custom}, max_count=MAX_MEMBERS)


def _read_custom(text: str) -> dict[str, str]:
    """Return the members of `custom` that the server reads; of a repeated key the last one (W7)."""
    if not text.startswith("{"):
        raise InvalidPayload(f"{_EXPECTED['custom']}, got {abbreviate(text)}")
    try:
        values = msgspec.structs.asdict(_custom_decoder.decode(text))
    except jsontext.REFUSALS:  # half a surrogate pair
        return jsontext.last_members(text)
    return {key: str(value, "utf-8") for key, value in values.items() if value is not UNSET}


def _result_ttl(custom: dict[str, str]) -> int | None:
    if custom.get("result_ttl", ABSENT) == ABSENT:
        return None
    return integer(custom, "result_ttl", default=0, low=0, high=MAX_INTEGER, within="custom.")


def _complete(job: _Job, text: str, queue: str) -> str:
    """Return the client's text with queue and retry filled in, and without members that only the server writes.

    It is rebuilt only if a member must be removed or replaced.
    """
    missing = [] if job.queue else [("queue", f'"{queue}"')]
    if not isinstance(job.retry, int):
        missing.append(("retry", str(DEFAULT_RETRY)))
    removed = {name for name in ("enqueued_at", "failure") if getattr(job, name) is not UNSET}
    # An empty string counts as absent, like null.
    removed |= {name for name in ("queue", "retry") if getattr(job, name) in (None, "")}
    removed |= {"created_at"} if job.created_at == "" else set()
    if not removed:
        return jsontext.append(text, missing)
    members = jsontext.members(text)
    return jsontext.join([*((key, value) for key, value in members.items() if key not in removed), *missing])
