"""Serializers of the API's responses, built from the tables of `operations.rows` for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drf_spectacular.utils import extend_schema_serializer
from rest_framework import serializers

from ...operations import rows
from ...operations.rows import Counts, Document, Field, Flag, Number, Row, Text, Texts
from ...operations.serializers import whole_job_of

Base = serializers.Serializer[Any]

_KINDS: dict[str, Callable[..., Any]] = {
    "text": serializers.CharField,
    "choice": serializers.ChoiceField,
    "number": serializers.IntegerField,
    "seconds": serializers.FloatField,
    "flag": serializers.BooleanField,
    "time": serializers.DateTimeField,
    "texts": lambda **options: serializers.ListField(child=serializers.CharField(), **options),
    "times": lambda **options: serializers.ListField(child=serializers.DateTimeField(), **options),
    "counts": lambda **options: serializers.DictField(child=serializers.IntegerField(), **options),
    # Any JSON value, null included: its schema is `{}`. With `allow_null` it would be `oneOf` that and null, and a null
    # would match both.
    "value": serializers.JSONField,
}


@cache
def serializer_of(row: type[Row], read: Callable[[Any], dict[str, Any]] | None = None) -> type[Base]:
    """Return the serializer of a row; `read` makes the document if the columns do not suffice."""

    def to_representation(_self: Any, instance: Any) -> dict[str, Any]:
        return (read or row.read)(instance)

    members: dict[str, Any] = {name: _build(field) for name, field in row.fields.items()}
    members |= {"__doc__": row.__doc__, "to_representation": to_representation}
    serializer: type[Base] = type(f"{row.__name__.removesuffix('Row')}Serializer", (Base,), members)
    return serializer


def _build(field: Field) -> Any:
    options: dict[str, Any] = {"help_text": field.help, "read_only": True}
    # REST framework refuses the option, even with False, in some kinds of fields.
    options |= {"allow_null": True} if field.null else {}
    options |= {"choices": field.choices} if field.choices else {}
    if field.row is None:
        return _KINDS[field.kind](**options)
    made = serializer_of(field.row)  # type: ignore[arg-type]  # to mypy a class with a `read` is not hashable
    return made(**options | ({"many": True} if field.many else {}))


JobSummary = serializer_of(rows.JobSummary)
JobDetail = serializer_of(rows.JobDetail, whole_job_of)
Alarm = serializer_of(rows.AlarmRow)
Queue = serializer_of(rows.QueueRow)
Worker = serializer_of(rows.WorkerRow)
Batch = serializer_of(rows.BatchRow)
CronSummary = serializer_of(rows.CronSummary)
CronDetail = serializer_of(rows.CronDetail)
Lock = serializer_of(rows.LockRow)
Limit = serializer_of(rows.LimitRow)
LimitDetail = serializer_of(rows.LimitDetail)


@serializer_of
class BatchTree(Row):
    """The tree of a batch, depth first."""

    batches = Document("Depth first, beginning with the root.", row=rows.BatchTreeItem, many=True)
    is_more = Flag("Whether the tree is larger than what is shown.")


@serializer_of
class Enqueued(Row):
    """The job that was enqueued."""

    # No more of the job: a user who may enqueue need not have the permission to view jobs (ADR 0034).
    jid = Text("The job's id.")


@serializer_of
class ActionResult(Row):
    """Result of an action on one job."""

    changed = Number("Jobs changed: 1.")
    state = Text("The job's state now; null: its row is gone.", null=True)


@serializer_of
class BulkResult(Row):
    """Result of one part of an action on many jobs."""

    query = Text("The query in canonical form; empty for jobs that failed like one.")
    found = Number("Jobs found in this part; with `dry_run` all matching jobs, counted up to 10000.")
    changed = Number("Jobs changed; the others had left the states that the action requires.")
    next = Text("Send it as `after` for the next part; null: this was the last.", null=True)


@serializer_of
class ClearedQueue(Row):
    """Whether a queue has been cleared completely."""

    is_done = Flag("False: jobs are left; send the request again.")


@serializer_of
class ChangeCount(Row):
    """Result of an action on a worker process, or of a retry of the failed jobs of a batch."""

    changed = Number("Workers or jobs changed. A worker receives its new state in the reply to its next heartbeat.")


@serializer_of
class RemovedLimit(Row):
    """Note about a deleted limit that is defined in code."""

    detail = Text("What follows: the limit returns when a node starts.")


@serializer_of
class ChangedTasks(Row):
    """Tasks changed by a pause or resume."""

    tasks = Texts("Tasks that this request changed.")


@serializer_of
class ReleasedLock(Row):
    """Result of releasing a lock."""

    changed = Number("Locks released: 1.")


@extend_schema_serializer(many=False)  # one object, although the action is named `list`
@serializer_of
class StatisticsRow(Row):
    """Totals and counts of all jobs, queues, workers and batches."""

    processed = Number("Jobs that ended, with or without success.")
    failed = Number("Failures.")
    late = Number("Reports of workers that arrived too late to change a job.")
    sets = Counts("Jobs by state.")
    queues = Number("Queues that have been used.")
    workers = Counts("Live workers by state.")
    batches = Counts("Unfinished batches: open, committed.")
