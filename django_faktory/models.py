"""What is stored, and the constraints that state the invariants. No verbs here: state changes live in `store`.

Knows no broker, task or setting. Times are the database's, aware, UTC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import F, Q
from django.db.models.functions import Now

from .lifecycle import State

if TYPE_CHECKING:
    _CharField = models.CharField[Any, Any]
    _Lookup = models.Lookup[Any]
else:  # Django's own classes take no type parameters at run time
    _CharField = models.CharField
    _Lookup = models.Lookup


class ExactCharField(_CharField):
    """Text compared byte for byte, on every database: ids and names that differ in case or in a trailing
    space are different. (MariaDB's default collation would take them for one; PostgreSQL's is slower.)"""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        """Add the collation of the database at hand."""
        found: dict[str, Any] = super().db_parameters(connection)
        return {**found, "collation": {"postgresql": "C", "mysql": "utf8mb4_nopad_bin"}.get(connection.vendor)}

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Spell the type out on PostgreSQL: for "varchar" Django adds a second, LIKE index to each unique one,
        which a column in collation C does not need and every PUSH would pay for."""
        found = super().db_type(connection)
        return found and found.replace("varchar", "character varying") if connection.vendor == "postgresql" else found


class HotIndex(models.Index):
    """An index over the rows in some states only; where the database has no partial indexes, one led by the state.

    Django leaves the condition out on MariaDB, and the plain index would make FETCH walk over finished rows.
    """

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        """Build the statement for the database at hand."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **kwargs)
        led_by_state = models.Index(fields=["state", *self.fields], name=self.name)
        return led_by_state.create_sql(model, schema_editor, using, **kwargs)


class UniqueWhereSet(models.UniqueConstraint):
    """A unique constraint on the rows that have a value: only those are in its index, where the database can.

    (Django leaves a constraint with a condition out on MariaDB, where NULLs do not collide anyway.)
    """

    def create_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the statement for the database at hand."""
        return self._here(schema_editor).create_sql(model, schema_editor)

    def constraint_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the part of CREATE TABLE for the database at hand."""
        return self._here(schema_editor).constraint_sql(model, schema_editor)

    def remove_sql(self, model: type[models.Model] | None, schema_editor: BaseDatabaseSchemaEditor | None) -> Any:
        """Build the statement for the database at hand."""
        return self._here(schema_editor).remove_sql(model, schema_editor)

    def _here(self, schema_editor: Any) -> models.UniqueConstraint:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        has_value = Q(**{f"{field}__isnull": False for field in self.fields}) if is_partial else None
        return models.UniqueConstraint(fields=list(self.fields), name=self.name, condition=has_value)


class _Among(_Lookup):
    """Whether a column has one of these values, as literals in the SQL, in this order: SQLite takes a partial index for
    its very own condition only. For values that are ours, not a user's."""

    lookup_name = "among"
    prepare_rhs = False

    def as_sql(self, compiler: Any, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        """`column = 'a'`, or `column IN ('a', 'b')`."""
        column, params = self.process_lhs(compiler, connection)
        values = [f"'{value}'" for value in self.rhs]
        return f"{column} = {values[0]}" if len(values) == 1 else f"{column} IN ({', '.join(values)})", params


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs by the words of the domain."""

    def in_state(self, *states: State) -> Self:
        """Jobs in any of these states."""
        return self.filter(_Among(F("state"), tuple(state for state in State if state in states)))


class Job(models.Model):
    """One unit of work, from PUSH to its end. Changed by `store` only, by guarded updates."""

    jid = ExactCharField(max_length=255, unique=True)
    jobtype = ExactCharField(max_length=255)
    queue = ExactCharField(max_length=255)
    state = ExactCharField(max_length=10, choices=[(str(state), str(state)) for state in State])
    weight = models.SmallIntegerField(
        default=0, help_text="Minus the priority: ascending, so that one plain index serves FETCH on every database."
    )
    payload = models.TextField(help_text="The job's JSON as its client sent it.")
    retry = models.IntegerField(default=25)
    reserve_for = models.IntegerField(default=1800)
    backtrace = models.SmallIntegerField(default=0)
    result_ttl = models.IntegerField(null=True)

    created_at = models.DateTimeField(db_default=Now())
    run_at = models.DateTimeField(null=True, help_text="When a scheduled or retrying job becomes due.")
    enqueued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    reserved_until = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    purge_at = models.DateTimeField(null=True)

    wid = ExactCharField(max_length=255, default="", db_default="", help_text="Who holds it, or held it last.")
    attempt = models.IntegerField(
        default=0, db_default=0, help_text="How often it was handed out; fences late reports."
    )
    failures = models.IntegerField(default=0, db_default=0)
    losses = models.SmallIntegerField(default=0, db_default=0, help_text="How often its worker was lost.")
    errtype = ExactCharField(max_length=100, default="", db_default="")
    failure = models.TextField(default="", db_default="", help_text="JSON of the latest failure, as FETCH gives it.")
    history = models.TextField(default="", db_default="", help_text="JSON array: every failed attempt.")
    result = models.TextField(null=True, help_text="JSON of what the task returned.")

    expires_at = models.DateTimeField(null=True, help_text="A job that nobody took by then is dropped.")
    unique_key = ExactCharField(max_length=64, null=True, help_text="Held against others of its kind (W27).")
    unique_expires_at = models.DateTimeField(null=True, help_text="When the key is free whatever happens.")
    unique_until_start = models.BooleanField(default=False, db_default=False)

    cancel_requested_at = models.DateTimeField(
        null=True, help_text="When somebody cancelled it while it ran; counts until it is enqueued anew."
    )

    objects = JobQuerySet.as_manager()

    class Meta:
        indexes: ClassVar = [
            HotIndex(
                fields=["queue", "weight", "enqueued_at", "id"], name="faktory_ready", condition=Q(state="enqueued")
            ),
            HotIndex(fields=["run_at"], name="faktory_due", condition=Q(state__in=["scheduled", "retries"])),
            HotIndex(fields=["reserved_until"], name="faktory_reserved", condition=Q(state="working")),
            HotIndex(
                fields=["purge_at"],
                name="faktory_purge",
                condition=Q(state__in=["dead", "succeeded", "discarded", "expired"]),
            ),
            # No HotIndex: led by the state, MariaDB would have to touch it for each job that expires never.
            models.Index(fields=["expires_at"], name="faktory_expiring", condition=Q(expires_at__isnull=False)),
        ]
        constraints: ClassVar = [
            UniqueWhereSet(name="faktory_job_unique", fields=["unique_key"]),
            models.CheckConstraint(name="faktory_job_state", condition=Q(state__in=[str(state) for state in State])),
            models.CheckConstraint(name="faktory_job_weight", condition=Q(weight__gte=-100, weight__lte=100)),
            models.CheckConstraint(
                name="faktory_job_waiting_has_time",
                condition=~Q(state__in=["scheduled", "retries"]) | Q(run_at__isnull=False),
            ),
            models.CheckConstraint(
                name="faktory_job_enqueued_has_place", condition=~Q(state="enqueued") | Q(enqueued_at__isnull=False)
            ),
            models.CheckConstraint(
                name="faktory_job_working_is_reserved",
                condition=~Q(state="working") | Q(reserved_until__isnull=False, attempt__gte=1),
            ),
            models.CheckConstraint(
                name="faktory_job_finished_has_end",
                condition=~Q(state__in=["dead", "succeeded", "discarded", "expired"])
                | Q(finished_at__isnull=False, purge_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.jobtype} {self.jid}"

    @property
    def priority(self) -> int:
        """Django's priority, -100 to 100, larger first."""
        return -self.weight

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancelled it since it was enqueued last."""
        asked, enqueued = self.cancel_requested_at, self.enqueued_at
        return asked is not None and (enqueued is None or asked >= enqueued)


class Tracking(models.Model):
    """What a job says of itself by TRACK SET, while it runs and for a while after (W27). Its state is the job's."""

    jid = ExactCharField(max_length=255, primary_key=True)
    percent = models.SmallIntegerField(null=True)
    desc = models.TextField(null=True)
    updated_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        constraints: ClassVar = [
            models.CheckConstraint(name="faktory_tracking_percent", condition=Q(percent__range=(0, 100))),
        ]

    def __str__(self) -> str:
        return str(self.jid)


class Queue(models.Model):
    """A queue somebody used, and whether it is paused. Its jobs know it by name only."""

    name = ExactCharField(max_length=255, primary_key=True)
    paused_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return str(self.name)


class WorkerProcess(models.Model):
    """A process that said HELLO with a wid, in whatever language."""

    class State(models.TextChoices):
        """One way: running, quiet, terminate."""

        RUNNING = "running"
        QUIET = "quiet"
        TERMINATE = "terminate"

    wid = ExactCharField(max_length=255, primary_key=True)
    hostname = models.CharField(max_length=255, default="")
    pid = models.BigIntegerField(default=0)
    labels = models.JSONField(default=list)
    state = ExactCharField(max_length=10, choices=State.choices, default=State.RUNNING)
    rss_kb = models.BigIntegerField(default=0)
    started_at = models.DateTimeField(db_default=Now())
    seen_at = models.DateTimeField(db_default=Now(), help_text="Latest HELLO, BEAT or sight of a connection.")
    beat_at = models.DateTimeField(
        null=True, help_text="Latest BEAT; a wid that never sent one is left to its reservations."
    )

    class Meta:
        verbose_name_plural = "worker processes"
        constraints: ClassVar = [
            models.CheckConstraint(
                name="faktory_worker_state", condition=Q(state__in=["running", "quiet", "terminate"])
            ),
        ]

    def __str__(self) -> str:
        return f"{self.hostname}:{self.pid} {self.wid}"


class Counter(models.Model):
    """How many jobs ended, by day. Split into slots, so that processes do not wait for each other's row."""

    pk = models.CompositePrimaryKey("day", "slot")
    day = models.DateField()
    slot = models.SmallIntegerField()
    processed = models.BigIntegerField(default=0, help_text="Ends, good and bad.")
    failed = models.BigIntegerField(default=0)
    late = models.BigIntegerField(default=0, help_text="Reports that came too late to change anything.")

    def __str__(self) -> str:
        return f"{self.day} #{self.slot}"


class OutboxEntry(models.Model):
    """A job on its way to another database or to a Faktory server: see `brokers.outbox`."""

    jid = ExactCharField(max_length=255)
    queue = ExactCharField(max_length=255)
    job = models.TextField(help_text="The job with all that is known of it, as JSON.")
    created_at = models.DateTimeField(db_default=Now())
    leased_until = models.DateTimeField(null=True, help_text="Somebody is handing it on until then.")
    error = models.TextField(default="", db_default="", help_text="Why it was refused: it stays for a person to see.")

    class Meta:
        verbose_name_plural = "outbox entries"

    def __str__(self) -> str:
        return f"#{self.pk} {self.jid}"
