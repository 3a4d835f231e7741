"""Parse and validate a pushed job; each error names the field and the rule (W9 to W11).

Pure: no I/O. `parse_job` is the entry point. The client's text is stored verbatim; only empty members and members
reserved for the server are removed or filled in.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime

import msgspec

from ..errors import InvalidPayload
from .job_options import compute_ttl, read_options, read_options_in_steps, takes_long
from .json import incremental, jsontext
from .json.fields import ABSENT, abbreviate, instant, integer, string
from .json.incremental import Incremental
from .payloads import (
    DEFAULT_QUEUE,
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

MAX_MEMBERS = 10_000
"""Members allowed in a long job, and in its `custom`. Bounds the cost of parsing; real jobs have far fewer."""

MAX_INTEGER = 2**31 - 1
"""The largest value of an integer column."""

_EMPTY = (ABSENT, '""')
# Members that only the server writes (W11); a client's values for them are dropped.
_server_members = frozenset({"enqueued_at", "failure"})


def parse_job(text: str) -> JobPayload:
    """Validate a job sent by a client and return it ready to store.

    Raises InvalidPayload naming the field (W9).
    """
    # Most jobs are parsed directly; only jobs with long arguments need the generator.
    return incremental.run(job) if isinstance(job := begin_job(text), Generator) else job


def begin_job(text: str) -> JobPayload | Incremental[JobPayload]:
    """Parse a job; return steps instead of the job if long arguments must be compared.

    The steps raise InvalidPayload only.
    """
    members = jsontext.members(text)
    # First, so that every later error carries the jid, by which PUSHB reports it (W12).
    jid = _jid(members.get("jid", ABSENT))
    try:
        custom = _custom(members)
        job = _plain_job(jid, members, text, custom)
        if takes_long(members["args"], custom):
            return _add_options(job, members["args"], custom)
        options = read_options(job.jobtype, job.queue, members["args"], custom)
        return job if options is None else msgspec.structs.replace(job, options=options)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=jid) from None


def parse_long_job(text: str) -> Incremental[JobPayload]:
    """Parse a long job in steps throughout.

    A long job, and its `custom`, may have at most 10,000 members each.
    """
    if len(text) <= incremental.SHORT:
        job_or_steps = begin_job(text)
        return (yield from job_or_steps) if isinstance(job_or_steps, Generator) else job_or_steps
    # Depth first: it protects the recursive parsers below.
    yield from incremental.check_depth(text)
    members = yield from incremental.members(text, max_count=MAX_MEMBERS)
    jid = _jid(members.get("jid", ABSENT))
    try:
        if len(raw := members.get("custom", ABSENT)) > incremental.SHORT and raw.startswith("{"):
            # A repeated key is refused at the job's top level only (W7).
            custom = yield from incremental.members(raw, max_count=MAX_MEMBERS, rejects_duplicates=False)
        else:
            custom = _custom(members)
        job = _plain_job(jid, members, text, custom)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=jid) from None
    return (yield from _add_options(job, members["args"], custom))


def _add_options(job: JobPayload, args: str, custom: dict[str, str]) -> Incremental[JobPayload]:
    try:
        options = yield from read_options_in_steps(job.jobtype, job.queue, args, custom)
    except InvalidPayload as error:
        raise InvalidPayload(str(error), jid=job.jid) from None
    return msgspec.structs.replace(job, options=options)


def _plain_job(jid: str, members: dict[str, str], text: str, custom: dict[str, str]) -> JobPayload:
    """Build the job without its options."""
    jobtype = _jobtype(members.get("jobtype", ABSENT))
    if not members.get("args", "").startswith("["):
        raise InvalidPayload(
            f"jobs must have an args parameter: args: expected an array, got {_describe_member(members, 'args')}"
        )
    reserve_for = _reserve_for(members)
    at = _at(members)
    # Validated only (W9): `created_at` stays in the text as it was sent (W11).
    if members.get("created_at") != '""':
        instant(members, "created_at")
    queue = _queue(members)
    return JobPayload(
        jid=jid,
        jobtype=jobtype,
        queue=queue,
        # The original server drops `priority`; the specification and this server honour it.
        priority=priority_from_wire(integer(members, "priority", default=5, low=1, high=9)),
        retry=max(-1, min(integer(members, "retry", default=DEFAULT_RETRY), MAX_INTEGER)),
        reserve_for=reserve_for,
        backtrace=max(-1, min(integer(members, "backtrace", default=0), MAX_BACKTRACE_LINES)),
        at=at,
        result_ttl=compute_ttl(custom, _result_ttl(custom)),
        text=_stored_text(members, text, queue),
    )


def _jid(raw: str) -> str:
    jid = string(raw)
    if jid is None or not MIN_JID <= len(jid) <= MAX_NAME or "\x00" in jid or not _is_storable(jid):
        raise InvalidPayload(
            f"jobs must have a reasonable jid parameter: jid: expected a string of {MIN_JID} to {MAX_NAME}"
            f" characters without NUL, got {abbreviate(raw)}",
            jid=jid if jid and _is_storable(jid) else "",
        )
    return jid


def _jobtype(raw: str) -> str:
    jobtype = string(raw)
    if not jobtype or len(jobtype) > MAX_NAME or "\x00" in jobtype or not _is_storable(jobtype):
        raise InvalidPayload(
            f"jobs must have a jobtype parameter: jobtype: expected a string of 1 to {MAX_NAME}"
            f" characters without NUL, got {abbreviate(raw)}"
        )
    return jobtype


def _reserve_for(members: dict[str, str]) -> int:
    seconds = integer(members, "reserve_for", default=DEFAULT_RESERVE_FOR)
    if seconds > MAX_RESERVE_FOR:
        raise InvalidPayload(
            f"jobs cannot be reserved for more than one day: reserve_for: expected at most {MAX_RESERVE_FOR}"
            f" seconds, got {_describe_member(members, 'reserve_for')}"
        )
    # A value below the minimum is raised, not refused, as in the original server.
    return max(seconds, MIN_RESERVE_FOR)


def _at(members: dict[str, str]) -> datetime | None:
    return None if members.get("at") == '""' else instant(members, "at")


def _queue(members: dict[str, str]) -> str:
    raw = members.get("queue", ABSENT)
    if raw == ABSENT:
        return DEFAULT_QUEUE
    value = string(raw)
    if value is None:
        raise InvalidPayload(f"queue: expected a string, got {abbreviate(raw)}")
    return queue_name(value)


def _custom(members: dict[str, str]) -> dict[str, str]:
    raw = members.get("custom", ABSENT)
    if raw == ABSENT:
        return {}
    if not raw.startswith("{"):
        raise InvalidPayload(f"custom: expected an object or null, got {abbreviate(raw)}")
    try:
        return jsontext.members(raw)
    except InvalidPayload:  # a repeated key is refused at the job's top level only (W7)
        return jsontext.last_members(raw)


def _result_ttl(custom: dict[str, str]) -> int | None:
    if custom.get("result_ttl", ABSENT) == ABSENT:
        return None
    return integer(custom, "result_ttl", default=0, low=0, high=MAX_INTEGER, within="custom.")


def _is_storable(text: str) -> bool:
    # ASCII is the common case and needs no encoding; lone surrogates cannot be stored as UTF-8.
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored_text(members: dict[str, str], text: str, queue: str) -> str:
    """Return the client's text with queue and retry filled in.

    The text is rebuilt only if a member must be removed or replaced.
    """
    # An empty string counts as absent, like null (see `_EMPTY`).
    must_rebuild = not _server_members.isdisjoint(members) or members.get("created_at") == '""'
    if not must_rebuild and members.get("queue", ABSENT) not in _EMPTY and members.get("retry", ABSENT) not in _EMPTY:
        # The common case: a complete job is stored byte for byte, without building the text a second time.
        return text.strip(" \t\r\n")
    missing = [
        (key, value)
        for key, value in (("queue", f'"{queue}"'), ("retry", str(DEFAULT_RETRY)))
        if members.get(key, ABSENT) in _EMPTY
    ]
    if must_rebuild or any(key in members for key, _ in missing):
        removed = {*_server_members, *(key for key, _ in missing)} | (
            {"created_at"} if members.get("created_at") == '""' else set()
        )
        return jsontext.join([*((key, value) for key, value in members.items() if key not in removed), *missing])
    return jsontext.append(text, missing)


def _describe_member(members: dict[str, str], field: str) -> str:
    return abbreviate(members[field]) if field in members else "nothing"
