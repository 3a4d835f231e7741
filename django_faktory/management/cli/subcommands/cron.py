"""`cron`: show cron entries with their due times and outcomes; pause, resume, run one now, or show its next times."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

from ....core.suggestions import suggest
from ....models.cron import CronEntry
from ....operations.serializers import cron_entry_of, next_times_of
from ....store.cron import entries as stored_entries
from ....store.cron import runs
from ....tasks import cron
from ..screen import age, age_of
from ..subcommand import NOTHING, OK, Argument, Invocation, Unsupported, flag, subcommand, verbs, whole
from ..table import Column


@subcommand(
    "cron",
    "List cron entries; pause, resume or run them: cron pause ENTRY, cron next ENTRY.",
    verbs("list", "pause", "resume", "run", "next"),
    Argument("names", nargs="*", metavar="ENTRY", help="The entries; run and next take one."),
    Argument("--count", type=whole, default=5, metavar="N", help="next: how many times; default: 5."),
    flag("--all", "All entries that are defined; for pause and resume."),
)
def _cron(call: Invocation) -> int:
    verb, names, is_all = call.options["verb"], list(dict.fromkeys(call.options["names"])), call.options["all"]
    # No entry has such a name, and PostgreSQL raises for NUL.
    if unprintable := [name for name in names if not name.isprintable()]:
        return _report_unknown(call, [], unprintable)
    entries = CronEntry.objects.using(call.require_alias()).order_by("name")
    if verb == "list":
        if is_all:
            raise Unsupported("cron list: shows all without --all, or those named")
        selected = list(entries.filter(name__in=names) if names else entries)
        return _report_unknown(call, selected, names) or _list(call, selected)
    if verb in ("run", "next") and (is_all or len(names) != 1):
        raise Unsupported(f"cron {verb}: expected the name of one entry")
    if bool(names) == is_all:
        raise Unsupported(f"cron {verb}: expected names of entries, or --all")
    # Entries removed from the code are listed, but cannot be changed.
    defined = entries.filter(removed_at=None)
    selected = list(defined if is_all else defined.filter(name__in=names))
    if code := _report_unknown(call, selected, names):
        return code
    if verb in ("run", "next"):
        return (_run if verb == "run" else _show_next)(call, selected[0])
    return _change(call, verb, selected)


def _report_unknown(call: Invocation, entries: list[CronEntry], names: list[str]) -> int:
    """Report one unknown name, if there is any; the caller then changes nothing."""
    missing = set(names) - {entry.name for entry in entries}
    if missing:
        known = CronEntry.objects.using(call.require_alias()).filter(removed_at=None).values_list("name", flat=True)
        call.screen.note(f"no cron entry is defined as {min(missing)}{suggest(min(missing), known)}")
    return NOTHING if missing else OK


def _change(call: Invocation, verb: str, entries: list[CronEntry]) -> int:
    # Entries already in the wanted state are left out of the report and of the exit code.
    changed = [entry for entry in entries if (entry.paused_at is None) == (verb == "pause")]
    change = stored_entries.pause if verb == "pause" else stored_entries.resume
    change([entry.pk for entry in changed], using=call.require_alias())
    names = [entry.name for entry in changed]
    call.screen.result({"entries": names}, f"cron {verb}: {', '.join(names) or 'no entry'}")
    return OK if changed else NOTHING


def _run(call: Invocation, entry: CronEntry) -> int:
    jid = cron.run_now(entry, using=call.require_alias()).jid
    call.screen.result({"jid": jid}, jid)
    return OK


def _show_next(call: Invocation, entry: CronEntry) -> int:
    times = next_times_of(entry, call.options["count"])
    if call.screen.is_json:
        state = {"entry": entry.name, "state": entry.state, "problem": entry.problem or None}
        call.screen.json({**state, "zone": entry.zone, "next_times": times})
        return OK if times else NOTHING
    zone = ZoneInfo(entry.zone) if times else None
    call.screen.table(
        (Column("UTC"), Column(entry.zone, 1)),
        [(time, f"{datetime.fromisoformat(time).astimezone(zone):%a %Y-%m-%d %H:%M:%S}") for time in times],
    )
    if not times or entry.state != "active":
        call.screen.note(f"cron next: the entry is {entry.state}{f': {entry.problem}' if entry.problem else ''}")
    return OK if times else NOTHING


def _list(call: Invocation, entries: list[CronEntry]) -> int:
    # One query for the runs of all entries.
    latest = runs.read_latest([entry.pk for entry in entries], using=call.require_alias())
    documents = [cron_entry_of(entry, latest.get(entry.pk)) for entry in entries]
    call.screen.listing({"entries": documents}, _COLUMNS, documents)
    return OK


_COLUMNS = (
    Column("ENTRY", "name", is_name=True),
    Column("SCHEDULE", "schedule", 3),
    Column("ZONE", "zone", 7),
    Column("TASK", "jobtype", 4, keeps_end=True),
    Column("STATE", lambda entry: entry["problem"] or entry["state"], 1),
    Column("NEXT", age_of("next_at"), 2),
    # A manual run has no tick.
    Column("LATEST", lambda entry: entry["latest"] and age(entry["latest"]["tick"] or entry["latest"]["at"]), 5),
    Column("OUTCOME", lambda entry: entry["latest"] and entry["latest"]["outcome"], 6),
)
