"""Jobs over the REST API: list, show, enqueue, edit, and act on one job or on many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.core.signing import BadSignature
from rest_framework import status
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from ...core.lifecycle import FAILED
from ...core.queries import Query
from ...models import Job
from ...models.permissions import forbidden_query_fields
from ...operations import bulk, error_groups, signals, task_names
from ...operations.bulk import Run
from ...operations.edit import Changes, check_call, edit
from ...operations.job_actions import JOB_ACTIONS, Verb
from ...operations.rows import SHORT
from ...operations.serializers import whole_job_of
from ...tasks import base
from ...tasks.redaction import query_of
from . import answers, inputs
from .base import ADDED, CHANGED, DELETED, Resource, get_alias
from .described import UNSEEN, describe, describe_action
from .filters import JobFilter
from .paging import LatestFirst
from .problems import WrongState

# The count of a dry run ends here: an exact count of a large table takes too long for a request.
COUNTED = 10_000


def _make_action(verb: Verb) -> Callable[..., Response]:
    """Return the action of `Jobs` that performs an operation on one job."""

    def perform(self: Jobs, request: Request, **_: Any) -> Response:  # noqa: ARG001
        return self._execute(verb)

    action = JOB_ACTIONS[verb]
    states = ", ".join(sorted(action.states))
    # REST framework derives the address and the title of an action from the name of its function.
    perform.__name__ = verb
    perform.__doc__ = f"{verb.capitalize()} a job\n\n{action.help} The state of the job must be one of: {states}."
    return describe_action(answers.ActionResult, shows_row=True)(perform)


def _make_bulk_action(verb: Verb) -> Callable[..., Response]:
    """Return the action of `Jobs` that performs an operation on the jobs of a query."""

    def perform(self: Jobs, request: Request) -> Response:
        return self._execute_on_many(request, verb)

    perform.__name__ = f"bulk_{verb}"
    perform.__doc__ = (
        f"{verb.capitalize()} many jobs\n\n{JOB_ACTIONS[verb].help} "
        "A bounded part of the jobs that a query selects; send `next` as `after` until it is null. Without `view_job`, "
        "`dry_run` is refused, and so are queries by keys other than state, queue, task, batch, jid and age."
    )
    request = inputs.BulkSerializer
    return describe_action(answers.BulkResult, request=request, detail=False, url_path=f"bulk/{verb}")(perform)


class Jobs(Resource):
    """Jobs in any state, selected with the query language."""

    queryset = Job.objects.none()
    serializer_class, detail_class = answers.JobSummary, answers.JobDetail
    pagination_class = LatestFirst
    filterset_class = JobFilter
    lookup_field = "jid"
    resource = "job"
    docs: ClassVar = {
        "list": "List jobs, the newest first; failed jobs, the latest failure first.\n\n"
        "Conditions without an index search the latest 50,000 jobs only: see the query language.",
        "retrieve": "Show a job.\n\nWith its arguments, failures and result.",
    }

    def get_queryset(self) -> Any:
        """Return the rows; lists leave out the columns of long texts."""
        # A payload may have 16 MiB, so a page of 200 jobs must not load it.
        return super().get_queryset().only(*SHORT) if self.action == "list" else super().get_queryset()

    def filter_queryset(self, queryset: Any) -> Any:
        """Filter a list; of the runs of one jid, find the latest."""
        if self.action == "list":
            return super().filter_queryset(queryset)
        latest = Job.objects.using(get_alias()).only("pk").latest_of(self.kwargs["jid"])
        return queryset.filter(pk=latest.pk if latest else None)

    @describe(request=inputs.NewJobSerializer, responses={201: answers.Enqueued})
    def create(self, request: Request) -> Response:  # noqa: ARG002
        """Enqueue a task.

        Like `enqueue` of the task, with its middleware. Arguments are plain JSON.
        """
        validated = self.read_input(inputs.NewJobSerializer)
        # First: raises JobsElsewhere before anything is enqueued.
        using = get_alias()
        base.import_tasks()  # the web process may not have imported the tasks
        # A look-up among registered tasks: a request never causes the import of the name that it contains.
        task = task_names.lookup(validated["task"])
        args, kwargs = validated.get("args", []), validated["kwargs"]
        # Without this check a wrong argument would be noticed only when the job runs.
        check_call(task.jobtype, args, kwargs)
        options = {name: validated.get(name) for name in ("priority", "run_after", "about")}
        try:
            # A number such as 1e999 is valid JSON and becomes infinity, which no job can carry.
            result = task.using(queue_name=validated.get("queue"), **options).enqueue(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ValidationError({"args": str(error)}) from error
        # The row may be gone: a worker can finish the job before this query.
        job = Job.objects.using(using).latest_of(result.id)
        self.record(job or Job, "Enqueued", name=f"{task.jobtype} {result.id}", flag=ADDED)
        return Response({"jid": result.id}, status=status.HTTP_201_CREATED)

    @describe(request=inputs.JobChangesSerializer, responses={200: answers.JobDetail, 204: UNSEEN})
    def partial_update(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Edit a job that is not running.

        Its arguments, queue, priority or time. All other members stay as its client sent them.
        """
        validated = self.read_input(inputs.JobChangesSerializer)
        # Names only: a value may be an argument that `REDACT` hides, also in the admin log (docs/private-arguments.md).
        changed = ", ".join(sorted(validated))
        changes = Changes(run_at=validated.pop("run_after", None), **validated)
        job = edit(self.get_object().jid, changes, using=get_alias())
        self.record(job, f"Edited {changed}")
        return self.respond(lambda: whole_job_of(job))

    @describe_action(answers.JobDetail, request=inputs.SignalSerializer, shows_row=True)
    def signal(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Send a signal to a job

        It ends the wait of the job for this name, now or later. The job must not have ended.
        """
        validated = self.read_input(inputs.SignalSerializer)
        job = self.get_object()
        signals.send(job, validated["name"], validated["payload"])
        self.record(job, f"Sent signal {validated['name']}")
        job.refresh_from_db()
        return self.respond(lambda: whole_job_of(job))

    def _execute(self, verb: Verb) -> Response:
        job = self.read_action()
        # The operation checks the state again in its UPDATE: the job may have moved since it was read.
        changed = bulk.execute(verb, Job.objects.using(get_alias()).filter(pk=job.pk))
        if not changed:
            legal = ", ".join(sorted(JOB_ACTIONS[verb].states))
            raise WrongState(f"{verb}: takes a job that is {legal}; this one is {job.state}")
        # Read again: the operation may have moved the job or deleted its row.
        state = Job.objects.using(get_alias()).filter(pk=job.pk).values_list("state", flat=True).first()
        self.record(job, JOB_ACTIONS[verb].done_in_english, flag=DELETED if state is None else CHANGED)
        return self.respond(lambda: {"changed": changed, "state": state})

    def _refuse_to_reveal(self, query: Query, *, is_dry: bool) -> None:
        """Raise PermissionDenied for a query that would reveal hidden parts of jobs.

        Users with permission to act on jobs, but not to view them, could otherwise find out the text of arguments or
        errors by trying words.
        """
        fields = [name for name in query.__struct_fields__ if getattr(query, name) not in ((), None)]
        forbidden = forbidden_query_fields(self.request.user, fields)
        # The message names the keys as the query language does, without their values.
        forbidden_keys = [f"{Query(**{name: getattr(query, name)})}".partition(":")[0] + ":" for name in forbidden]
        # A count alone would reveal content: `dead text:s3cr3t` changes or counts jobs, or none (ADR 0034).
        if forbidden_keys:
            raise PermissionDenied(
                f"query: queries with these keys require the permission to view jobs: {', '.join(forbidden_keys)}"
            )
        if is_dry:
            self._require_view("dry_run")

    def _require_view(self, member: str) -> None:
        if not self.may_see:
            raise PermissionDenied(f"{member}: requires the permission to view jobs")

    def _execute_on_many(self, request: Request, verb: Verb) -> Response:
        validated = self.read_input(inputs.BulkSerializer)
        user, using = str(request.user.pk), get_alias()
        run = _continue(validated, verb, user) if "after" in validated else self._begin(validated, verb, user)
        self._refuse_to_reveal(run.query, is_dry=validated["dry_run"])
        if run.kind is not None:
            self._require_view("like")
        if validated["dry_run"]:
            rows = run.rows(using=using).filter(pk__gt=run.after, pk__lte=run.upto)
            count = rows.count_up_to(COUNTED)
            if run.kind is not None:
                count = len(error_groups.ids_of_kind(rows.order_by("pk")[:COUNTED], run.kind))
            return Response({"query": str(run.query), "found": count, "changed": 0, "next": None})
        part, last = run, run.placed + validated["limit"]
        while not part.is_over and part.placed < last:
            part = part.step(using=using, size=last - part.placed)
        found, changed = part.placed - run.placed, part.changed - run.changed
        # One entry for the whole part: a part has up to 5,000 jobs. An empty part changed nothing that could be logged.
        if changed:
            self.record(Job, f"{JOB_ACTIONS[verb].done_in_english} {changed} jobs", name=run.scope)
        cursor = None if part.is_over else part.sign()
        return Response({"query": str(run.query), "found": found, "changed": changed, "next": cursor})

    def _begin(self, validated: dict[str, Any], verb: Verb, user: str) -> Run:
        query, kind = query_of(validated.get("query", "")), None
        if "like" in validated:
            if not query.is_empty:
                raise ValidationError({"like": "expected no query beside it"})
            self._require_view("like")  # before the job is read: an answer would show whether it exists
            if verb not in (Verb.RETRY, Verb.KILL, Verb.DISCARD):
                raise ValidationError({"like": "expected retry, kill or discard"})
            job = Job.objects.using(get_alias()).in_state(*FAILED).filter(jid=validated["like"]).first()
            if job is None:
                raise ValidationError({"like": "expected the jid of a dead or retrying job"})
            kind = error_groups.read_kind(job)
        # An empty query would mean every job: a client that forgets the query must not delete everything.
        elif query.is_empty:
            legal = " or ".join(sorted(JOB_ACTIONS[verb].states))
            raise ValidationError({"query": f"expected one; such as {legal} for all of these"})
        per_minute = validated.get("per_minute")
        if per_minute and verb is not Verb.RETRY:
            raise ValidationError({"per_minute": "expected with retry only"})
        every_s = 60 / per_minute if per_minute else 0.0
        return bulk.begin(verb, query, kind=kind, every_s=every_s, user=user, using=get_alias())


for _verb in Verb:
    setattr(Jobs, _verb, _make_action(_verb))
    setattr(Jobs, f"bulk_{_verb}", _make_bulk_action(_verb))


def _continue(validated: dict[str, Any], verb: Verb, user: str) -> Run:
    """Return the run that `next` of its latest part has. The query may be sent again, but not another one."""
    try:
        run = bulk.load_signed(validated["after"], user=user)
    except BadSignature:
        run = None
    if run is None or run.verb != verb or str(query_of(validated.get("query", ""))) not in ("", str(run.query)):
        raise ValidationError({"after": "expected `next` of an earlier part of the same action, at most a day old"})
    return run
