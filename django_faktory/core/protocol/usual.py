"""Parse a PUSH, FETCH or ACK of the usual shape in one step: the first step of the server's hot path (ADR 0041).

`parse_usual` returns the same command as `commands.begin`, or None for any other line, which `begin` then parses. It
accepts no line that `begin` refuses. `tests/server/test_usual_lines.py` compares both. Pure.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

import msgspec

from ...errors import FaktoryError
from ..job_parser import MAX_INTEGER
from ..json.jsontext import MAX_DEPTH
from ..payloads import (
    DEFAULT_RESERVE_FOR,
    MAX_BACKTRACE_LINES,
    MAX_NAME,
    MAX_RESERVE_FOR,
    MIN_JID,
    MIN_RESERVE_FOR,
    JobPayload,
    is_queue_name,
    priority_from_wire,
)
from .commands import AckJob, Command, Fetch, Push, begin

USUAL_BYTES = 4096
"""Longest line that is parsed here, so that a job weighs 1 in a transaction and no line needs steps."""

FETCH_BYTES, FETCHES = 512, 256
"""Maximum length and number of cached FETCH lines: clients send the same few lines all the time."""

DEFAULT_PRIORITY = 5
_NO_OPTIONS = msgspec.Raw(b"{}")

# A part of RFC 3339 whose other rules `fromisoformat` checks; the general parser reads the rest.
_utc = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z", re.ASCII)


class _Job(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The members of a job without options."""

    jid: str
    jobtype: str
    args: msgspec.Raw
    queue: str
    retry: int
    created_at: str | None = None
    reserve_for: int = DEFAULT_RESERVE_FOR
    backtrace: int = 0
    priority: int = DEFAULT_PRIORITY
    custom: msgspec.Raw = _NO_OPTIONS


class _Ack(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    jid: str


_job_decoder, _ack_decoder = msgspec.json.Decoder(_Job), msgspec.json.Decoder(_Ack)
_keys = tuple(f'"{name}"' for name in _Job.__struct_fields__)


def parse_usual(data: bytes) -> Command | None:
    """Return the command if `data` is one whole line of the usual shape, else None."""
    if len(data) > USUAL_BYTES or data.find(b"\n") != len(data) - 1:
        return None
    try:
        if data.startswith(b"PUSH {"):
            return _parse_push(str(data, "utf-8")[5:].rstrip("\r\n"))
        if data.startswith(b"ACK {"):
            jid = _ack_decoder.decode(data[4:]).jid
            return AckJob(jid) if len(jid) <= MAX_NAME else None
        if data.startswith(b"FETCH ") and len(data) <= FETCH_BYTES:
            return _parse_fetch(data)
    except (msgspec.MsgspecError, ValueError, FaktoryError):  # `begin` parses the line again and raises the error
        pass
    return None


def _parse_push(text: str) -> Push | None:
    # Before the decoder, which is recursive.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        return None
    job = _job_decoder.decode(text)
    # The decoder accepts a repeated key, which W7 refuses. Without \u each key is in the text verbatim: a key that the
    # text contains once is not repeated. An argument that equals a key is rare, and left to the general parser.
    if "\\u" in text or max(map(text.count, _keys)) > 1:
        return None
    if job.created_at is not None:
        if not _utc.fullmatch(job.created_at):
            return None
        datetime.fromisoformat(job.created_at)
    is_valid = (
        MIN_JID <= len(job.jid) <= MAX_NAME
        and 0 < len(job.jobtype) <= MAX_NAME
        and is_queue_name(job.queue)
        and job.reserve_for <= MAX_RESERVE_FOR
        and 1 <= job.priority <= 9
        and (job.custom is _NO_OPTIONS or bytes(job.custom) == b"{}")
        and bytes(job.args).startswith(b"[")
        and text.endswith("}")
    )
    if not is_valid:
        return None
    return Push(
        JobPayload(
            jid=job.jid,
            jobtype=job.jobtype,
            text=text,
            queue=job.queue,
            priority=priority_from_wire(job.priority),
            retry=max(-1, min(job.retry, MAX_INTEGER)),
            reserve_for=max(job.reserve_for, MIN_RESERVE_FOR),
            backtrace=max(-1, min(job.backtrace, MAX_BACKTRACE_LINES)),
        )
    )


@lru_cache(FETCHES)
def _parse_fetch(data: bytes) -> Command | None:
    command = begin(str(data, "utf-8").rstrip("\r\n"))
    return command if isinstance(command, Fetch) else None
