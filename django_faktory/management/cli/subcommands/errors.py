"""`errors`: show failed jobs in groups of the same cause, as the admin does."""

from __future__ import annotations

from typing import Any

from ....operations import error_groups
from ....operations.error_groups import ErrorGroup
from ....operations.rows import time_of
from ..screen import age_of
from ..subcommand import OK, Invocation, limit, subcommand
from ..table import Column


@subcommand("errors", "List failed jobs in groups of the same cause, the largest first.", limit("groups", 20))
def _errors(call: Invocation) -> int:
    found, most = error_groups.group_failed(using=call.require_alias()), call.options["limit"]
    documents = [_document(group) for group in found.groups[:most]]
    if call.screen.is_json:
        is_more = found.is_more or len(found.groups) > most
        numbers = {"jobs_read": found.jobs_read, "jobs_total": found.jobs_total, "is_more": is_more}
        call.screen.json({**numbers, "groups": documents})
        return OK
    call.screen.table(_COLUMNS, documents)
    if len(found.groups) > most:
        call.screen.note(f"showing {most} of {len(found.groups)} groups; use --limit for more")
    if found.is_more:
        call.screen.note(f"read the latest {found.jobs_read:,} of {found.jobs_total:,} failed jobs")
    if not documents:
        call.screen.note("no failed jobs")
    return OK


def _document(group: ErrorGroup) -> dict[str, Any]:
    return {
        "errtype": group.kind.errtype or None,
        "jobtype": group.kind.jobtype,
        "place": group.frame or None,
        "message": group.message,
        "dead": group.count,
        "retrying": group.retrying,
        "queues": sorted(group.queues),
        "first_at": time_of(group.first_at),
        "latest_at": time_of(group.latest_at),
    }


_COLUMNS = (
    Column("DEAD", "dead"),
    Column("RETRYING", "retrying", 4),
    Column("ERROR", "errtype", keeps_end=True),
    Column("TASK", "jobtype", 1, keeps_end=True),
    Column("PLACE", "place", 5),
    Column("MESSAGE", "message", 2),
    Column("LATEST", age_of("latest_at"), 3),
)
