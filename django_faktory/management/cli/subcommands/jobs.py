"""`jobs`, `job`, `push` and `signal`: find jobs, show one, enqueue one, send it a signal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ....core.payloads import DEFAULT_QUEUE, queue_name, rfc3339
from ....core.queries import parse_seconds
from ....errors import InvalidPayload, UnknownJobType
from ....models import Job
from ....operations import job_summaries, searches, signals, task_names
from ....operations.rows import SHORT, JobSummary
from ....operations.searches import Coverage
from ....operations.serializers import Verbatim, whole_job_of
from ....tasks import base
from ....tasks.external import push
from ....tasks.json_values import normalize
from ..screen import Screen, age
from ..subcommand import NOTHING, OK, Argument, Invocation, Unsupported, flag, limit, subcommand
from ..table import Column

# An exact count of a large table takes too long; the output says when there are more.
COUNTED = 10_000


@subcommand(
    "jobs",
    "List the latest jobs that match a query, or words of their arguments and messages.",
    Argument("query", nargs="*", help="Which jobs, such as: dead queue:mail error:Timeout."),
    limit("jobs"),
    flag("--long", "Show the arguments, as far as REDACT admits, and the message of the latest failure too."),
    flag("--count", f"Print only their number, counted up to {COUNTED}."),
)
def _jobs(call: Invocation) -> int:
    query, screen, using = call.parse_search(), call.screen, call.require_alias()
    jobs = Job.objects.using(using).shown(query)
    coverage = searches.read_coverage(query, using=using)
    searched = coverage and coverage.document
    if call.options["count"]:
        count = jobs.count_up_to(COUNTED)
        is_more = count == COUNTED
        document = {"query": str(query), "count": count, "is_more": is_more, "searched": searched}
        screen.result(document, f"{count}{' or more' if is_more else ''}")
        _note_coverage(screen, coverage)
        return OK
    most = call.options["limit"]
    # A terminal shows the texts of a job if it is wide enough.
    is_long = call.options["long"] or screen.width is not None
    selected: Any = job_summaries.with_texts(jobs).only(*SHORT) if is_long else jobs.only(*SHORT)
    # One row more than shown: its presence means that there are more, without a count.
    rows = list(selected.order_by(*query.order)[: most + 1])
    documents = [JobSummary.read(job) | (_texts_of(job) if is_long else {}) for job in rows[:most]]
    screen.listing(
        {"query": str(query), "jobs": documents, "is_more": len(rows) > most, "searched": searched},
        _columns(is_long=is_long, is_wanted=call.options["long"]),
        [{**document, "row": row} for document, row in zip(documents, rows, strict=False)],
        if_more=f"showing the latest {most}; use --limit for more",
    )
    if not rows and not screen.is_json:
        screen.note("no matching jobs")
        call.note_unknown_names(query)
    _note_coverage(screen, coverage)
    return OK


def _columns(*, is_long: bool, is_wanted: bool) -> list[Column]:
    """Return the columns of a list; the texts of jobs come before others if --long asks for them."""
    columns = [
        Column("JID", "jid", is_name=True),
        Column("TASK", "jobtype", 1, keeps_end=True),
        Column("STATE", "state", 2),
        Column("QUEUE", "queue", 4),
        Column("WHEN", _when, 3),
        Column("FAILURES", "failures", 8),
        Column("ERROR", "errtype", 5, keeps_end=True),
        Column("ABOUT", "about", 9),
    ]
    texts = (
        Column("ARGUMENTS", lambda job: job_summaries.describe_call(job["row"]), 2 if is_wanted else 6),
        Column("MESSAGE", "message", 2 if is_wanted else 7),
    )
    return [*columns, *(texts if is_long else ())]


def _when(job: dict[str, Any]) -> str:
    since = job["finished_at"] or job["run_at"] or (job["started_at"] if job["state"] == "working" else None)
    return age(since or job["enqueued_at"])


def _note_coverage(screen: Screen, coverage: Coverage | None) -> None:
    if coverage is None or coverage.is_complete or screen.is_json:
        return
    more = " or more" if coverage.is_more else ""
    screen.note(
        f"searched the newest {coverage.searched:,} of {coverage.total:,}{more} jobs; "
        f"add among:{coverage.wider.among} to search more"
    )


def _texts_of(job: Any) -> dict[str, Any]:
    """Return the visible arguments of a job, None if they are too long or invalid, and its latest failure's message."""
    args, kwargs = job_summaries.read_call(job) or (None, None)
    return {"args": args, "kwargs": kwargs, "message": job_summaries.read_message(job) or None}


@subcommand(
    "job",
    "Show a job: why it waits, its JSON, its attempts, its result and its log lines.",
    Argument("jid", help="The job's id."),
)
def _job(call: Invocation) -> int:
    jid, screen = call.options["jid"], call.screen
    if call.alias is None:
        return _show_remote_job(call, jid)
    # A jid with unprintable characters cannot exist, and PostgreSQL raises for NUL.
    row = Job.objects.using(call.alias).latest_of(jid) if jid.isprintable() else None
    if row is None:
        screen.note(f"no job has the ID {jid}")
        return NOTHING
    values = whole_job_of(row)
    if screen.is_json:
        screen.json(values)
        return OK
    reason = values.pop("waiting_reason")
    if reason:
        screen.line(reason["text"])
    attempts, interrupted, log = values.pop("attempts"), values.pop("interrupted"), values.pop("log")
    for member in ("job", "result"):
        values[member] = _indent(values[member])
    screen.pairs(values)
    for number, entry in enumerate(attempts, 1):
        release = f" (release {entry['release']})" if entry["release"] else ""
        screen.line(f"attempt {number}: {entry['failed_at'] or ''} {entry['errtype']}: {entry['message']}{release}")
        _show_lines(screen, entry["backtrace"])
        _show_lines(screen, entry["log"])
    for entry in interrupted:
        screen.line(f"{entry['message']}: {entry['interrupted_at'] or ''} worker {entry['worker']}")
    if log:
        screen.line("log of the run that succeeded:")
        _show_lines(screen, log)
    return OK


def _indent(text: str | None) -> str | None:
    """Return JSON for people; the beginning of a long text."""
    longest = job_summaries.WHOLE
    if text is not None and len(text) > longest:
        return f"{text[:longest]}… ({len(text):,} characters; --json prints all)"
    return json.dumps(text.decode_json(), indent=2, ensure_ascii=False) if isinstance(text, Verbatim) else text


def _show_lines(screen: Screen, lines: Sequence[str]) -> None:
    for line in "\n".join(lines).splitlines():
        screen.line(f"  {line}")


def _show_remote_job(call: Invocation, jid: str) -> int:
    """Show what the protocol reports about one job."""
    [tracked] = call.broker.track_get([jid])
    document = {
        "jid": tracked.jid,
        "state": tracked.state,
        "percent": tracked.percent,
        "desc": tracked.desc,
        "updated_at": rfc3339(tracked.updated_at) if tracked.updated_at else None,
    }
    (call.screen.json if call.screen.is_json else call.screen.pairs)(document)
    return NOTHING if tracked.state == "unknown" else OK


@subcommand(
    "push",
    "Enqueue a task of this project, with its own options, and print the jid.",
    Argument("task", help="The task, by its jobtype."),
    Argument("values", nargs="*", metavar="ARG", help="Its arguments: JSON, or else text."),
    Argument("--kwargs", metavar="JSON", default="{}", help="Its keyword arguments: a JSON object."),
    Argument("--queue", metavar="NAME", help="Queue, instead of the task's own."),
    Argument("--in", dest="delay", metavar="DURATION", help="Do not start before this delay: 90s, 15m, 2h, 1d."),
    Argument("--about", metavar="APP.MODEL/PK", help="The object that the job is about."),
    flag("--unregistered", "The task belongs to another program: any name is accepted, and no options apply."),
    flag("--new", "Accept a queue that was never used; else it is most likely misspelt."),
)
def _push(call: Invocation) -> int:
    options = call.options
    args = [parse_value(text) for text in options["values"]]
    kwargs = parse_value(options["kwargs"])
    if not isinstance(kwargs, dict):
        raise Unsupported("--kwargs: expected a JSON object, such as '{\"user\": 7}'")
    base.import_tasks()
    # No worker fetches the jobs of a misspelt queue.
    if options["queue"]:
        call.require_known("queue", [queue_name(options["queue"])], call.known_queue_names())
    delay = timedelta(seconds=parse_seconds(options["delay"], "--in")) if options["delay"] else None
    try:
        task = task_names.lookup(options["task"])
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
        try:
            jid = task_with_options.enqueue(*args, **kwargs).id
        except (TypeError, ValueError) as error:  # the task does not take them, or JSON cannot represent them
            raise InvalidPayload(str(error)) from error
    call.screen.result({"jid": jid}, jid)
    return OK


@subcommand(
    "signal",
    "Send a signal to a job, which ends its wait for this name, now or later.",
    Argument("jid", help="The job's id."),
    Argument("name", help="Name of the signal."),
    Argument(
        "payload", nargs="?", default="null", metavar="PAYLOAD", help="What the wait returns: JSON, or else text."
    ),
)
def _signal(call: Invocation) -> int:
    using, jid = call.require_alias(), call.options["jid"]
    job = Job.objects.using(using).latest_of(jid) if jid.isprintable() else None
    if job is None:
        call.screen.note(f"no job has the ID {jid}")
        return NOTHING
    signals.send(job, call.options["name"], parse_value(call.options["payload"]))
    call.screen.result({"jid": jid, "signal": call.options["name"]}, f"signal sent to {jid}")
    return OK


def parse_value(text: str) -> Any:
    """Parse an argument of the command line: JSON, or else text, so that a plain word needs no quotes."""
    try:
        value = json.loads(text)
    except ValueError:
        if not text.isprintable():
            raise InvalidPayload("expected printable arguments; write others as JSON") from None
        return text
    try:
        return normalize(value)
    except ValueError:  # json.loads accepts NaN, and reads 1e999 as infinity
        raise InvalidPayload(f"arguments: expected JSON, which has no NaN and no Infinity, got {text:.80}") from None
