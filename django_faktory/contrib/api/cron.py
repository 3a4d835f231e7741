"""Cron entries over the REST API: list, show, create, edit, delete, pause, resume and run now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.db import IntegrityError, transaction
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
from .base import ADDED, DELETED, REASON, Resource, get_alias
from .described import UNSEEN, describe, describe_action
from .filters import CronFilter
from .paging import ByName
from .problems import WrongState

# As many as the admin shows on the page of an entry.
NEXT_TIMES = 5
RUNS_SHOWN = 50


class CronEntries(Resource):
    """Cron entries, which enqueue a job at every tick of a schedule."""

    queryset = CronEntry.objects.none()
    serializer_class, detail_class = answers.CronSummary, answers.CronDetail
    pagination_class = ByName
    filterset_class = CronFilter
    lookup_field = "name"
    lookup_value_regex = "(?:(?!/(?:pause|resume|run)/$).)+"  # names may contain slashes
    resource = "cronentry"
    docs: ClassVar = {"list": "List cron entries by name.", "retrieve": "Show a cron entry."}

    def serialize(self, rows: Any) -> Any:
        """Return cron entries, each with its latest run."""
        latest = cron_runs.read_latest([entry.pk for entry in rows], using=get_alias())
        return [self._summary_of(entry, latest.get(entry.pk)) for entry in rows]

    @describe(request=inputs.NewCronSerializer, responses={201: answers.CronDetail, 204: UNSEEN})
    def create(self, request: Request) -> Response:  # noqa: ARG002
        """Create a cron entry.

        Validated like an entry defined in code.
        """
        values, using = self.read_input(inputs.NewCronSerializer), get_alias()
        entry = CronEntry(**_check_definition(values)._asdict())
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
        self.record(entry, "Written", flag=ADDED)
        return self.respond(lambda: self.serialize_one(self._reload(entry)), code=status.HTTP_201_CREATED)

    @describe(request=inputs.CronChangesSerializer, responses={200: answers.CronDetail, 204: UNSEEN})
    def partial_update(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Edit a cron entry of the admin.

        Members left out keep their value. An entry defined in code is refused with 409.
        """
        # Partial: members that a new entry must have are optional in a change.
        values = self.read_input(inputs.CronChangesSerializer, partial=True)
        entry = self.get_object()
        if entry.origin == CronEntry.EntryOrigin.CODE:
            raise WrongState(f"{entry.name}: is defined in code; change it there")
        if not values:
            raise ValidationError(f"expected one of {', '.join(('schedule', 'zone', 'jobtype', *cron.DEFAULTS))}")
        _refuse_to_reveal(entry, values)
        # The whole definition is checked again: a new jobtype may not accept the stored arguments.
        for field, value in _check_definition({**cron.members_of(entry), **values})._asdict().items():
            setattr(entry, field, value)
        cron_entries.save(entry, using=get_alias())
        self.record(entry, f"Edited {', '.join(sorted(values))}")
        return self.respond(lambda: self.serialize_one(self._reload(entry)))

    @describe(parameters=[REASON], responses={204: None})
    def destroy(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Delete a cron entry.

        Created in the admin, or removed from the code.
        """
        entry = self.read_action()
        if entry.origin == CronEntry.EntryOrigin.CODE and entry.removed_at is None:
            raise WrongState(f"{entry.name}: is defined in code, and would come back; remove it there")
        # Written before the delete: the log entry needs the primary key of the row.
        self.record(entry, "Deleted", flag=DELETED)
        entry.delete(using=get_alias())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @describe_action(answers.CronDetail, shows_row=True)
    def pause(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Pause a cron entry.

        No tick is due until it is resumed.
        """
        return self._execute(cron_entries.pause, "Paused")

    @describe_action(answers.CronDetail, shows_row=True)
    def resume(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Resume a cron entry.

        Ticks are due again; ticks during the pause are skipped.
        """
        return self._execute(cron_entries.resume, "Resumed")

    @describe_action(answers.Enqueued)
    def run(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Run a cron entry now.

        Enqueues a job at once, ignoring its pause and overlap policy.
        """
        entry = self.read_action()
        # The row of a removed entry is kept for its history (ADR 0014); nothing defines its job now.
        if entry.removed_at is not None:
            raise WrongState(f"{entry.name}: is no longer defined in code")
        jid = cron.run_now(entry, using=get_alias()).jid
        self.record(entry, "Run manually")
        return Response({"jid": jid})

    def _execute(self, change: Any, summary: str) -> Response:
        entry = self.read_action()
        change([entry.pk], using=get_alias())
        self.record(entry, summary)
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
    return cron.build_definition(values, is_json=True)


def _refuse_to_reveal(entry: CronEntry, values: Mapping[str, Any]) -> None:
    """Raise WrongState if the jobtype changes while arguments stay.

    `REDACT` may hide arguments of the old jobtype and show the same arguments for the new one.
    """
    unchanged = {"args", "kwargs"} - set(values)
    if redaction.is_on() and unchanged and values.get("jobtype", entry.jobtype) != entry.jobtype:
        raise WrongState(
            f"jobtype: expected {' and '.join(sorted(unchanged))} with it: FAKTORY['REDACT'] hides arguments"
        )
