"""`outbox`: show jobs on their way to another database or server; relay refused ones again, or delete them."""

from __future__ import annotations

from typing import Any

from django.db import connections

from .... import conf
from ....core.json import jsontext
from ....errors import FaktoryError
from ....models import OutboxEntry
from ....operations.rows import time_of
from ..screen import age_of, quantity
from ..subcommand import NOTHING, OK, YES, Argument, Invocation, Unsupported, flag, limit, subcommand, verbs
from ..table import Column


@subcommand(
    "outbox",
    "List jobs in the outbox; relay refused ones again: outbox retry JID.",
    verbs("list", "retry", "delete"),
    Argument("jids", nargs="*", metavar="JID", help="retry, delete: jobs that the target refused."),
    flag("--all", "All jobs that the target refused; for retry and delete."),
    limit("jobs"),
    YES,
)
def _outbox(call: Invocation) -> int:
    # Also with jobs on a Faktory server: the outbox is then in the project's databases.
    aliases = [alias for alias in conf.outbox() if alias in connections]
    if not aliases:
        raise Unsupported("outbox: this project has none: its transactions store the jobs directly")
    jids, is_all = list(dict.fromkeys(call.options["jids"])), call.options["all"]
    if call.options["verb"] == "list":
        if jids or is_all:
            raise Unsupported("outbox list: takes no names; it shows refused jobs first")
        return _list(call, aliases)
    if bool(jids) == is_all:
        raise Unsupported(f"outbox {call.options['verb']}: expected jids of refused jobs, or --all")
    return _change(call, aliases, None if is_all else jids)


def _list(call: Invocation, aliases: list[str]) -> int:
    most = call.options["limit"]
    rows = [
        (alias, entry)
        for alias in aliases
        # Refused jobs first: they wait for a person. An empty text is the smallest.
        for entry in OutboxEntry.objects.using(alias).order_by("-error", "pk")[: most + 1]
    ]
    # The databases are read one after the other; the sort is stable.
    rows.sort(key=lambda row: not row[1].error)
    documents = [_document(alias, entry) for alias, entry in rows[:most]]
    call.screen.listing({"entries": documents, "is_more": len(rows) > most}, _COLUMNS, documents)
    return OK


def _document(alias: str, entry: OutboxEntry) -> dict[str, Any]:
    try:
        jobtype = jsontext.decode(jsontext.last_members(entry.job)["jobtype"])
    except (FaktoryError, KeyError):  # a row that was edited manually
        jobtype = None
    return {
        "jid": entry.jid,
        "jobtype": jobtype,
        "queue": entry.queue,
        "database": alias,
        "created_at": time_of(entry.created_at),
        "error": entry.error or None,
    }


_COLUMNS = (
    Column("JID", "jid", is_name=True),
    Column("TASK", "jobtype", 2, keeps_end=True),
    Column("QUEUE", "queue", 4),
    Column("DATABASE", "database", 5),
    Column("ENQUEUED", age_of("created_at"), 3),
    Column("STATE", lambda entry: f"refused: {entry['error']}" if entry["error"] else "waiting", 1),
)


def _change(call: Invocation, aliases: list[str], jids: list[str] | None) -> int:
    verb = call.options["verb"]
    refused = {alias: OutboxEntry.objects.using(alias).exclude(error="") for alias in aliases}
    if jids is not None:
        storable = [jid for jid in jids if jid.isprintable()]
        refused = {alias: entries.filter(jid__in=storable) for alias, entries in refused.items()}
        found = {jid for entries in refused.values() for jid in entries.values_list("jid", flat=True)}
        if missing := [jid for jid in jids if jid not in found]:
            call.screen.note(f"outbox {verb}: no refused job in the outbox has the ID {missing[0]}")
            return NOTHING
    count = sum(entries.count() for entries in refused.values())
    if verb == "delete" and count:
        call.require_confirmation(f"delete {quantity(count, 'refused job')}? They are never run.")
    changed = sum(
        # The relay of any node sends entries without an error.
        entries.update(error="") if verb == "retry" else entries.delete()[0]
        for entries in refused.values()
    )
    call.screen.result({"changed": changed}, f"outbox {verb}: {quantity(changed, 'job')}")
    return OK if changed else NOTHING
