"""`queues`, `pause`, `resume` and `clear`: show queues, pause and resume them, remove their jobs."""

from __future__ import annotations

from typing import Any

from ....models import Queue
from ..screen import quantity, span
from ..subcommand import NOTHING, OK, REASON, YES, Argument, Invocation, Unsupported, flag, operator, subcommand
from ..table import Column

QUEUE_COLUMNS = (
    Column("QUEUE", "name", is_name=True),
    Column("SIZE", "size"),
    Column("LATENCY", lambda queue: span(queue["latency_s"]), 1),
    # Whether a queue of a Faktory server is paused is not known.
    Column("STATE", lambda queue: {True: "paused", False: "active", None: ""}[queue["is_paused"]]),
)


def queues_of(call: Invocation) -> list[dict[str, Any]]:
    """Return every queue with size, latency and pause. `is_paused` is None on a Faktory server."""
    # INFO lists the queues; the table of queues is not there on a Faktory server.
    sizes = call.broker.info().get("queues", {})
    latency = call.broker.latency(list(sizes)) if sizes else {}
    paused = _paused(call.alias) if call.alias else None
    return [
        {
            "name": name,
            "size": size,
            "latency_s": round(latency.get(name, 0.0), 3),
            "is_paused": None if paused is None else name in paused,
        }
        for name, size in sorted(sizes.items())
    ]


def _paused(alias: str) -> set[str]:
    return set(Queue.objects.using(alias).paused().values_list("name", flat=True))


@subcommand("queues", "List queues: size, seconds that the oldest job has waited, pauses.")
def _queues(call: Invocation) -> int:
    queues = queues_of(call)
    call.screen.listing({"queues": queues}, QUEUE_COLUMNS, queues)
    return OK


_NAMES = (
    Argument("names", nargs="*", metavar="QUEUE", help="The queues."),
    flag("--all", "All queues."),
    flag("--new", "Accept names of queues that were never used; else they are most likely misspelt."),
)


@subcommand(
    "clear",
    "Remove the waiting jobs of these queues, and the queues with their pauses.",
    Argument("names", nargs="+", metavar="QUEUE", help="The queues."),
    YES,
)
def _clear(call: Invocation) -> int:
    names = list(dict.fromkeys(call.options["names"]))
    sizes = call.broker.info().get("queues", {})
    call.require_known("queue", names, sizes)
    count = sum(sizes[name] for name in names)
    call.require_confirmation(
        f"remove {quantity(count, 'waiting job')} and any pause of {', '.join(names)}? This cannot be undone."
    )
    call.broker.remove(names)
    call.screen.result({"queues": names}, f"clear: {', '.join(names)}")
    return OK


@subcommand("pause", "Stop delivering jobs of these queues.", *_NAMES, REASON)
@subcommand("resume", "Deliver jobs of these queues again.", *_NAMES)
def _change(call: Invocation) -> int:
    names, is_all = list(dict.fromkeys(call.options["names"])), call.options["all"]
    if bool(names) == is_all:
        raise Unsupported(f"{call.name}: expected names of queues, or --all")
    if unprintable := [name for name in names if not name.isprintable()]:
        raise Unsupported(f"{call.name}: no queue has the name {unprintable[0]}")
    # Read before the change, to report only the queues that changed.
    paused_before = _paused(call.alias) if call.alias else set()
    known = {*call.broker.info().get("queues", {}), *paused_before}
    if is_all:
        names = sorted(known)
    # A misspelt name would become a new queue, and the intended one would run on.
    call.require_known("queue", names, known)
    # None means all queues that exist by then, not only those that were just listed.
    target = None if is_all else names
    if call.name == "pause":
        if call.options["reason"] and call.alias is None:
            raise Unsupported("pause: the protocol sends no reason to a Faktory server; leave out --reason")
        call.broker.pause(target, by=operator(), reason=call.options["reason"])
    else:
        call.broker.resume(target)
    # Without the table, it is not known which queues were paused before.
    changed = names
    if call.alias:
        changed = [name for name in names if (name in paused_before) == (call.name == "resume")]
    call.screen.result({"queues": changed}, f"{call.name}: {', '.join(changed) or 'no queue'}")
    return OK if changed else NOTHING
