"""`jobs`, `job` and `push`: find jobs, show one, enqueue one."""

from __future__ import annotations

import argparse
import json
import re
from datetime import timedelta
from typing import Any

from ....core.payloads import DEFAULT_QUEUE, rfc3339
from ....core.queries import parse_seconds
from ....errors import InvalidPayload, UnknownJobType
from ....models import Job
from ....models.job import RECENT
from ....operations.serializers import SHORT, job_of, whole_job_of
from ....tasks import base
from ....tasks.external import push
from ..subcommand import NOTHING, OK, Invocation, Subcommand, Unsupported, whole

# An exact count of a large table takes too long; the output says when there are more.
COUNTED = 10_000


def _jobs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", nargs="*", help="Which jobs, such as: dead queue:mail error:Timeout.")
    parser.add_argument("--limit", type=whole, default=50, metavar="N", help="Maximum number of jobs; default: 50.")
    parser.add_argument("--count", action="store_true", help=f"Print only their number, counted up to {COUNTED}.")


def _jobs(call: Invocation) -> int:
    query, screen = call.query(), call.screen
    jobs = Job.objects.using(call.database()).shown(query)
    if call.options["count"]:
        count = jobs.count_up_to(COUNTED)
        if screen.is_json:
            screen.json({"query": str(query), "count": count, "is_more": count == COUNTED})
        else:
            screen.line(f"{count}{' or more' if count == COUNTED else ''}")
        return OK
    limit = call.options["limit"]
    # One row more than shown: its presence means that there are more, without a count.
    rows = list(jobs.order_by("-pk").only(*SHORT)[: limit + 1])
    documents = [job_of(job) for job in rows[:limit]]
    if screen.is_json:
        screen.json({"query": str(query), "jobs": documents, "is_more": len(rows) > limit})
        return OK
    heads = ("JID", "TASK", "STATE", "QUEUE", "SINCE", "FAILURES", "ERROR", "ABOUT")
    screen.table(heads, [_line(job) for job in documents])
    if len(rows) > limit:
        screen.note(f"showing the latest {limit}; use --limit for more")
    if not rows:
        screen.note(f"no matching jobs (searched the latest {RECENT:,}, or the given states)")
    return OK


def _line(job: dict[str, Any]) -> tuple[object, ...]:
    since = job["finished_at"] or job["run_at"] or (job["started_at"] if job["state"] == "working" else None)
    moment = re.sub(r"\.\d+", "", since or job["enqueued_at"] or "")  # seconds are enough to read; --json has fractions
    return (
        job["jid"], job["jobtype"], job["state"], job["queue"], moment, job["failures"],
        job["errtype"], job["about"],
    )  # fmt: skip


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jid", help="The job's id.")


def _job(call: Invocation) -> int:
    jid, screen = call.options["jid"], call.screen
    if call.alias is None:
        return _show_remote_job(call, jid)
    # A jid with unprintable characters cannot exist, and PostgreSQL raises for NUL.
    row = Job.objects.using(call.alias).filter(jid=jid).first() if jid.isprintable() else None
    if row is None:
        screen.note(f"no job has the ID {jid}")
        return NOTHING
    values = whole_job_of(row)
    if screen.is_json:
        screen.json(values)
        return OK
    attempts, interrupted = values.pop("attempts"), values.pop("interrupted")
    for member in ("job", "result"):
        values[member] = None if values[member] is None else json.dumps(values[member], indent=2, ensure_ascii=False)
    screen.pairs(values)
    for number, entry in enumerate(attempts, 1):
        screen.line(f"attempt {number}: {entry['failed_at'] or ''} {entry['errtype']}: {entry['message']}")
        for line in "\n".join(entry["backtrace"]).splitlines():
            screen.line(f"  {line}")
    for entry in interrupted:
        screen.line(f"{entry['message']}: {entry['interrupted_at'] or ''} worker {entry['worker']}")
    return OK


def _show_remote_job(call: Invocation, jid: str) -> int:
    """Show what the protocol reports about one job."""
    [values] = call.broker.track_get([jid])
    document = {
        "jid": values.jid,
        "state": values.state,
        "percent": values.percent,
        "desc": values.desc,
        "updated_at": rfc3339(values.updated_at) if values.updated_at else None,
    }
    if call.screen.is_json:
        call.screen.json(document)
    else:
        call.screen.pairs(document)
    return NOTHING if values.state == "unknown" else OK


def _push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="The task, by its jobtype.")
    parser.add_argument("values", nargs="*", metavar="ARG", help="Its arguments: JSON, or else text.")
    parser.add_argument("--kwargs", metavar="JSON", default="{}", help="Its keyword arguments: a JSON object.")
    parser.add_argument("--queue", metavar="NAME", help="Queue, instead of the task's own.")
    parser.add_argument("--in", dest="delay", metavar="DURATION", help="Delay: 90s, 15m, 2h, 1d.")
    parser.add_argument("--about", metavar="APP.MODEL/PK", help="Object that the job is about.")
    parser.add_argument("--unregistered", action="store_true", help="Accept a task that this project does not define.")


def _push(call: Invocation) -> int:
    options = call.options
    args = [_value(text) for text in options["values"]]
    kwargs = _value(options["kwargs"])
    if not isinstance(kwargs, dict):
        raise Unsupported("--kwargs: expected a JSON object, such as '{\"user\": 7}'")
    # The command loads no tasks by itself, unlike a worker.
    base.autodiscover()
    delay = timedelta(seconds=parse_seconds(options["delay"], "--in")) if options["delay"] else None
    try:
        task = base.lookup(options["task"])
    except UnknownJobType as error:
        # Probably a mistyped name: only the option says that another program has a task of this name.
        if not options["unregistered"]:
            raise Unsupported(f"{error}; for a worker in another language add --unregistered") from None
        # As a client in another language would push it: no task here could check its arguments.
        jid = push(
            options["task"], *args, kwargs=kwargs, queue_name=options["queue"] or DEFAULT_QUEUE, run_after=delay,
            about=options["about"],
        )  # fmt: skip
    else:
        task_with_options = task.using(queue_name=options["queue"], run_after=delay, about=options["about"])
        jid = task_with_options.enqueue(*args, **kwargs).id
    if call.screen.is_json:
        call.screen.json({"jid": jid})
    else:
        call.screen.line(jid)
    return OK


# An argument that is not JSON is taken as text, so that a plain word needs no quotes.
def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if not text.isprintable():
            raise InvalidPayload("expected printable arguments; write others as JSON") from None
        return text


SUBCOMMANDS = (
    Subcommand("jobs", "Show the latest jobs that a query means.", _jobs, _jobs_arguments),
    Subcommand("job", "Show one job with its arguments, attempts and result.", _job, _job_arguments),
    Subcommand("push", "Enqueue a task.", _push, _push_arguments),
)
