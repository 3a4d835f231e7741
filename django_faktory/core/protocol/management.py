"""Parse and write the management commands MUTATE, QUEUE and FLUSH. Checks shape only. Rules: W5, W23 to W25.

Error messages begin like the original server's and add the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...errors import InvalidPayload
from ..globs import Glob
from ..json import jsontext
from ..json.fields import abbreviate
from ..mutation import COMMANDS, TARGETS, Mutation
from ..payloads import queue_name
from ..suggestions import explain_unknown
from .fields import field, format_line
from .limits import WIDEST, check_count, check_length

ALL = "*"

Queues = tuple[str, ...] | None
"""Queue names in the order given; None means all queues."""


class Mutate(msgspec.Struct, frozen=True):
    """MUTATE: change all jobs of a set that match a filter."""

    mutation: Mutation

    def line(self) -> bytes:
        """Return the line that a client sends; without spaces, which the original server rejects."""
        mutation = self.mutation
        members: dict[str, Any] = {"cmd": mutation.command, "target": mutation.target}
        filters = {"jids": mutation.jids, "jobtype": mutation.jobtype or None, "regexp": mutation.regexp or None}
        # An empty list of jids matches no job, a missing one every job: leave out None only (W23).
        members["filter"] = {name: value for name, value in filters.items() if value is not None}
        return format_line("MUTATE", jsontext.encode(members).replace(" ", "\\u0020"))


class PauseQueues(msgspec.Struct, frozen=True):
    """QUEUE PAUSE: deliver no job of these queues."""

    queues: Queues

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return _queue_line("PAUSE", self.queues)


class ResumeQueues(msgspec.Struct, frozen=True):
    """QUEUE RESUME: deliver jobs of these queues again."""

    queues: Queues

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return _queue_line("RESUME", self.queues)


class RemoveQueues(msgspec.Struct, frozen=True):
    """QUEUE REMOVE: delete the waiting jobs of these queues, and the queues."""

    queues: Queues

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return _queue_line("REMOVE", self.queues)


class QueueLatency(msgspec.Struct, frozen=True):
    """QUEUE LATENCY: ask how long the oldest job of each queue has waited."""

    queues: tuple[str, ...]

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return _queue_line("LATENCY", self.queues)


class Flush(msgspec.Struct, frozen=True):
    """FLUSH: delete all jobs, locks, tracking, queues and pauses."""

    def line(self) -> bytes:
        """Return the line that a client sends."""
        return b"FLUSH\r\n"


ManagementCommand = Mutate | PauseQueues | ResumeQueues | RemoveQueues | QueueLatency | Flush


def parse_mutate(text: str) -> Mutate:
    """Parse the text after MUTATE. Raises InvalidPayload.

    Unknown and repeated members are refused: without them, a misspelled filter would match every job.
    """
    members = _known_members(text, ("cmd", "target", "filter"), elsewhere=[f"filter.{name}" for name in _FILTERS])
    raw_filter = members.pop("filter", "null")
    filters: dict[str, str] = {}
    if raw_filter.startswith("{"):
        filters = _known_members(raw_filter, _FILTERS, within="filter: ")
    elif raw_filter != "null":
        field("MUTATE", {"filter": jsontext.decode(raw_filter)}, "filter", dict, {})
    raw_jids = filters.pop("jids", "null")
    jids = jsontext.decode(raw_jids)
    if jids is not None and not (isinstance(jids, list) and all(isinstance(jid, str) for jid in jids)):
        raise InvalidPayload(f"invalid MUTATE: jids: expected an array of strings, got {abbreviate(raw_jids)}")
    return _build_mutate(_decode_members(members), _decode_members(filters), jids)


def _decode_members(raw: dict[str, str]) -> dict[str, Any]:
    return {key: jsontext.decode(value) for key, value in raw.items()}


_FILTERS = ("jids", "jobtype", "regexp")


def _known_members(
    text: str, known: Iterable[str], *, within: str = "", elsewhere: Iterable[str] = ()
) -> dict[str, str]:
    """Return key → JSON text; refuse the first key that is unknown or repeated."""
    members: dict[str, str] = {}
    for key, value in jsontext.pairs(text):
        if key in members:
            raise jsontext.repeated_key_error(key)
        if key not in known:
            expected = explain_unknown(key, known, elsewhere=elsewhere)
            raise InvalidPayload(f"invalid MUTATE: {within}unknown member {ascii(key)[:60]}; {expected}")
        members[key] = value
    return members


def _build_mutate(members: dict[str, Any], filters: dict[str, Any], jids: list[str] | None) -> Mutate:
    command, target = members.get("cmd"), members.get("target")
    if command not in COMMANDS:
        raise InvalidPayload(f"unknown mutate operation {ascii(command)[:60]}: cmd: expected {_one_of(COMMANDS)}")
    if target not in TARGETS:
        raise InvalidPayload(
            f"invalid target for mutation command: target: expected {_one_of(TARGETS)}, got {ascii(target)[:60]}"
        )
    check_count("MUTATE", "jids", len(jids or ()))
    # Only the longest: a check of each of 20,000 jids would block the event loop for 4 ms.
    check_length("MUTATE", "jid", max(jids or ("",), key=len))
    jobtype, regexp = field("MUTATE", filters, "jobtype", str, ""), field("MUTATE", filters, "regexp", str, "")
    check_length("MUTATE", "jobtype", jobtype)
    _check_glob(regexp)
    return Mutate(
        Mutation(
            command=command,
            target=target,
            jids=None if jids is None else tuple(dict.fromkeys(jids)),
            jobtype=jobtype,
            regexp=regexp,
        )
    )


def _check_glob(pattern: str) -> None:
    check_length("MUTATE", "regexp", pattern)
    # The search takes time in proportion to length times width (ADR 0033).
    glob = Glob(pattern)
    check_count("MUTATE", "stars of regexp", glob.stars)
    check_count("MUTATE", WIDEST, glob.widest)


def parse_queue(text: str) -> ManagementCommand:
    """Parse the text after QUEUE: a sub-verb in any case, then names. Raises InvalidPayload."""
    word, *names = text.split() or [""]
    # Verbs are upper case, but the words after QUEUE, TRACK and BATCH may have any case (docs/reference/protocol.md).
    verb = word.upper()
    check_count("QUEUE", "queues", len(names))
    if verb == "LATENCY":
        return _parse_latency(names)
    if verb not in _QUEUE_VERBS:
        raise InvalidPayload(f"no such QUEUE subcommand: {word[:60]}; use PAUSE, RESUME, REMOVE or LATENCY")
    if not names:
        raise InvalidPayload(f"QUEUE {verb}: expected the names of queues, or * for all, got none")
    # `*` means all only without other names; among names it is an invalid name.
    return _QUEUE_VERBS[verb](None if names == [ALL] else _check_names(names))


def _parse_latency(names: list[str]) -> QueueLatency:
    # The wildcard is valid for PAUSE, RESUME and REMOVE only.
    if ALL in names:
        raise InvalidPayload("QUEUE LATENCY does not support wildcards; name the queues")
    return QueueLatency(_check_names(names))


_QUEUE_VERBS: dict[str, Callable[[Queues], ManagementCommand]] = {
    "PAUSE": PauseQueues,
    "RESUME": ResumeQueues,
    "REMOVE": RemoveQueues,
}


def _check_names(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(queue_name, names)))


def _queue_line(verb: str, queues: Queues) -> bytes:
    return format_line("QUEUE", " ".join([verb, *([ALL] if queues is None else queues)]))


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def parse_flush(text: str) -> Flush:
    """Check that nothing follows FLUSH. Raises InvalidPayload."""
    # The name of a queue behind it would be ignored, and everything be deleted.
    if text.strip():
        raise InvalidPayload(f"invalid FLUSH: expected nothing after it, got {abbreviate(text)}; it deletes all jobs")
    return Flush()


VERBS: dict[str, Callable[[str], ManagementCommand]] = {
    "MUTATE": parse_mutate,
    "QUEUE": parse_queue,
    "FLUSH": parse_flush,
}
