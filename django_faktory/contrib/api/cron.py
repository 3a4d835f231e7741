"""Cron entries over the REST API: list, show, create, edit, delete, pause, resume and run now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema_view
from rest_framework import status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from ...models.cron import CronEntry, CronRun
from ...models.permissions import may_see
from ...operations import rows
from ...operations.serializers import cron_call_of, cron_entry_of, next_times_of
from ...store.cron import entries as cron_entries
from ...store.cron import runs as cron_runs
from ...tasks import base, cron, redaction
from . import answers, inputs
from .base import Resource, get_alias
from .described import UNSEEN, describe, describe_action
from .filters import CronFilter
from .journal import ADDED, DELETED, record_change
from .paging import ByName
from .problems import WrongState

# As many as the admin shows on the page of an entry.
NEXT_TIMES = 5
RUNS_SHOWN = 50
_DEFAULTS: dict[str, Any] = {"queue": "", "args": [], "kwargs": {}, "job": {}, **cron.POLICIES}


@extend_schema_view(
    list=describe(summary="List cron entries by name"),
    retrieve=describe(summary="Show a cron entry", responses=answers.CronDetail),
)
class CronEntries(Resource):
    """Cron entries, which enqueue a job at every tick of a schedule."""

    queryset = CronEntry.objects.none()
    serializer_class = answers.CronSummary
    pagination_class = ByName
    filterset_class = CronFilter
    lookup_field = "name"
    lookup_value_regex = "(?:(?!/(?:pause|resume|run)/$).)+"  # names may contain slashes
    resource = "cronentry"

    def get_queryset(self) -> Any:
        """Return all entries, including entries removed from the code."""
        return CronEntry.objects.using(get_alias())

    def serialize(self, rows: Any) -> Any:
        """Return cron entries, each with its latest run."""
        latest = cron_runs.read_latest([entry.pk for entry in rows], using=get_alias())
        return [self._summary_of(entry, latest.get(entry.pk)) for entry in rows]

    @describe(
        summary="Create a cron entry",
        description="Validated like an entry defined in code.",
        request=inputs.NewCronSerializer,
        responses={201: answers.CronDetail, 204: UNSEEN},
    )
    def create(self, request: Request) -> Response:
        """Create an entry with the origin `admin`. Raises WrongState (409) if the name is taken."""
        values = self.read_input(inputs.NewCronSerializer)
        reason = values.pop("reason")
        using = get_alias()
        # With the defaults that entries in code have, so that both kinds behave alike.
        definition = _check_definition({**_DEFAULTS, "zone": settings.TIME_ZONE, **values})
        entry = CronEntry(**definition._asdict())
        name_taken = WrongState(f"name: a cron entry is called {entry.name!r:.80} already")
        if CronEntry.objects.using(using).filter(name=entry.name).exists():
            raise name_taken
        try:
            # The check above can race with another request; the unique index decides, and the savepoint keeps the outer
            # transaction usable.
            with transaction.atomic(using=using):
                cron_entries.save(entry, using=using)
        except IntegrityError as error:
            raise name_taken from error
        record_change(request, entry, "Written", flag=ADDED, reason=reason)
        return self.respond(lambda: self.serialize_one(self._reload(entry)), code=status.HTTP_201_CREATED)

    @describe(
        summary="Edit a cron entry of the admin",
        description="Members left out keep their value. An entry defined in code is refused with 409.",
        request=inputs.CronChangesSerializer,
        responses={200: answers.CronDetail, 204: UNSEEN},
    )
    def partial_update(self, request: Request, **_: Any) -> Response:
        """Change an entry that is not defined in code; a new schedule or zone applies from now on."""
        # Partial: members that a new entry must have are optional in a change.
        values = self.read_input(inputs.CronChangesSerializer, partial=True)
        reason, entry = values.pop("reason", ""), self.get_object()
        if entry.origin == CronEntry.EntryOrigin.CODE:
            raise WrongState(f"{entry.name}: is defined in code; change it there")
        if not values:
            raise ValidationError(f"expected one of {', '.join(('schedule', 'zone', 'jobtype', *_DEFAULTS))}")
        _refuse_to_reveal(entry, values)
        # The whole definition is checked again: a new jobtype may not accept the stored arguments.
        for field, value in _check_definition({**_get_definition(entry), **values})._asdict().items():
            setattr(entry, field, value)
        cron_entries.save(entry, using=get_alias())
        record_change(request, entry, f"Edited {', '.join(sorted(values))}", reason=reason)
        return self.respond(lambda: self.serialize_one(self._reload(entry)))

    @describe(
        summary="Delete a cron entry",
        description="Created in the admin, or removed from the code.",
        parameters=[OpenApiParameter("reason", OpenApiTypes.STR, description="Reason for the log.")],
        responses={204: None},
    )
    def destroy(self, request: Request, **_: Any) -> Response:
        """Delete an entry. Raises WrongState (409) if code still defines it: it would be created again."""
        validated = self.read_input(inputs.ReasonSerializer, source=request.query_params)
        entry = self.get_object()
        if entry.origin == CronEntry.EntryOrigin.CODE and entry.removed_at is None:
            raise WrongState(f"{entry.name}: is defined in code, and would come back; remove it there")
        # Written before the delete: the log entry needs the primary key of the row.
        record_change(request, entry, "Deleted", flag=DELETED, reason=validated["reason"])
        entry.delete(using=get_alias())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @describe_action("Pause a cron entry", "No tick is due until it is resumed.", answers.CronDetail, shows_row=True)
    def pause(self, request: Request, **_: Any) -> Response:
        """Pause the entry; nothing changes if it is already paused."""
        return self._execute(request, cron_entries.pause, "Paused")

    @describe_action(
        "Resume a cron entry",
        "Ticks are due again; ticks during the pause are skipped.",
        answers.CronDetail,
        shows_row=True,
    )
    def resume(self, request: Request, **_: Any) -> Response:
        """Resume the entry; ticks during the pause are skipped."""
        return self._execute(request, cron_entries.resume, "Resumed")

    @describe_action(
        "Run a cron entry now",
        "Enqueues a job at once, ignoring its pause and overlap policy.",
        answers.Enqueued,
    )
    def run(self, request: Request, **_: Any) -> Response:
        """Enqueue a job of the entry now; the schedule is not affected."""
        validated, entry = self.read_input(inputs.ReasonSerializer), self.get_object()
        # The row of a removed entry is kept for its history (ADR 0014); nothing defines its job now.
        if entry.removed_at is not None:
            raise WrongState(f"{entry.name}: is no longer defined in code")
        jid = cron.run_now(entry, using=get_alias()).jid
        record_change(request, entry, "Run manually", reason=validated["reason"])
        return Response({"jid": jid})

    def _execute(self, request: Request, change: Any, summary: str) -> Response:
        validated, entry = self.read_input(inputs.ReasonSerializer), self.get_object()
        change([entry.pk], using=get_alias())
        record_change(request, entry, summary, reason=validated["reason"])
        return self.respond(lambda: self.serialize_one(self._reload(entry)))

    def _summary_of(self, entry: CronEntry, run: CronRun | None) -> dict[str, Any]:
        summary = cron_entry_of(entry, run)
        return summary | {"latest": summary["latest"] and self._hide_fields(summary["latest"])}

    def serialize_one(self, row: CronEntry) -> dict[str, Any]:
        """Return a cron entry with its next ticks and its latest runs."""
        entry, using = row, get_alias()
        runs = list(CronRun.objects.using(using).filter(entry=entry).order_by("-id")[:RUNS_SHOWN])
        # The job row is more recent than the outcome in the run row.
        outcomes = cron_runs.read_outcomes([run.jid for run in runs if run.jid], using=using)
        for run in runs:
            run.outcome = outcomes.get(run.jid, run.outcome)
        return rows.CronDetail.read(
            entry,
            **self._summary_of(entry, runs[0] if runs else None),
            **self._hide_fields(cron_call_of(entry)),
            next_times=next_times_of(entry, NEXT_TIMES),
            runs=[self._hide_fields(rows.CronRunRow.read(run)) for run in runs],
        )

    def _hide_fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the members, with None for members hidden from this user."""
        return {
            # Null, and not left out: the OpenAPI document describes it for cron entries (ADR 0034).
            name: value if may_see(self.request.user, self.resource, name) else None
            for name, value in values.items()
        }

    def _reload(self, entry: CronEntry) -> CronEntry:
        # `pause` and `save` change the row, not this object.
        stored: CronEntry = self.get_queryset().get(pk=entry.pk)
        return stored


def _check_definition(values: dict[str, Any]) -> cron_entries.CronDefinition:
    """Return the checked definition, with the rules of the admin's form. Raises InvalidCron."""
    base.import_tasks()  # the web process may not have imported the tasks
    policies = {key: values[key] for key in ("missed", "window", "overlap")}
    fields = ("name", "schedule", "zone", "jobtype", "queue", "args", "kwargs", "job")
    return cron.build_definition(**{field: values[field] for field in fields}, policies=policies, is_json=True)


def _refuse_to_reveal(entry: CronEntry, values: Mapping[str, Any]) -> None:
    """Raise WrongState if the jobtype changes while arguments stay.

    `REDACT` may hide arguments of the old jobtype and show the same arguments for the new one.
    """
    unchanged = {"args", "kwargs"} - set(values)
    if redaction.is_on() and unchanged and values.get("jobtype", entry.jobtype) != entry.jobtype:
        raise WrongState(
            f"jobtype: expected {' and '.join(sorted(unchanged))} with it: FAKTORY['REDACT'] hides arguments"
        )


def _get_definition(entry: CronEntry) -> dict[str, Any]:
    """Return the definition of an entry, with the API's member names."""
    columns = {field: getattr(entry, field) for field in ("name", "schedule", "zone", "jobtype", "queue", "missed")}
    decoded = {field: cron.decode_member(field, getattr(entry, field)) for field in ("args", "kwargs", "job")}
    return {**columns, **decoded, "window": entry.window_s, "overlap": entry.overlap}
