"""`workers`, `quiet` and `terminate`: show worker processes and stop them."""

from __future__ import annotations

from typing import Any

from .... import conf
from ....core.suggestions import suggest
from ....models import WorkerProcess
from ....operations.serializers import read_workers
from ....store import workers
from ..screen import age_of, quantity
from ..subcommand import NOTHING, OK, YES, Argument, Invocation, Unsupported, flag, subcommand
from ..table import Column

SHOWN = 1000
"""Maximum number of workers listed."""
WORKER_COLUMNS = (
    Column("WID", "wid", is_name=True),
    Column("HOST", "hostname", 3),
    Column("PID", "pid", 5),
    Column("STATE", "state", 1),
    Column("JOBS", lambda one: f"{one['jobs']} of {one['threads']}" if one["threads"] else one["jobs"], 2),
    Column("QUEUES", lambda one: ", ".join(one["queues"] or ()), 6),
    Column("MEMORY", lambda one: f"{one['rss_kb'] // 1024} MB" if one["rss_kb"] else "", 7),
    Column("BEAT", age_of("beat_at"), 4),
)


def workers_of(alias: str) -> list[dict[str, Any]]:
    """Return live workers, the longest running first, each with its number of jobs."""
    # Maintenance may not have removed lost workers yet.
    live_workers = WorkerProcess.objects.using(alias).filter(workers.living(conf.get("WORKER_TIMEOUT")))
    return read_workers(live_workers.order_by("started_at", "wid")[:SHOWN], using=alias)


@subcommand("workers", "List live worker processes, in any language: state, jobs, memory.")
def _workers(call: Invocation) -> int:
    # The protocol has no list of workers; INFO has their number.
    if call.alias is None:
        count = call.broker.info().get("workers")
        text = f"{quantity(count, 'worker')}; the protocol reports no details of them"
        call.screen.result({"workers": None, "count": count}, text)
        return OK
    documents = workers_of(call.alias)
    document = {"workers": documents, "count": len(documents)}
    call.screen.listing(document, WORKER_COLUMNS, documents)
    return OK


_WIDS = (Argument("wids", nargs="*", metavar="WID", help="The worker processes."), flag("--all", "All workers."), YES)


@subcommand("quiet", "Make these workers stop fetching jobs; this cannot be undone.", *_WIDS)
@subcommand(
    "terminate", "Make these workers finish their jobs and exit; each learns of it with its next heartbeat.", *_WIDS
)
def _advance(call: Invocation) -> int:
    alias = call.require_alias()
    wids, is_all = list(dict.fromkeys(call.options["wids"])), call.options["all"]
    if bool(wids) == is_all:
        raise Unsupported(f"{call.name}: expected the wids of workers, or --all")
    if not is_all:
        known = set(WorkerProcess.objects.using(alias).values_list("wid", flat=True))
        if unknown := [wid for wid in wids if wid not in known]:
            call.screen.note(f"{call.name}: no worker has the ID {unknown[0]}{suggest(unknown[0], known)}")
            if call.screen.is_json:
                call.screen.json({"changed": 0})
            return NOTHING
    # `quiet` asks as well: a quiet worker cannot be set to run again.
    target = "all workers" if is_all else ", ".join(wids)
    call.require_confirmation(f"{call.name} {target}? This cannot be undone.")
    count = workers.advance(None if is_all else wids, call.name, using=alias)
    outcome = f"{quantity(count, 'worker')}, at their next heartbeat" if count else "no worker was changed"
    call.screen.result({"changed": count}, f"{call.name}: {outcome}")
    return OK if count else NOTHING
