"""Run an action on all jobs that a filter matches, in steps: each request does a part and reports what is left.

The state of such a run is stored in the page's form, signed, and nowhere on the server: the run stops when
the page is closed, and the finished steps remain in effect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.core import signing
from django.db.models import Min
from django.utils.translation import gettext
from msgspec import structs

from ... import conf
from ...core.lifecycle import State
from ...core.payloads import is_storable
from ...core.queries import Pattern, Query, parse_query
from ...errors import InvalidQuery
from ...models import Job, JobQuerySet
from ...models.job import RECENT
from ...operations import bulk, error_groups, searches
from ...operations.error_groups import FailureKind
from ..base import LowerBound
from . import actions

# As in `store.jobs.bulk`: row locks are held for one step only.
CHUNK = 500
MAX_WORK_S = 1.0
"""Seconds of work per request; after that the page is rendered, and its next request continues."""
COUNTED = 10_000
# Own salt: other signed texts of the site are not accepted as a run.
SALT = "django_faktory.bulk_run"
MAX_AGE_S = 86_400


class BulkScope(NamedTuple):
    """Jobs to act on: those of a query, or dead jobs of one kind."""

    query: str
    kind: FailureKind | None = None

    def __str__(self) -> str:
        """Return the scope as shown to users and written to the log."""
        if self.kind is None:
            return self.query or gettext("all jobs")
        error = self.kind.errtype or gettext("Killed manually")
        return f"{error}: {self.kind.place} ({self.kind.jobtype})"

    def rows(self, verb: str, *, using: str) -> JobQuerySet:
        """Return the jobs in scope to which the action applies."""
        if self.kind is not None:
            # The dead jobs of a group are retried or discarded; only its retrying jobs can be killed.
            state = State.RETRIES if verb == "kill" else State.DEAD
            return error_groups.filter_kind(self.kind, using=using, state=state)
        return Job.objects.matching(self.query).in_state(*actions.ACTIONS[verb].states)

    def select_ids(self, rows: JobQuerySet) -> tuple[list[int], int | None]:
        """Return the ids of the rows in scope and the id of the last row read."""
        # The last id is returned even if no row is in scope: the next step continues after it.
        ids = list(rows.values_list("pk", flat=True))
        last_id = ids[-1] if ids else None
        if self.kind is None or not ids:
            return ids, last_id
        # In Python: the database cannot find the place in a traceback.
        return list(error_groups.ids_of_kind(rows.model.objects.filter(pk__in=ids).order_by("pk"), self.kind)), last_id

    def count_jobs(self, verb: str, *, using: str, max_count: int = COUNTED) -> int:
        """Return the number of jobs in scope, or `LowerBound` if there may be more: it counts at most `max_count`.

        A query without an index counts recent jobs only.
        """
        rows = self.rows(verb, using=using)
        if self.kind is not None:
            count = sum(1 for _ in error_groups.ids_of_kind(rows.order_by("-pk")[: max_count + 1], self.kind))
        elif parse_query(self.query).has_index:
            count = rows.count_up_to(max_count + 1)
        else:
            count = rows.recent().count_up_to(max_count + 1)
            pks = Job.objects.values_list("pk", flat=True)
            oldest, latest = pks.order_by("pk").first() or 0, pks.order_by("-pk").first() or 0
            if latest - oldest >= RECENT:
                return LowerBound(min(count, max_count))
        return LowerBound(max_count) if count > max_count else count


def parse_scope(params: Mapping[str, Any]) -> BulkScope:
    """Return the scope that URL parameters ask for. Raises InvalidQuery."""
    if "error" in params and "task" in params:
        return BulkScope("", FailureKind(params["error"], params["task"], params.get("at", "")))
    return BulkScope(str(build_query(params)))


def build_query(params: Mapping[str, Any], search: Query | None = None) -> Query:
    """Return the query of a list's URL: `search` combined with the filters. Raises InvalidQuery."""
    for name in ("q", "queue", "about", "bid"):
        # PostgreSQL rejects NUL in a parameter: without this the answer would be a 500.
        if not is_storable(params.get(name, "")):
            raise InvalidQuery("%(name)s: expected text without NUL, which no job has; leave it out", name=name)
    query = parse_search(params.get("q", "")) if search is None else search
    changes: dict[str, Any] = {}
    if params.get("state") in set(State):
        changes["states"] = (State(params["state"]),)
    if params.get("queue"):
        changes["queues"] = (Pattern(params["queue"]),)
    for name, field in (("about", "about"), ("bid", "batches")):
        if params.get(name):
            changes[field] = (params[name],)
    return structs.replace(query, **changes)


def parse_search(text: str) -> Query:
    """Parse the text of the search box. Raises InvalidQuery."""
    return searches.parse_search(text, using=conf.get("DATABASE"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRun:
    """State of an action on many jobs."""

    verb: str
    query: str
    kind: tuple[str, str, str] | None
    user: str
    why: str
    total: int | None
    """Number of jobs in scope at the beginning; None if they were not counted completely."""
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

    @property
    def scope(self) -> BulkScope:
        """Return the jobs to act on."""
        return BulkScope(self.query, FailureKind(*self.kind) if self.kind else None)

    @property
    def percent(self) -> int | None:
        """Return the progress in percent; None if the jobs were not counted completely."""
        if self.is_over:
            return 100
        return None if self.total is None else min(100, 100 * self.placed // max(self.total, 1))


def begin(
    verb: str, scope: BulkScope, *, total: int, user: object, reason: str, every_s: float = 0.0, using: str
) -> BulkRun:
    """Return a new run, without any step done. `total` is the result of `BulkScope.count_jobs`."""
    jobs = Job.objects.all()
    rows = scope.rows(verb, using=using)
    # Otherwise jobs pushed meanwhile could keep the run from ending.
    upto = jobs.order_by("-pk").values_list("pk", flat=True).first() or 0
    after = 0
    if scope.kind is None and parse_query(scope.query).searches:
        # A search covers the newest jobs in a state only. As jobs leave the state, the search would include ever older
        # jobs, so the lowest id is fixed at the beginning.
        after = (rows.aggregate(first=Min("pk"))["first"] or 1) - 1
    kind = tuple(scope.kind) if scope.kind else None
    return BulkRun(
        verb=verb, query=scope.query, kind=kind, user=str(user), why=reason,  # type: ignore[arg-type]
        total=None if isinstance(total, LowerBound) else total, after=after, upto=upto, every_s=every_s,
        first_at=time.time(),
    )  # fmt: skip


def run_steps(run: BulkRun, *, using: str, max_work_s: float = MAX_WORK_S, chunk_size: int = CHUNK) -> BulkRun:
    """Perform at least one step, and further ones for about `max_work_s` seconds."""
    started_at = time.monotonic()
    while not run.is_over:
        run = _run_step(run, using, chunk_size)
        if time.monotonic() - started_at > max_work_s:
            break
    return run


def _run_step(run: BulkRun, using: str, chunk_size: int) -> BulkRun:
    # By id, not by offset: jobs that left the scope in earlier steps must not shift the next one.
    rows = run.scope.rows(run.verb, using=using).filter(pk__gt=run.after, pk__lte=run.upto)
    ids, last_id = run.scope.select_ids(rows.order_by("pk")[:chunk_size])
    if last_id is None:
        return replace(run, is_over=True)
    if run.every_s:
        # From the number placed so far, so that the pace continues across steps and requests.
        first_at = datetime.fromtimestamp(run.first_at + run.every_s * run.placed, UTC)
        changed = bulk.spread(ids, first_at=first_at, every_s=run.every_s, using=using)
    else:
        changed = actions.execute(run.verb, ids)
    return replace(run, after=last_id, placed=run.placed + len(ids), changed=run.changed + changed)


def dump_signed(run: BulkRun) -> str:
    """Return the run as signed text for a form."""
    return signing.dumps(asdict(run), salt=SALT, compress=True)


def load_signed(text: str, *, user: object) -> BulkRun:
    """Return the run of a form. Raises BadSignature if it is invalid, expired, or of another user."""
    run = BulkRun(**signing.loads(text, salt=SALT, max_age=MAX_AGE_S))
    # The signature proves that this site wrote the form, but not for which user.
    if run.user != str(user):
        raise signing.BadSignature("expected the user that started the run")
    return run
