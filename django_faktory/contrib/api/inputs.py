"""Serializers of the request bodies. They check types and ranges; the operations check the meaning."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from ...core import queries
from ...core.cron import Missed, Overlap
from ...core.limits import Scope

# Bounded, because the admin log keeps it for each change.
MAX_REASON_LENGTH = 1000
# Bounds the time of one request; the client repeats it for further jobs.
MAX_AT_ONCE = 5000
# Below datetime's own maximum, so that a conversion to another time zone does not overflow.
_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
# `\Z` and not `$`, which also matches before a line break at the end.
_QueueField = partial(serializers.RegexField, r"^[A-Za-z0-9._-]{1,255}\Z", required=False)
_PriorityField = partial(serializers.IntegerField, min_value=-100, max_value=100, required=False)
_TextField = partial(serializers.CharField, max_length=255, required=False)
# The maximum of a column: an integer of 32 bits on PostgreSQL and MariaDB.
_NumberField = partial(serializers.IntegerField, min_value=1, max_value=2**31 - 1, required=False)


class UtcDateTimeField(serializers.DateTimeField):
    """Time, converted to UTC whatever the project's settings are.

    A time without an offset is taken as local time of the project.
    """

    def enforce_timezone(self, value: datetime) -> datetime:
        """Return the time in UTC. Raises ValidationError outside 1970 to 9999, the range that databases store."""
        try:
            aware = timezone.make_aware(value) if timezone.is_naive(value) else value
            moment = aware.astimezone(UTC)
        except (OverflowError, ValueError):
            self.fail("invalid", format="RFC 3339")
        if not _EARLIEST <= moment <= _LATEST:
            self.fail("invalid", format="RFC 3339, from 1970 to 9999")
        return moment


@extend_schema_field({"type": "array", "items": {}})
class _ArrayField(serializers.JSONField):
    def to_internal_value(self, data: Any) -> Any:
        """Return the list; its items are validated later, as arguments of the task."""
        if not isinstance(data, list):
            raise serializers.ValidationError(f"expected an array, got {type(data).__name__}")
        return data


@extend_schema_field({"type": "object", "additionalProperties": {}})
class _ObjectField(serializers.JSONField):
    def to_internal_value(self, data: Any) -> Any:
        """Return the object unchanged. Raises ValidationError for any other type."""
        if not isinstance(data, dict):
            raise serializers.ValidationError(f"expected an object, got {type(data).__name__}")
        return data


class ReasonSerializer(serializers.Serializer[Any]):
    """Base of every action's input: an optional reason for the log."""

    reason = serializers.CharField(
        default="", allow_blank=True, max_length=MAX_REASON_LENGTH, help_text="Reason for the log."
    )


class NewJobSerializer(ReasonSerializer):
    """A job to enqueue."""

    task = _TextField(required=True, help_text="A task of this project, by its jobtype.")
    args = _ArrayField(required=False, help_text="Its arguments, in JSON's types.")
    # The task's signature is checked by the view, which knows the task.
    kwargs = _ObjectField(default={}, help_text="Its keyword arguments.")
    queue = _QueueField(help_text="Its queue; without it the queue of the task.")
    priority = _PriorityField(help_text="Its priority, larger first; without it the priority of the task.")
    run_after = UtcDateTimeField(required=False, help_text="Earliest time to run it.")
    about = _TextField(help_text="The object it is about, as `app.model/pk`.")

    def validate_about(self, value: str) -> str:
        """Check that the value names an object as `app.model/pk`."""
        if not queries.is_about(value):
            raise serializers.ValidationError("expected app.model/pk, such as shop.order/42")
        return value


class JobChangesSerializer(ReasonSerializer):
    """Changes of a job that is not running; members left out keep their value."""

    args = _ArrayField(required=False, help_text="All its arguments, encoded as in a job.")
    kwargs = _ObjectField(required=False, help_text="All its keyword arguments.")
    queue = _QueueField(help_text="Its queue.")
    priority = _PriorityField(help_text="Larger first.")
    run_after = UtcDateTimeField(required=False, help_text="When a scheduled or retrying job becomes due.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Raise ValidationError unless at least one member changes."""
        if attrs.keys() <= {"reason"}:
            raise serializers.ValidationError("expected args, kwargs, queue, priority or run_after")
        return attrs


class SignalSerializer(ReasonSerializer):
    """A signal to a job."""

    name = _TextField(required=True, help_text="Its name, as in `wait_for`.")
    payload = serializers.JSONField(default=None, help_text="What the wait returns, in JSON's types.")


class BulkSerializer(ReasonSerializer):
    """An action on the jobs of a query, one bounded part at a time."""

    query = _TextField(
        max_length=queries.MAX_TEXT, allow_blank=True, help_text="Which jobs, such as `dead queue:mail error:Timeout`."
    )
    limit = serializers.IntegerField(
        min_value=1,
        max_value=MAX_AT_ONCE,
        default=1000,
        help_text="Maximum number of jobs of this part, oldest first; they are changed in transactions of at most 500.",
    )
    like = _TextField(
        help_text="Instead of a query: the jobs that failed like this one, by its jid. For retry, kill and discard."
    )
    per_minute = _NumberField(max_value=1_000_000, help_text="For retry: workers get at most so many in a minute.")
    after = _TextField(max_length=20_000, help_text="`next` of the previous part, which has its query and its pace.")
    dry_run = serializers.BooleanField(default=False, help_text="Count the matching jobs and change none.")


class CronChangesSerializer(ReasonSerializer):
    """Changes of a cron entry of the admin; members left out keep their value."""

    schedule = _TextField(required=True, help_text="Five fields, or six with the second first; or @daily, …")
    zone = _TextField(max_length=64, help_text="Time zone of the schedule; default: that of the project.")
    jobtype = _TextField(required=True, help_text="Name of a task, or of a function of a worker in another language.")
    queue = _TextField(allow_blank=True, help_text="Its queue; empty: the queue of the task.")
    args = _ArrayField(required=False, help_text="Arguments, encoded as in a job.")
    kwargs = _ObjectField(required=False, help_text="Keyword arguments; for tasks of this project.")
    job = _ObjectField(
        required=False, help_text="retry, reserve_for, priority, backtrace, custom; for other languages' jobtypes."
    )
    missed = serializers.ChoiceField(
        [str(value) for value in Missed], required=False, help_text="Policy for ticks that no node handled."
    )
    window = _NumberField(min_value=0, help_text='Seconds back that "once" and "all" search.')
    overlap = serializers.ChoiceField(
        [str(value) for value in Overlap], required=False, help_text="Policy while an earlier job waits or runs."
    )


class NewCronSerializer(CronChangesSerializer):
    """A cron entry to create."""

    name = _TextField(required=True, help_text="Its unique name.")

    def validate_name(self, value: str) -> str:
        """Apply the rule for names of entries defined in code: printable characters only."""
        if not value.isprintable():
            raise serializers.ValidationError("expected printable characters")
        return value


class LimitChangesSerializer(ReasonSerializer):
    """New values of a limit; a value left out means no limit of that kind."""

    # Null and a missing value mean the same, because a PUT replaces the whole limit.
    concurrency = _NumberField(allow_null=True, help_text="Jobs that may run at once.")
    rate = _TextField(max_length=40, allow_null=True, help_text="Jobs that may start per period, such as 100/s.")
    burst = _NumberField(allow_null=True, help_text="Jobs that may start at once after an idle period.")


class NewLimitSerializer(LimitChangesSerializer):
    """A limit to create."""

    scope = serializers.ChoiceField([str(value) for value in Scope], help_text="queue, task or key.")
    name = _TextField(required=True, help_text="Name of the queue, task or key.")


class TaskNamesSerializer(ReasonSerializer):
    """Names of tasks to pause or resume."""

    tasks = serializers.ListField(
        child=serializers.CharField(max_length=255), min_length=1, max_length=100, help_text="Their names."
    )
