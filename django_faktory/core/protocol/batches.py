"""Parse and write BATCH NEW, OPEN, COMMIT and STATUS.

`parse_batch` parses a command; `format_status` and `parse_status` write and read the reply to STATUS. Checks shape
only. Rules: W5, W26.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec

from ...errors import InvalidPayload
from ..batch_rules import Kind
from ..job_parser import parse_job
from ..json import jsontext
from ..json.fields import abbreviate
from ..payloads import BatchStatus, JobPayload, NewBatch, parse_instant, rfc3339
from .fields import field, format_line, parse_object
from .limits import check_name

_NOT_IN_CALLBACKS = ("bid", "unique_for")
"""Options that could keep a callback from being enqueued, or add it to a batch."""


class BatchNew(msgspec.Struct, frozen=True):
    """BATCH NEW: create a batch with its callbacks."""

    batch: NewBatch

    def line(self) -> bytes:
        """Return the line that a client sends."""
        batch = self.batch
        members = [
            (key, jsontext.encode(text))
            for key, text in (("description", batch.description), ("parent_bid", batch.parent_bid))
            if text
        ]
        members += [(kind, job.text) for kind in Kind if (job := getattr(batch, kind)) is not None]
        return format_line("BATCH", f"NEW {jsontext.join(members)}")


class BatchOpen(msgspec.Struct, frozen=True):
    """BATCH OPEN: reopen a committed batch, so that jobs can be added."""

    bid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("BATCH", f"OPEN {self.bid}")


class BatchCommit(msgspec.Struct, frozen=True):
    """BATCH COMMIT: the batch is complete, so its callbacks may be enqueued."""

    bid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("BATCH", f"COMMIT {self.bid}")


class BatchAsk(msgspec.Struct, frozen=True):
    """BATCH STATUS: ask for the progress of a batch."""

    bid: str

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return format_line("BATCH", f"STATUS {self.bid}")


BatchCommand = BatchNew | BatchOpen | BatchCommit | BatchAsk
_BY_BID: dict[str, type[BatchOpen | BatchCommit | BatchAsk]] = {
    "OPEN": BatchOpen,
    "COMMIT": BatchCommit,
    "STATUS": BatchAsk,
}


def parse_batch(text: str) -> BatchCommand:
    """Parse the text after BATCH: a sub-verb in any case, then an object or a bid."""
    verb, _, arguments = text.strip().partition(" ")
    if verb.upper() == "NEW":
        return _parse_new(arguments)
    command = _BY_BID.get(verb.upper())
    if command is None:
        actual = abbreviate(verb) or "nothing"
        raise InvalidPayload(f"invalid BATCH: expected NEW {{…}}, OPEN bid, COMMIT bid or STATUS bid, got {actual}")
    bid = arguments.strip()
    if not bid or " " in bid:  # a space: two ids, of which the second would be ignored
        raise InvalidPayload(
            f"invalid BATCH {verb.upper()}: expected the id of a batch, got {abbreviate(bid) or 'nothing'}"
        )
    check_name(f"BATCH {verb.upper()}", "bid", bid)
    return command(bid)


def format_status(status: BatchStatus) -> str:
    """Return the JSON of the reply to BATCH STATUS."""
    members: dict[str, Any] = {"bid": status.bid}
    members |= {key: text for key in ("parent_bid", "description") if (text := getattr(status, key))}
    members["created_at"] = "" if status.created_at is None else rfc3339(status.created_at)
    members |= {key: getattr(status, key) for key in ("total", "pending", "failed", "complete_st", "success_st")}
    if status.is_broken:
        members["broken"] = True
    return jsontext.encode(members)


def parse_status(members: dict[str, Any]) -> BatchStatus:
    """Parse the reply to BATCH STATUS of any server; missing members get defaults."""
    created_at = field("BATCH", members, "created_at", str, "")
    texts = {key: field("BATCH", members, key, str, "") for key in ("bid", "parent_bid", "description")}
    progress = {key: field("BATCH", members, key, str, "") for key in ("complete_st", "success_st")}
    numbers = {key: field("BATCH", members, key, int, 0) for key in ("total", "pending", "failed")}
    return BatchStatus(
        **texts,
        **progress,
        **numbers,
        created_at=parse_instant("created_at", created_at) if created_at else None,
        is_broken=members.get("broken") is True,
    )


def _parse_new(text: str) -> BatchNew:
    members = parse_object("BATCH NEW", text)
    # Like the object, these are of the last of repeated keys, as common JSON parsers keep it.
    raw_members = jsontext.last_members(text)
    if bid := field("BATCH NEW", members, "bid", str, ""):
        raise InvalidPayload(
            f"invalid BATCH NEW: bid: expected none, because the server assigns it, got {abbreviate(bid)}"
        )
    parent_bid = field("BATCH NEW", members, "parent_bid", str, "")
    # A longer bid cannot be stored, so it is a mistake of the sender (ADR 0033).
    check_name("BATCH NEW", "parent_bid", parent_bid)
    callbacks: dict[str, Any] = {}
    for kind in Kind:
        if raw_members.get(kind, "null") != "null":
            callbacks[str(kind)] = _parse_callback(kind, raw_members[kind])
    if not callbacks:
        raise InvalidPayload('invalid BATCH NEW: expected a "success" or a "complete" callback, or both, got none')
    description = field("BATCH NEW", members, "description", str, "")
    return BatchNew(NewBatch(description=description, parent_bid=parent_bid, **callbacks))


def _parse_callback(kind: Kind, text: str) -> JobPayload:
    if not text.startswith("{"):
        raise InvalidPayload(f"invalid BATCH NEW: {kind}: expected a job, got {abbreviate(text)}")
    members = jsontext.last_members(text)
    # Clients may omit the jid and the args of a callback.
    if members.get("jid", '""') in ('""', "null"):
        members |= {"jid": jsontext.encode(uuid4().hex)}
    members.setdefault("args", "[]")
    # The same checks as for PUSH; the error names the callback in front of the field.
    try:
        job = parse_job(jsontext.join(members.items()))
    except InvalidPayload as error:
        raise InvalidPayload(f"invalid BATCH NEW: {kind}: {error}") from None
    refuse_options(kind, job)
    return job


def refuse_options(kind: Kind, job: JobPayload) -> None:
    """Raise InvalidPayload for options of a callback that could prevent its enqueuing."""
    options = job.options
    if options is None:
        return
    # A callback must be enqueued when it is due, so nothing may refuse it then (ADR 0011).
    forbidden = next((key for key in _NOT_IN_CALLBACKS if getattr(options, key)), None)
    if forbidden:
        raise InvalidPayload(f"invalid BATCH NEW: {kind}: custom.{forbidden}: expected none in a callback")


VERBS = {"BATCH": parse_batch}
