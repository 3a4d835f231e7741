"""`info` prints the statistics once, `top` prints them repeatedly."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ....errors import BrokerUnavailable
from ....models import Job
from ....operations.serializers import SHORT, job_of
from ..screen import build_rich_table, clean
from ..subcommand import OK, Invocation, Subcommand, Unsupported, duration, whole
from .queues import queue_line, queues_of
from .workers import worker_line, workers_of

SHOWN = 15
"""Rows per table of `top`, so that all tables fit on one screen."""


def _info(call: Invocation) -> int:
    found = call.broker.info()
    if call.screen.is_json:
        call.screen.json(found)
        return OK
    totals = {name: value for name, value in found.items() if not isinstance(value, dict)}
    call.screen.pairs({**totals, **found.get("sets", {})})
    call.screen.table(("QUEUE", "SIZE"), sorted(found.get("queues", {}).items()))
    return OK


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=duration, default=1.0, metavar="S", help="Seconds between looks; default: 1."
    )
    parser.add_argument("--count", type=whole, metavar="N", help="End after so many looks.")
    parser.add_argument("--once", action="store_true", help="End after one look.")


def _top(call: Invocation) -> int:
    left = 1 if call.options["once"] else call.options["count"]
    if call.screen.is_drawn and left != 1:
        return _run_live(call, left)
    if left is None and not call.screen.is_json:
        raise Unsupported(
            "top: expected a terminal, and the package rich (django-faktory[cli]); or --once, --count, --json"
        )
    latest: dict[str, Any] | None = None
    while left is None or left > 0:
        latest = look(call, latest)
        _print(call, latest)
        left = None if left is None else left - 1
        if left != 0:
            time.sleep(call.options["interval"])
    return OK


def look(call: Invocation, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the current statistics; rates are computed since the statistics `before`."""
    at, info = time.monotonic(), call.broker.info()
    found: dict[str, Any] = {
        "processed": info.get("total_processed", 0),
        "failed": info.get("total_failures", 0),
        "processed_per_s": None,
        "failed_per_s": None,
        "sets": info.get("sets", {}),
        "queues": queues_of(call),
        "workers": workers_of(call.alias) if call.alias else None,
        "working": _working(call.alias) if call.alias else None,
    }
    if before is not None:
        # Two reads within the clock's resolution must not divide by zero.
        passed = max(at - before["_at"], 0.001)
        for name in ("processed", "failed"):
            found[f"{name}_per_s"] = round((found[name] - before[name]) / passed, 1)
    return {**found, "_at": at}


def _working(alias: str) -> list[dict[str, Any]]:
    """Return the running jobs, the one that has run for the longest time first."""
    rows = Job.objects.using(alias).working().order_by("started_at").only(*SHORT)[:SHOWN]
    return [job_of(job) for job in rows]


def _print(call: Invocation, found: dict[str, Any]) -> None:
    if call.screen.is_json:
        # `_at` is a monotonic time, without meaning outside this process.
        call.screen.json({name: value for name, value in found.items() if name != "_at"})
        return
    call.screen.line(headline(found))
    for title, heads, rows in _tables(found):
        call.screen.table(heads, rows, title=title)


def headline(found: dict[str, Any]) -> str:
    """Return the first line: totals, rates and set sizes."""
    rates = "" if found["processed_per_s"] is None else f" ({found['processed_per_s']}/s)"
    sets = "  ".join(f"{name} {size}" for name, size in found["sets"].items())
    return f"processed {found['processed']}{rates}  failed {found['failed']}  {sets}"


Part = tuple[str, tuple[str, ...], list[tuple[object, ...]]]
"""A table of `top`: title, heads and rows."""


def _tables(found: dict[str, Any]) -> list[Part]:
    queues = sorted(found["queues"], key=lambda queue: (-queue["size"], queue["name"]))[:SHOWN]
    parts: list[Part] = [("queues", ("QUEUE", "SIZE", "LATENCY", "STATE"), list(map(queue_line, queues)))]
    if found["workers"] is not None:
        heads = ("WID", "HOST", "PID", "STATE", "JOBS", "MEMORY", "BEAT")
        parts.append(("workers", heads, list(map(worker_line, found["workers"][:SHOWN]))))
        running: list[tuple[object, ...]] = [
            (job["jid"], job["jobtype"], job["queue"], job["worker"], job["started_at"]) for job in found["working"]
        ]
        parts.append(("what runs, the longest first", ("JID", "TASK", "QUEUE", "WORKER", "SINCE"), running))
    return parts


def _run_live(call: Invocation, left: int | None) -> int:
    """Redraw the screen until Ctrl-C; an unreachable database is shown and tried again."""
    from rich.console import Group  # an extra
    from rich.live import Live
    from rich.text import Text

    latest: dict[str, Any] | None = None
    try:
        # With --count no alternate screen: the last output stays visible after the end.
        with Live(screen=left is None, auto_refresh=False) as live:
            while left is None or left > 0:
                try:
                    latest = look(call, latest)
                    parts = [
                        build_rich_table(
                            heads, [[clean(cell or "–", longest=60) for cell in row] for row in rows], title=title
                        )
                        for title, heads, rows in _tables(latest)
                    ]
                    live.update(Group(Text(headline(latest), style="bold"), *parts), refresh=True)
                except BrokerUnavailable as error:
                    live.update(Text(clean(error), style="red"), refresh=True)
                left = None if left is None else left - 1
                if left != 0:
                    time.sleep(call.options["interval"])
    except KeyboardInterrupt:
        pass
    return OK


SUBCOMMANDS = (
    Subcommand("info", "Show totals, sets and queues in numbers.", _info),
    Subcommand("top", "Show what goes on, again and again: rates, queues, workers, what runs.", _top, _top_arguments),
)
