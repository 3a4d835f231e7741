"""`import-faktory` and `export-faktory`: move jobs from and to the Redis of the original server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....core.extras import explain_missing
from ....store.statistics import counts
from ....store.store import Store
from ..screen import quantity
from ..subcommand import INTERRUPTED, NOTHING, OK, PARTLY, YES, Argument, Invocation, Unsupported, flag, subcommand
from ..table import Column

if TYPE_CHECKING:
    from ....contrib.transfer.export_jobs import Export
    from ....contrib.transfer.import_jobs import Import
    from ....contrib.transfer.redis_layout import FaktoryRedis
    from ....contrib.transfer.report import Report


_ARGUMENTS = (
    Argument("url", metavar="URL", help="The Redis of the Faktory server: redis://…, rediss://… or unix://…."),
    flag("--dry-run", "Only print what would change."),
    YES,
    flag("--while-connected", "Continue although other programs are connected: none of them is Faktory."),
)
_LAYOUT = Argument(
    "--layout", choices=("1.9", "1.10"), help="Faktory release that uses the Redis. Default: detected from its lists."
)


@subcommand("import-faktory", "Move the jobs of a Faktory server from its Redis to this project.", *_ARGUMENTS)
def _import(call: Invocation) -> int:
    alias, redis = call.require_alias(), _connect(call)
    try:
        from ....contrib.transfer.import_jobs import Import  # redis-py is an extra

        if not call.options["while_connected"]:
            # A running Faktory would fetch and push jobs during the transfer.
            redis.refuse_other_clients()
        return _run_transfer(call, Import(redis, call.broker, alias, is_dry=call.options["dry_run"]))
    finally:
        redis.close()


@subcommand("export-faktory", "Move the jobs of this project to the Redis of a Faktory server.", *_ARGUMENTS, _LAYOUT)
def _export(call: Invocation) -> int:
    alias, redis = call.require_alias(), _connect(call)
    try:
        from ....contrib.transfer.export_jobs import Export  # redis-py is an extra

        if not call.options["while_connected"]:
            redis.refuse_other_clients()
            # A worker could run a job here while it is written there.
            if workers := counts.snapshot(Store(alias))["workers"]:
                raise Unsupported(f"{call.name}: {quantity(workers, 'worker')} connected here: stop them first")
        return _run_transfer(
            call, Export(redis, alias, layout=call.options["layout"] or "", is_dry=call.options["dry_run"])
        )
    finally:
        redis.close()


def _connect(call: Invocation) -> FaktoryRedis:
    try:
        from ....contrib.transfer.redis_layout import FaktoryRedis  # redis-py is an extra
    except ImportError as error:
        raise Unsupported(explain_missing(call.name, "redis-py", "redis")) from error
    return FaktoryRedis(call.options["url"])


def _run_transfer(call: Invocation, transfer: Import | Export) -> int:
    report = transfer.report
    if report.found and not call.options["dry_run"]:
        verb = "import" if call.name == "import-faktory" else "export"
        call.require_confirmation(f"{verb} {quantity(report.found, 'job')}?")
    try:
        with call.screen.progress(call.name, report.found) as advance:
            transfer.run(advance)
    except KeyboardInterrupt:
        _print_report(call, report)
        call.screen.note("stopped; run the same command again to continue")
        return INTERRUPTED
    _print_report(call, report)
    if report.problems:
        return PARTLY
    return OK if report.found or report.paused else NOTHING


def _print_report(call: Invocation, report: Report) -> None:
    summary = report.as_json()
    if call.screen.is_json:
        call.screen.json(summary)
        return
    rows = [
        (place.kind, place.name, place.found, place.moved, place.moved_before, place.left) for place in report.counts
    ]
    call.screen.table(
        [Column(head, place) for place, head in enumerate(("WHERE", "NAME", "FOUND", "MOVED", "BEFORE", "LEFT"))], rows
    )
    verb = "would be moved" if report.is_dry else "moved"
    call.screen.line(
        f"{summary['moved']} of {summary['found']} jobs {verb}, {summary['left']} left; "
        f"layout {report.layout or 'unknown'}"
    )
    if report.paused:
        call.screen.line(f"paused queues: {', '.join(report.paused)}")
    for problem in report.problems:
        jids = f" ({', '.join(problem['jids'])})" if problem["jids"] else ""
        call.screen.note(f"{problem['count']} left: {problem['reason']}{jids}")
    for note in report.notes:
        call.screen.note(note)
