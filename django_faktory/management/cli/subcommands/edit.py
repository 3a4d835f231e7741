"""`edit`: change the arguments, queue, priority or time of a job that is not running."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.utils import timezone

from ....core.payloads import queue_name
from ....core.queries import parse_seconds
from ....errors import JobNotFound
from ....operations.edit import Changes, edit
from ....operations.serializers import whole_job_of
from ..subcommand import NOTHING, OK, Argument, Invocation, Unsupported, flag, subcommand
from .jobs import parse_value


# argparse shows the name of the function in its error: `invalid priority value: 'x'`.
def priority(text: str) -> int:
    """Parse an option as a priority, -100 to 100. Raises ValueError."""
    number = int(text)
    if not -100 <= number <= 100:
        raise ValueError
    return number


@subcommand(
    "edit",
    "Change arguments, queue, priority or time of a job that is not running; its state stays.",
    Argument("jid", help="The job's id."),
    # `dest`: Django takes an option named args as the positional arguments of the command.
    Argument("--args", dest="arguments", metavar="JSON", help="Its arguments: a JSON array."),
    Argument("--kwargs", metavar="JSON", help="Its keyword arguments: a JSON object."),
    Argument("--queue", metavar="NAME", help="Its queue."),
    Argument("--priority", type=priority, metavar="N", help="Its priority, -100 to 100, larger first."),
    Argument(
        "--in",
        dest="delay",
        metavar="DURATION",
        help="When a scheduled or retrying job runs, counted from now: 90s, 15m, 2h, 1d.",
    ),
    flag("--new", "Accept a queue that was never used."),
)
def _edit(call: Invocation) -> int:
    options, using = call.options, call.require_alias()
    delay_s = parse_seconds(options["delay"], "--in") if options["delay"] else None
    changes = Changes(
        args=_parse_structure("--args", options["arguments"], list),
        kwargs=_parse_structure("--kwargs", options["kwargs"], dict),
        queue=queue_name(options["queue"]) if options["queue"] else None,
        priority=options["priority"],
        run_at=None if delay_s is None else timezone.now() + timedelta(seconds=delay_s),
    )
    changed = [name for name, value in changes._asdict().items() if value is not None]
    if not changed:
        raise Unsupported("edit: expected a change: --args, --kwargs, --queue, --priority or --in")
    if changes.queue:
        call.require_known("queue", [changes.queue], call.known_queue_names())
    # No job has an unprintable id, and PostgreSQL raises for NUL.
    job = None
    with suppress(JobNotFound):
        job = edit(options["jid"], changes, using=using) if options["jid"].isprintable() else None
    if job is None:
        call.screen.note(f"no job has the ID {options['jid']}")
        return NOTHING
    call.screen.result(whole_job_of(job), f"edit: {', '.join(changed)} of {job.jid}; the job is {job.state}")
    return OK


def _parse_structure(option: str, text: str | None, kind: type[Any]) -> Any:
    if text is None:
        return None
    value = parse_value(text)
    if not isinstance(value, kind):
        raise Unsupported(f"{option}: expected a JSON {'array' if kind is list else 'object'}, got {text:.80}")
    return value
