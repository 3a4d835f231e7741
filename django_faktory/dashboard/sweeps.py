"""Acts on as many jobs as a filter finds, from page to page: each carries out some steps, and says what is left.

What is meant, done and left travels in the page, signed. Nothing is kept here: a sweep that somebody leaves stops, and
what it did stays done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.core import signing
from django.db.models import Min

from .. import acts
from ..errors import InvalidQuery
from ..lifecycle import State
from ..look_only import AtLeast
from ..models import Job, JobQuerySet
from ..payloads import is_storable
from ..queries import Pattern, Query, parse_query
from ..querysets import RECENT
from ..redaction import query_of
from . import groups, verbs
from .groups import Kind

CHUNK = 500
LASTS_S = 1.0
"""A page's work: then it answers, and the next one goes on."""
COUNTED = 10_000
SALT = "django_faktory.sweep"
MAX_AGE_S = 86_400


class Scope(NamedTuple):
    """Which jobs are meant: those of a query, or dead ones of one kind."""

    query: str
    kind: Kind | None = None

    def __str__(self) -> str:
        """For a person, and for the record."""
        if self.kind is None:
            return self.query or "all jobs"
        return f"dead, {self.kind.errtype or 'no error'}: {self.kind.head} ({self.kind.jobtype})"

    def rows(self, verb: str, *, using: str) -> JobQuerySet:
        """These jobs, as far as the verb is for them."""
        if self.kind is not None:
            return groups.of_kind(self.kind, using=using)
        return Job.objects.using(using).matching(self.query).in_state(*verbs.ACTS[verb].states)

    def picked(self, rows: JobQuerySet) -> tuple[list[int], int | None]:
        """The ids of those of these rows that are meant, and the last one looked at."""
        ids = list(rows.values_list("pk", flat=True))
        last = ids[-1] if ids else None
        if self.kind is None or not ids:
            return ids, last
        return list(
            groups.matching(rows.model.objects.using(rows.db).filter(pk__in=ids).order_by("pk"), self.kind)
        ), last

    def counted(self, verb: str, *, using: str) -> int:
        """How many, and no further than one more than `COUNTED`.

        What no index leads to is counted among the recent ones only: `AtLeast` so many, where there are older jobs.
        """
        rows = self.rows(verb, using=using)
        if self.kind is None and parse_query(self.query).has_index:
            return rows.count_up_to(COUNTED + 1)
        if self.kind is None:
            count = rows.recent().count_up_to(COUNTED + 1)
            pks = Job.objects.using(using).values_list("pk", flat=True)
            oldest, latest = pks.order_by("pk").first() or 0, pks.order_by("-pk").first() or 0
            return count if latest - oldest < RECENT or count > COUNTED else AtLeast(count)
        return sum(1 for _ in groups.matching(rows.order_by("-pk")[: COUNTED + 1], self.kind))


def scope_of(params: Mapping[str, Any]) -> Scope:
    """What an address asks for. Raises InvalidQuery."""
    if "error" in params and "task" in params:
        return Scope("", Kind(params["error"], params["task"], params.get("head", "")))
    return Scope(str(asked(params)))


def asked(params: Mapping[str, Any], typed: Query | None = None) -> Query:
    """The query of a list's address: what was `typed`, with the filters beside it. Raises InvalidQuery."""
    for name in ("q", "queue", "about", "bid"):
        if not is_storable(params.get(name, "")):
            raise InvalidQuery(f"{name}: expected text without NUL, which no job has; leave it out")
    query = understood(params.get("q", "")) if typed is None else typed
    changes: dict[str, Any] = {}
    if params.get("state") in set(State):
        changes["states"] = (State(params["state"]),)
    if params.get("queue"):
        changes["queues"] = (Pattern(params["queue"]),)
    for name, field in (("about", "about"), ("bid", "batches")):
        if params.get(name):
            changes[field] = (params[name],)
    return replace_query(query, **changes)


def replace_query(query: Query, **changes: Any) -> Query:
    """The query with other values in these places."""
    fields = {name: getattr(query, name) for name in query.__struct_fields__}
    return Query(**{**fields, **changes})


def understood(text: str) -> Query:
    """What somebody typed: a query, or one word that is a jid, the beginning of a task, or an error."""
    word = text.strip()
    if not word or ":" in word or " " in word or '"' in word or word in set(State):
        return query_of(text)
    jobs = Job.objects.all()
    if jobs.filter(jid=word).exists():
        return Query(jids=(word,))
    if jobs.recent(RECENT).task(f"{word.rstrip('*')}*").exists():
        return Query(tasks=(Pattern(word.rstrip("*"), is_prefix=True),))
    return Query(errors=(Pattern(word.rstrip("*"), is_prefix=word.endswith("*")),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A verb under way."""

    verb: str
    query: str
    kind: tuple[str, str, str] | None
    user: str
    why: str
    total: int | None
    """How many there were at the beginning; None where nobody counted to the end."""
    after: int
    """The id of the last job that was looked at."""
    upto: int
    """The last one there was at the beginning: what comes later is not meant."""
    every_s: float = 0.0
    """Seconds from one retry to the next; 0: all now."""
    first_at: float = 0.0
    placed: int = 0
    changed: int = 0
    is_over: bool = False

    @property
    def scope(self) -> Scope:
        """Which jobs are meant."""
        return Scope(self.query, Kind(*self.kind) if self.kind else None)

    @property
    def percent(self) -> int | None:
        """How far it is; None where nobody has counted to the end."""
        if self.is_over:
            return 100
        return None if self.total is None else min(100, 100 * self.placed // max(self.total, 1))


def begin(verb: str, scope: Scope, *, total: int, user: object, why: str, every_s: float = 0.0, using: str) -> Sweep:
    """Nothing is done yet. `total` is what `Scope.counted` told."""
    jobs = Job.objects.using(using)
    rows = scope.rows(verb, using=using)
    upto = jobs.order_by("-pk").values_list("pk", flat=True).first() or 0
    after = 0
    if scope.kind is None and parse_query(scope.query).searches:
        # A search looks into the newest of some: as those leave their state it would reach for ever older ones.
        after = (rows.aggregate(first=Min("pk"))["first"] or 1) - 1
    is_counted = total <= COUNTED and not isinstance(total, AtLeast)
    kind = tuple(scope.kind) if scope.kind else None
    return Sweep(
        verb=verb, query=scope.query, kind=kind, user=str(user), why=why,  # type: ignore[arg-type]
        total=total if is_counted else None, after=after, upto=upto, every_s=every_s, first_at=time.time(),
    )  # fmt: skip


def go_on(sweep: Sweep, *, using: str, lasts_s: float = LASTS_S) -> Sweep:
    """Carry out steps for about so long, one at least."""
    began = time.monotonic()
    while not sweep.is_over:
        sweep = _step(sweep, using)
        if time.monotonic() - began > lasts_s:
            break
    return sweep


def _step(sweep: Sweep, using: str) -> Sweep:
    rows = sweep.scope.rows(sweep.verb, using=using).filter(pk__gt=sweep.after, pk__lte=sweep.upto)
    ids, last = sweep.scope.picked(rows.order_by("pk")[:CHUNK])
    if last is None:
        return replace(sweep, is_over=True)
    if sweep.every_s:
        first_at = datetime.fromtimestamp(sweep.first_at + sweep.every_s * sweep.placed, UTC)
        changed = acts.spread(ids, first_at=first_at, every_s=sweep.every_s, using=using)
    else:
        changed = verbs.carry_out(sweep.verb, ids, using=using)
    return replace(sweep, after=last, placed=sweep.placed + len(ids), changed=sweep.changed + changed)


def sealed(sweep: Sweep) -> str:
    """As a form carries it."""
    return signing.dumps(asdict(sweep), salt=SALT, compress=True)


def opened(text: str, *, user: object) -> Sweep:
    """The sweep of a form. Raises BadSignature where it is not one that this user was given lately."""
    sweep = Sweep(**signing.loads(text, salt=SALT, max_age=MAX_AGE_S))
    if sweep.user != str(user):
        raise signing.BadSignature("expected the user who began this")
    return sweep
