"""What the API can be told. Shapes only: whether it makes sense is judged where it is done."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from .. import queries
from ..cron import Missed, Overlap
from ..gating import Scope

if TYPE_CHECKING:
    Base = serializers.Serializer[Any]
else:
    Base = serializers.Serializer

LONGEST_REASON = 1000
MOST_AT_ONCE = 5000
_EARLIEST, _LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


class Moment(serializers.DateTimeField):
    """A time in UTC, whatever the project's settings; without an offset it is local time there."""

    def enforce_timezone(self, value: datetime) -> datetime:
        """Aware, and in the span that databases know."""
        try:
            aware = timezone.make_aware(value) if timezone.is_naive(value) else value
            moment = aware.astimezone(UTC)
        except (OverflowError, ValueError):
            self.fail("invalid", format="RFC 3339")
        if not _EARLIEST <= moment <= _LATEST:
            self.fail("invalid", format="RFC 3339, from 1970 to 9999")
        return moment


@extend_schema_field({"type": "array", "items": {}})
class _Array(serializers.JSONField):
    def to_internal_value(self, data: Any) -> Any:
        """Any list: what is in it is judged as arguments are."""
        if not isinstance(data, list):
            raise serializers.ValidationError(f"expected an array, got {type(data).__name__}")
        return data


@extend_schema_field({"type": "object", "additionalProperties": {}})
class _Object(serializers.JSONField):
    def to_internal_value(self, data: Any) -> Any:
        """Any object."""
        if not isinstance(data, dict):
            raise serializers.ValidationError(f"expected an object, got {type(data).__name__}")
        return data


class Reason(Base):
    """Every act takes it."""

    reason = serializers.CharField(
        required=False,
        allow_blank=True,
        default="",
        max_length=LONGEST_REASON,
        help_text="Why: it is kept in the log with who and what.",
    )


class NewJob(Reason):
    """A job to enqueue."""

    task = serializers.CharField(max_length=255, help_text="A task of this project, by its jobtype.")
    args = _Array(required=False, help_text="Its arguments, in JSON's types.")
    kwargs = _Object(default={}, help_text="Its keyword arguments.")
    queue = serializers.RegexField(
        r"^[A-Za-z0-9._-]{1,255}\Z", required=False, help_text="Another queue than the task's own."
    )
    priority = serializers.IntegerField(
        min_value=-100, max_value=100, required=False, help_text="Another than the task's own; larger first."
    )
    run_after = Moment(required=False, help_text="Not before this time.")
    about = serializers.CharField(
        max_length=255, required=False, help_text="The object it is about, as `app.model/pk`."
    )

    def validate_about(self, value: str) -> str:
        """The name of an object."""
        if not queries.is_about(value):
            raise serializers.ValidationError("expected app.model/pk, such as shop.order/42")
        return value


class JobChanges(Reason):
    """What is to become of a job that does not run; what is left out stays."""

    args = _Array(required=False, help_text="All its arguments, as the job carries them.")
    kwargs = _Object(required=False, help_text="All its keyword arguments.")
    queue = serializers.RegexField(r"^[A-Za-z0-9._-]{1,255}\Z", required=False, help_text="Its queue.")
    priority = serializers.IntegerField(min_value=-100, max_value=100, required=False, help_text="Larger first.")
    run_after = Moment(required=False, help_text="When a scheduled or retrying job becomes due.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Something must change."""
        if not set(attrs) - {"reason"}:
            raise serializers.ValidationError("expected args, kwargs, queue, priority or run_after")
        return attrs


class Bulk(Reason):
    """Many jobs, by a query; a bounded part of them at a time."""

    query = serializers.CharField(
        max_length=queries.MAX_TEXT, help_text="Which jobs, such as `dead queue:mail error:Timeout`."
    )
    limit = serializers.IntegerField(
        min_value=1,
        max_value=MOST_AT_ONCE,
        default=1000,
        help_text="Jobs of this part, the oldest first; changed in transactions of at most 500.",
    )
    after = serializers.RegexField(
        r"^\d{1,18}-\d{1,18}\Z", required=False, help_text="Where the part before ended: its `next`."
    )
    dry_run = serializers.BooleanField(default=False, help_text="Only tell how many there are.")


class CronChanges(Reason):
    """What is to become of a cron entry of the admin; what is left out stays."""

    schedule = serializers.CharField(
        max_length=255, help_text="Five fields, or six with the second first; or @daily, …"
    )
    zone = serializers.CharField(
        max_length=64, required=False, help_text="The time zone it is read in; the project's own unless said."
    )
    jobtype = serializers.CharField(
        max_length=255, help_text="A task of this project, or what a worker in another language calls it."
    )
    queue = serializers.CharField(max_length=255, required=False, allow_blank=True, help_text="Empty: the task's own.")
    args = _Array(required=False, help_text="Arguments, as a job carries them.")
    kwargs = _Object(required=False, help_text="Keyword arguments; for tasks of this project.")
    job = _Object(
        required=False, help_text="retry, reserve_for, priority, backtrace, custom; for other languages' jobtypes."
    )
    missed = serializers.ChoiceField([str(one) for one in Missed], required=False, help_text="Of ticks nobody took.")
    window = serializers.IntegerField(
        min_value=0, max_value=2**31 - 1, required=False, help_text='Seconds back that "once" and "all" look.'
    )
    overlap = serializers.ChoiceField(
        [str(one) for one in Overlap], required=False, help_text="While an earlier job waits or runs."
    )


class LimitChanges(Reason):
    """What a limit is to allow: all of it, what is left out is none."""

    concurrency = serializers.IntegerField(
        min_value=1, max_value=2**31 - 1, required=False, allow_null=True, help_text="How many run at a time."
    )
    rate = serializers.CharField(
        max_length=40, required=False, allow_null=True, help_text="How many start in a time, such as 100/s."
    )
    burst = serializers.IntegerField(
        min_value=1, max_value=2**31 - 1, required=False, allow_null=True, help_text="How many at once after a rest."
    )


class NewLimit(LimitChanges):
    """A limit to set."""

    scope = serializers.ChoiceField([str(one) for one in Scope], help_text="queue, task or key.")
    name = serializers.CharField(max_length=255, help_text="Of the queue, the task or the key.")


class TaskNames(Reason):
    """Tasks, by their names."""

    tasks = serializers.ListField(
        child=serializers.CharField(max_length=255), min_length=1, max_length=100, help_text="Their names."
    )


class NewCron(CronChanges):
    """A cron entry to write."""

    name = serializers.CharField(max_length=255, help_text="Its name: no other entry has it.")

    def validate_name(self, value: str) -> str:
        """As names of code's entries are."""
        if not value.isprintable():
            raise serializers.ValidationError("expected printable characters")
        return value
