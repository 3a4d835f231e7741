"""Apply bulk operations to jobs and queues: retry, requeue, cancel, kill, discard, prune, pause, resume.

Adds the notifications and the project's settings to the functions of `store.jobs.bulk`; used by querysets, the admin,
the API and the command line. Each step is one short transaction over at most `CHUNK` jobs; inside a transaction of the
caller all steps are part of that transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core import signing
from django.db import connections
from django.db.models import Min, Q
from django.utils.translation import gettext

from .. import conf
from ..core.lifecycle import State
from ..core.queries import Query, parse_query
from ..models import Job, JobQuerySet
from ..models.queue import QueueQuerySet
from ..store import queues
from ..store.batches import tree
from ..store.chunks import chunks
from ..store.jobs import bulk, transitions
from ..store.jobs.bulk import CHUNK
from ..store.locks.locks import notify_ready
from ..store.notifier.base import ANY_QUEUE
from ..store.store import Store
from . import error_groups
from .error_groups import FailureKind
from .job_actions import JOB_ACTIONS, Verb

TESTED_FOR_S = 3600
"""Seconds for which a job keeps its row after it ended, if `test_one` retried it."""
# Own salt: other signed texts of the site are not accepted as a run.
_SALT = "django_faktory.bulk_run"
MAX_AGE_S = 86_400
"""Seconds after which a signed run can no longer be continued."""


def execute(verb: str, jobs: JobQuerySet) -> int:
    """Execute all steps; return the number of jobs changed. Jobs created later are not included."""
    ids = bulk.read_ids(jobs, JOB_ACTIONS[verb].states)
    return sum(_change(verb, chunk, jobs.db) for chunk in chunks(ids, CHUNK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A verb on all jobs of a query, or on the failed jobs of one kind, in steps.

    It is a value: who holds it, or its signed text, continues it. Finished steps stay in effect.
    """

    verb: str
    query: Query
    kind: FailureKind | None
    after: int
    """Id of the last job that was examined."""
    upto: int
    """Highest id at the beginning; jobs pushed later are out of scope."""
    every_s: float = 0.0
    """Seconds between two retries; 0 retries all at once."""
    first_at: float = 0.0
    """Unix time of the beginning, at which the first retry is due."""
    placed: int = 0
    """Number of jobs in scope that the finished steps have handled, skipped ones included."""
    changed: int = 0
    is_over: bool = False
    user: str = ""
    """Who began it; a signed run is of no use to others."""
    why: str = ""
    total: int | None = None
    """Number of jobs in scope at the beginning; None if they were not counted completely."""

    @property
    def scope(self) -> str:
        """The jobs in scope, as shown to users and written to the log."""
        if self.kind is None:
            return str(self.query) or gettext("all jobs")
        error = self.kind.errtype or gettext("Killed manually")
        return f"{error}: {self.kind.place} ({self.kind.jobtype})"

    @property
    def percent(self) -> int | None:
        """The progress; None if the jobs were not counted completely."""
        if self.is_over:
            return 100
        return None if self.total is None else min(100, 100 * self.placed // max(self.total, 1))

    @property
    def last_retry_at(self) -> datetime:
        """Time at which the last job of the finished steps is due, if the run has a pace."""
        return self._due_at(max(self.placed - 1, 0))

    def rows(self, *, using: str) -> JobQuerySet:
        """Return the jobs to which the verb applies; for a kind, among others of the same error and task."""
        if self.kind is not None:
            # The dead jobs of a group are retried or discarded; only its retrying jobs can be killed.
            state = State.RETRIES if self.verb == Verb.KILL else State.DEAD
            return error_groups.filter_kind(self.kind, using=using, state=state)
        return Job.objects.using(using).matching(self.query).in_state(*JOB_ACTIONS[self.verb].states)

    def step(self, *, using: str, size: int = CHUNK) -> Run:
        """Change the next jobs, at most `size` and `CHUNK`, the oldest first; return the run that continues."""
        size = min(size, CHUNK)
        # By id, not by offset: jobs that left the scope in earlier steps must not shift the next one.
        rows = self.rows(using=using).filter(pk__gt=self.after, pk__lte=self.upto).order_by("pk")
        # One more than the size shows whether another step follows.
        found = list(rows.values_list("pk", flat=True)[: size + 1])
        ids = found[:size]
        after = ids[-1] if ids else self.after
        if self.kind is not None and ids:
            # In Python: the database cannot find the place in a traceback.
            ids = error_groups.ids_of_kind(Job.objects.using(using).filter(pk__in=ids).order_by("pk"), self.kind)
        if self.every_s:
            # From the number placed so far, so that the pace continues across steps and requests.
            times = {pk: self._due_at(self.placed + place) for place, pk in enumerate(ids)}
            changed = transitions.defer(times, using=using)
            if changed:
                notify_ready(connections[using], {ANY_QUEUE})
        else:
            changed = _change(self.verb, ids, using)
        is_over, placed = len(found) <= size, self.placed + len(ids)
        return replace(self, after=after, placed=placed, changed=self.changed + changed, is_over=is_over)

    def _due_at(self, place: int) -> datetime:
        return datetime.fromtimestamp(self.first_at, UTC) + timedelta(seconds=self.every_s * place)

    def sign(self) -> str:
        """Return the run as signed text."""
        return signing.dumps(asdict(self) | {"query": str(self.query)}, salt=_SALT, compress=True)


def begin(
    verb: str,
    query: Query | str = "",
    *,
    kind: FailureKind | None = None,
    newest: int | None = None,
    using: str,
    **options: Any,
) -> Run:
    """Return a run without any step done. Raises InvalidQuery.

    `newest` limits it to so many jobs; `options` are other fields of `Run`.
    """
    query = parse_query(query) if isinstance(query, str) else query
    # Otherwise jobs pushed meanwhile could keep the run from ending.
    upto = Job.objects.using(using).order_by("-pk").values_list("pk", flat=True).first() or 0
    run = Run(verb=verb, query=query, kind=kind, after=0, upto=upto, first_at=time.time(), **options)
    first = None
    if newest is not None:
        first = min(run.rows(using=using).order_by("-pk").values_list("pk", flat=True)[:newest], default=None)
    elif kind is None and query.searches:
        # A search covers the newest jobs in a state only. As jobs leave the state, the search would include ever older
        # jobs, so the lowest id is fixed at the beginning.
        first = run.rows(using=using).aggregate(first=Min("pk"))["first"]
    return run if first is None else replace(run, after=first - 1)


def load_signed(text: str, *, user: str) -> Run:
    """Return a run that `Run.sign` wrote. Raises BadSignature if it is invalid, expired, or of another user."""
    fields = signing.loads(text, salt=_SALT, max_age=MAX_AGE_S)
    kind = FailureKind(*fields["kind"]) if fields["kind"] else None
    run = Run(**fields | {"query": parse_query(fields["query"]), "kind": kind})
    # The signature proves that this site wrote it, but not for which user.
    if run.user != user:
        raise signing.BadSignature("expected the user that started the run")
    return run


def retry_batches(bids: Iterable[str], *, using: str, limit: int | None = None) -> int:
    """Retry the failed members and callbacks of these batches and of all batches nested in them.

    Return the number of jobs changed, at most `limit`. Retried jobs leave their state, so a repetition continues.
    """
    changed = 0
    for chunk in tree.with_nested(bids, using=using):
        # A failed callback keeps a batch from its end as a failed member does.
        jobs = Job.objects.using(using).filter(Q(bid__in=chunk) | Q(callback_of__in=chunk))
        if limit is not None:
            jobs = jobs.in_state(*JOB_ACTIONS[Verb.RETRY].states).order_by("pk")[: limit - changed]
        changed += execute(Verb.RETRY, jobs)
        if changed == limit:
            break
    return changed


def test_one(job: Job) -> bool:
    """Retry this job now and keep its row for `TESTED_FOR_S` after it ends.

    Return False if the job has left the retries and dead states.
    """
    using = job._state.db or conf.get("DATABASE")  # noqa: SLF001  (documented)
    # Before the retry: a fast worker could end the job, and so remove its row, between the two statements.
    transitions.keep_for(job.pk, TESTED_FOR_S, using=using)
    # The UPDATE checks the state, so of two requests for the same job only one succeeds.
    return execute(Verb.RETRY, Job.objects.using(using).filter(pk=job.pk)) == 1


def pause(rows: QueueQuerySet, by: str, reason: str) -> int:
    """Stop delivering jobs of these queues; return how many were not paused before."""
    return len(queues.pause(Store(rows.db), _names(rows), by=by, reason=reason))


def resume(rows: QueueQuerySet) -> int:
    """Deliver jobs of these queues again; return how many were paused."""
    return len(queues.resume(Store(rows.db), _names(rows)))


def _names(rows: QueueQuerySet) -> list[str]:
    return list(rows.values_list("name", flat=True))


def _change(verb: str, ids: Sequence[int], using: str) -> int:
    """Apply the verb to these jobs in one step; those in another state are skipped."""
    action = JOB_ACTIONS[verb]
    changed = bulk.change(ids, action.states, action.change(), using=using)
    # Workers are notified after each step and not at the end, so that they start while other steps run.
    if changed and action.makes_ready:
        notify_ready(connections[using], {ANY_QUEUE})
    return changed
