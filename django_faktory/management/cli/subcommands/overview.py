"""`info` prints the statistics once, `top` prints them repeatedly, `doctor` prints the alarms."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.urls import NoReverseMatch, reverse
from django.utils import timezone

from ....errors import BrokerUnavailable
from ....models import Job
from ....operations import alarms
from ....operations.rows import SHORT, AlarmRow, JobSummary
from ..screen import age_of, build_rich_text, clean, clean_cells
from ..subcommand import OK, PARTLY, Argument, Invocation, Unsupported, duration, flag, subcommand, whole
from ..table import Column, lay_out
from .queues import QUEUE_COLUMNS, queues_of
from .workers import WORKER_COLUMNS, workers_of

CRITICAL, WARNING = "CRITICAL", "WARNING"
SHOWN = 15
"""Rows per table of `top`, so that all tables fit on one screen."""


@subcommand("info", "Print totals, numbers of jobs by state, and sizes of queues, as the INFO of the protocol does.")
def _info(call: Invocation) -> int:
    info = call.broker.info()
    if call.screen.is_json:
        call.screen.json(info)
        return OK
    totals = {name: value for name, value in info.items() if not isinstance(value, dict)}
    with suppress(NoReverseMatch):  # the project's URLs have no admin
        totals["admin"] = reverse("admin:index")
    call.screen.pairs({**totals, **info.get("sets", {})})
    call.screen.table((Column("QUEUE", is_name=True), Column("SIZE", 1)), sorted(info.get("queues", {}).items()))
    return OK


@subcommand("doctor", "Print what needs attention; exit with 4 if an alarm is critical.")
def _doctor(call: Invocation) -> int:
    found = alarms.read(using=call.require_alias())
    documents = list(map(AlarmRow.read, found))
    if call.screen.is_json or not found:
        call.screen.result({"alarms": documents}, "No problems found.")
    else:
        for alarm, document in zip(found, documents, strict=True):
            call.screen.line(format_alarm(document))
            call.screen.line(f"          {alarm.explanation}")
    return PARTLY if any(alarm.is_critical for alarm in found) else OK


def format_alarm(alarm: dict[str, Any]) -> str:
    """Return the first line of an alarm: level, text, and since when."""
    level = CRITICAL if alarm["is_critical"] else WARNING
    since = alarm["since"] and timezone.localtime(datetime.fromisoformat(alarm["since"]))
    return f"{level:<8}  {alarm['text']}{f' (since {since:%Y-%m-%d %H:%M:%S %Z})' if since else ''}"


@subcommand(
    "top",
    "Show alarms, rates, queues, the longest-running jobs and workers until Ctrl-C.",
    Argument("--interval", type=duration, default=1.0, metavar="S", help="Seconds between two samples; default: 1."),
    Argument("--count", type=whole, metavar="N", help="Exit after N samples."),
    flag("--once", "Exit after one sample."),
)
def _top(call: Invocation) -> int:
    count = 1 if call.options["once"] else call.options["count"]
    # A single output needs no redrawing, and must stay on the screen.
    if call.screen.is_drawn and count != 1:
        return _run_live(call, count)
    if count is None and not call.screen.is_json:
        raise Unsupported(
            "top: expected a terminal, and the package rich (django-faktory[cli]); or --once, --count, --json"
        )
    statistics: dict[str, Any] | None = None
    for _ in _repeat(count, call.options["interval"]):
        statistics = read_statistics(call, statistics)
        _print(call, statistics)
    return OK


def _repeat(count: int | None, interval_s: float) -> Iterator[None]:
    """Yield `count` times, `interval_s` seconds apart; without an end if `count` is None."""
    for number in itertools.count(1):
        yield
        if number == count:
            return
        time.sleep(interval_s)


def read_statistics(call: Invocation, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the current statistics; rates are computed since the statistics `previous`."""
    read_at, info = time.monotonic(), call.broker.info()
    statistics: dict[str, Any] = {
        "alarms": [AlarmRow.read(alarm) for alarm in alarms.read(using=call.alias)] if call.alias else None,
        "processed": info.get("total_processed", 0),
        "failed": info.get("total_failures", 0),
        "processed_per_s": None,
        "failed_per_s": None,
        "sets": info.get("sets", {}),
        "queues": queues_of(call),
        # The protocol lists neither workers nor running jobs.
        "workers": workers_of(call.alias) if call.alias else None,
        "working": _working(call.alias) if call.alias else None,
    }
    if previous is not None:
        # Two reads within the clock's resolution must not divide by zero.
        elapsed_s = max(read_at - previous["_at"], 0.001)
        for name in ("processed", "failed"):
            statistics[f"{name}_per_s"] = round((statistics[name] - previous[name]) / elapsed_s, 1)
    return {**statistics, "_at": read_at}


def _working(alias: str) -> list[dict[str, Any]]:
    """Return the running jobs, the one that has run for the longest time first."""
    rows = Job.objects.using(alias).working().order_by("started_at").only(*SHORT)[:SHOWN]
    return [JobSummary.read(job) for job in rows]


def _print(call: Invocation, statistics: dict[str, Any]) -> None:
    if call.screen.is_json:
        # `_at` is a monotonic time, without meaning outside this process.
        call.screen.json({name: value for name, value in statistics.items() if name != "_at"})
        return
    for line in alarm_lines(statistics):
        call.screen.line(line)
    call.screen.line(headline(statistics))
    for title, columns, rows in _tables(statistics):
        call.screen.table(columns, rows, title=title)


def headline(statistics: dict[str, Any]) -> str:
    """Return the first line: totals, rates and set sizes."""
    rates = "" if statistics["processed_per_s"] is None else f" ({statistics['processed_per_s']}/s)"
    sets = "  ".join(f"{name} {size}" for name, size in statistics["sets"].items())
    return f"processed {statistics['processed']}{rates}  failed {statistics['failed']}  {sets}"


def alarm_lines(statistics: dict[str, Any]) -> list[str]:
    """Return a line for each alarm; none if the jobs are on a Faktory server, whose alarms are not known."""
    documents = statistics["alarms"]
    if documents is None:
        return []
    return [format_alarm(alarm) for alarm in documents] or ["No problems found."]


Table = tuple[str, tuple[Column, ...], list[dict[str, Any]]]
"""A table of `top`: title, columns and rows."""
_RUNNING = (
    Column("JID", "jid", is_name=True),
    Column("TASK", "jobtype", 1, keeps_end=True),
    Column("QUEUE", "queue", 3),
    Column("WORKER", "worker", 4),
    Column("STARTED", age_of("started_at"), 2),
)


def _tables(statistics: dict[str, Any]) -> list[Table]:
    queues = sorted(statistics["queues"], key=lambda queue: (-queue["size"], queue["name"]))[:SHOWN]
    tables: list[Table] = [("queues", QUEUE_COLUMNS, queues)]
    if statistics["workers"] is not None:
        tables.append(("running now (longest first)", _RUNNING, statistics["working"]))
        tables.append(("workers", WORKER_COLUMNS, statistics["workers"][:SHOWN]))
    return tables


def _run_live(call: Invocation, count: int | None) -> int:
    """Redraw the screen until Ctrl-C, or `count` times. Show the error while the database is unreachable."""
    from rich.console import Group  # an extra
    from rich.live import Live
    from rich.text import Text

    statistics: dict[str, Any] | None = None
    try:
        # With --count no alternate screen: the last output stays visible after the end.
        with Live(screen=count is None, auto_refresh=False) as live:
            for _ in _repeat(count, call.options["interval"]):
                try:
                    statistics = read_statistics(call, statistics)
                    tables = [
                        build_rich_text(
                            lay_out(columns, clean_cells(columns, rows), width=live.console.width), title=title
                        )
                        for title, columns, rows in _tables(statistics)
                    ]
                    alarm_texts = [Text(clean(line), style=_style_of(line)) for line in alarm_lines(statistics)]
                    live.update(Group(*alarm_texts, Text(headline(statistics), style="bold"), *tables), refresh=True)
                # Only an outage is expected to end by itself.
                except BrokerUnavailable as error:
                    live.update(Text(clean(error), style="red"), refresh=True)
    except KeyboardInterrupt:  # the usual way to end it, so no error
        pass
    return OK


def _style_of(line: str) -> str:
    return "red" if line.startswith(CRITICAL) else "yellow" if line.startswith(WARNING) else "green"
