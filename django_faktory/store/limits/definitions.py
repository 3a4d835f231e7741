"""Create, edit, pause and remove limits. Each change takes effect at its commit. ADR 0016.

`sync` applies the limits in code, `save_limit` stores one limit; both copy its numbers to the limiters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from typing import NamedTuple

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Min, Q, QuerySet, Sum
from django.db.models.functions import Now

from ...core.lifecycle import State
from ...core.limits import Allowance, Scope, family_of
from ...models import Job, Limit, Limiter
from ..dialects import clock_of
from ..queues import pause_columns
from ..transactions import read, run
from . import limiters

MAX_COUNTED = 10_000


class LimitDefinition(NamedTuple):
    """A limit as defined in code or settings."""

    scope: str
    name: str
    allowance: Allowance


def save_limit(scope: str, name: str, allowance: Allowance, *, using: str, origin: str = Limit.Origin.ADMIN) -> Limit:
    """Create or change a limit; jobs that already run count. A pause stays.

    A change from the admin of a limit from code marks it as edited, so that `sync` leaves it alone.
    """

    def verb(connection: BaseDatabaseWrapper) -> Limit:
        numbers = msgspec.structs.asdict(allowance)
        new_limit = Limit(scope=scope, name=name, origin=origin, **numbers)
        limit = _lock_limit(connection, scope, name) or _insert(connection, new_limit)
        # An edit in the admin must survive the next `sync` with code.
        is_edited = origin == Limit.Origin.ADMIN and limit.origin != Limit.Origin.ADMIN
        limit.origin = Limit.Origin.EDITED if is_edited else origin
        for field, value in numbers.items():
            setattr(limit, field, value)
        return _save(connection, limit)

    return _apply_to_jobs(run(using, verb), using)


def pause(names: Iterable[str], *, using: str, by: str = "", reason: str = "") -> list[str]:
    """Stop jobs of these tasks from starting; return the tasks that were not paused before.

    Running jobs continue. `by` and `reason` are shown: see `queues.pause_columns`.
    """
    paused: list[str] = []
    for name in sorted(set(names)):

        def verb(connection: BaseDatabaseWrapper, name: str = name) -> bool:
            now = clock_of(connection)
            limit = _lock_limit(connection, Scope.TASK, name)
            if limit is None:
                limit = _insert(connection, Limit(scope=Scope.TASK, name=name, paused_at=now))
            elif limit.paused_at is not None:
                return False
            limit.paused_at, limit.paused_by, limit.pause_reason = now, *pause_columns(by, reason).values()
            _save(connection, limit)
            return True

        if run(using, verb):
            paused.append(name)
    return paused


def resume(names: Iterable[str], *, using: str) -> list[str]:
    """Let jobs of these tasks start again, within their limits; return the tasks that were paused."""
    return [name for name in sorted(set(names)) if _resume(name, using=using)]


def _resume(name: str, *, using: str) -> bool:
    """Resume one task; return whether it was paused."""
    paused = Limit.objects.using(using).filter(scope=Scope.TASK, name=name, paused_at__isnull=False)
    # Read the limit again after a change by another process: a limit that is only a pause is removed, not resumed.
    while (limit := paused.first()) is not None:
        if _is_only_a_pause(limit):
            if _remove(limit, using=using, only_if=_is_only_a_pause):
                return True
            continue
        if changed := run(using, lambda connection: _clear_pause(connection, name)):
            _apply_to_jobs(changed, using)
            return True
    return False


def _clear_pause(connection: BaseDatabaseWrapper, name: str) -> Limit | None:
    limit = _lock_limit(connection, Scope.TASK, name)
    if limit is None or _is_only_a_pause(limit):
        return None
    limit.paused_at = None
    return _save(connection, limit)


def _is_only_a_pause(limit: Limit) -> bool:
    return limit.concurrency is None and limit.rate is None


def paused_tasks(*, using: str) -> list[str]:
    """Return the names of the paused tasks, sorted."""
    paused = Limit.objects.using(using).filter(scope=Scope.TASK, paused_at__isnull=False).order_by("name")
    return read(paused.values_list("name", flat=True))


def remove(limit: Limit, *, using: str) -> None:
    """Delete a limit and make the jobs ready that waited for it.

    A crash between the two steps leaves blocked jobs, which `limiters.sweep` makes ready.
    """
    _remove(limit, using=using)


def _remove(limit: Limit, *, using: str, only_if: Callable[[Limit], bool] = lambda _: True) -> bool:
    """Run `remove` if the stored limit fulfils a condition; return False if it is stored and does not."""

    def verb(connection: BaseDatabaseWrapper) -> list[int] | None:
        names = {limit.name, family_of(limit.name)} if limit.scope == Scope.KEY else {limit.name}
        limits = {row.name: row for row in _lock_limits(connection, limit.scope, names)}
        if limit.name not in limits:
            return []
        if not only_if(limits[limit.name]):
            return None
        # Both limits are locked by now, so no edit of the family's limit can miss a limiter that moves to it.
        family_limit = limits.get(family_of(limit.name)) if limit.scope == Scope.KEY else None
        locked = _lock_limiters(Limiter.objects.using(using).filter(limit__in=limits.values()))
        ids = [limiter.pk for limiter in locked if limiter.limit_id == limit.pk]
        # The key falls back to the limit of its family, together with its running and blocked jobs.
        if family_limit is not None and family_limit.pk != limit.pk:
            Limiter.objects.using(using).filter(pk__in=ids).update(limit=family_limit)
            _save(connection, family_limit)
        Limit.objects.using(using).filter(pk=limit.pk).delete()
        return ids

    ids = run(using, verb)
    if ids is None:
        return False
    still_stored = Limiter.objects.using(using).filter(pk__in=ids)
    # Limiters that moved to the family's limit remain. The others were deleted with the limit; their jobs become ready.
    remaining = {row.pk: row for row in read(still_stored)}
    for limiter_id in ids:
        if limiter_id not in remaining:
            limiters.repair(limiter_id, using=using)  # makes its jobs ready
    uncounted = [pk for pk, row in remaining.items() if row.is_paused and row.concurrency is not None]
    limiters.count_running(uncounted, using=using)
    limiters.promote_waiters(remaining.keys() - set(uncounted), using=using)
    return True


def sync(definitions: Iterable[LimitDefinition], *, using: str) -> None:
    """Bring the stored limits up to date with code. An edited limit stays until the edit is reverted."""
    defined = {(definition.scope, definition.name): definition for definition in definitions}
    rows = Limit.objects.using(using)
    stored = run(using, lambda _: {(row.scope, row.name): row for row in rows.all()}, atomic=False)
    for key, definition in defined.items():
        row = stored.get(key)
        # A row of the admin that is only a pause becomes code's, and stays paused.
        is_from_code = row is None or row.origin == Limit.Origin.CODE or _is_only_a_pause(row)
        if is_from_code and (row is None or row.allowance != definition.allowance):
            save_limit(*definition, using=using, origin=Limit.Origin.CODE)
        # Code now defines a limit that was created in the admin.
        elif row is not None and row.origin == Limit.Origin.ADMIN:
            run(using, lambda _, pk=row.pk: rows.filter(pk=pk).update(origin=Limit.Origin.EDITED))  # type: ignore[misc]
    for key, row in stored.items():
        if key not in defined and row.origin != Limit.Origin.ADMIN:
            _drop_undefined(row, using)


def _drop_undefined(row: Limit, using: str) -> None:
    """Handle a limit that code no longer defines: pauses and edits were made by a person and stay."""
    if row.origin == Limit.Origin.EDITED:
        run(using, lambda _: Limit.objects.using(using).filter(pk=row.pk).update(origin=Limit.Origin.ADMIN))
    elif row.paused_at is not None:
        # Drop the numbers of code, but keep the pause: it was set by a person.
        save_limit(row.scope, row.name, Allowance(), using=using)
        run(using, lambda _: Limit.objects.using(using).filter(pk=row.pk).update(origin=Limit.Origin.ADMIN))
    else:
        remove(row, using=using)


def revert_edit(limit: Limit, *, using: str) -> bool:
    """Revert an edit: from the next `sync` on the definition in code applies. Returns whether it was edited."""
    edited = Limit.objects.using(using).filter(pk=limit.pk, origin=Limit.Origin.EDITED)
    return bool(run(using, lambda _: edited.update(origin=Limit.Origin.CODE)))


def _lock_limit(connection: BaseDatabaseWrapper, scope: str, name: str) -> Limit | None:
    return next(iter(_lock_limits(connection, scope, {name})), None)


def _insert(connection: BaseDatabaseWrapper, limit: Limit) -> Limit:
    """Insert a limit and return it locked; another node may insert it at the same moment."""
    Limit.objects.using(connection.alias).bulk_create([limit], ignore_conflicts=True)
    return _lock_limit(connection, limit.scope, limit.name) or limit


def _lock_limits(connection: BaseDatabaseWrapper, scope: str, names: Collection[str]) -> QuerySet[Limit]:
    return limiters.lock_limits(connection, Limit.objects.using(connection.alias).filter(scope=scope, name__in=names))


def _lock_limiters(rows: QuerySet[Limiter]) -> list[Limiter]:
    """Lock limiters by id, all that the transaction changes at once (ADR 0024)."""
    return list(rows.order_by("pk").select_for_update())


def _save(connection: BaseDatabaseWrapper, limit: Limit) -> Limit:
    """Save a locked limit and copy its numbers into its limiters; they apply from the commit on."""
    alias = connection.alias
    limit.save(using=alias)
    rows = Limiter.objects.using(alias)
    if limit.scope != Scope.KEY:
        rows.bulk_create([limiters.build_limiter(limit, limit.name)], ignore_conflicts=True)
    of_its_name = Q(scope=limit.scope, name=limit.name)
    locked = _lock_limiters(rows.filter(Q(limit=limit) | of_its_name))
    # An existing limiter of this key used the limit of its family until now. Other keys of a family keep theirs.
    rows.filter(of_its_name).update(limit=limit)
    own_limiters = rows.filter(limit=limit)
    uncounted = [limiter.pk for limiter in locked if _must_count_running(limiter, limit)]
    capacity = limit.allowance.capacity
    own_limiters.filter(rate=None).update(tokens=capacity, filled_at=Now())  # a new rate starts with a full bucket
    own_limiters.filter(tokens__gt=capacity).update(tokens=capacity)
    numbers = msgspec.structs.asdict(limit.allowance)
    own_limiters.update(**numbers, is_paused=limit.paused_at is not None, opens_at=None)
    # Last, because the UPDATE above opens every limiter of a limit that is not paused.
    own_limiters.filter(pk__in=uncounted).update(is_paused=True)
    return limit


def _must_count_running(limiter: Limiter, limit: Limit) -> bool:
    """Return whether a limiter must be paused until its running jobs are counted.

    This is so if it did not count jobs before, or is paused for that reason already.
    """
    return limit.concurrency is not None and (limiter.concurrency is None or limiter.is_paused)


def _apply_to_jobs(limit: Limit, using: str) -> Limit:
    """Count the jobs that already run, and make blocked jobs ready for which there is room now."""
    own_limiters = Limiter.objects.using(using).filter(limit=limit).order_by("pk").values_list("pk", "is_paused")
    limiter_rows = read(own_limiters)
    uncounted = {pk for pk, is_paused in limiter_rows if is_paused and limit.concurrency is not None}
    limiters.count_running(uncounted, using=using)
    limiters.promote_waiters([pk for pk, _ in limiter_rows if pk not in uncounted], using=using)
    return limit


def read_usage(ids: Iterable[int], *, using: str) -> dict[int, tuple[int, datetime | None]]:
    """Return the use of these limits: permits in use, and the time the next set of jobs becomes ready.

    Sums over all limiters of a limit; limits without a limiter are left out.
    """
    own_limiters = Limiter.objects.using(using).filter(limit__in=list(ids)).order_by().values_list("limit")
    totals = own_limiters.annotate(Sum("in_use"), Min("opens_at"))
    return run(using, lambda _: {pk: (in_use, opens_at) for pk, in_use, opens_at in totals}, atomic=False)


def count_blocked_jobs(limit: Limit, *, using: str) -> int:
    """Count the jobs blocked by this limit, up to `MAX_COUNTED`."""
    limiter_ids = Limiter.objects.using(using).filter(limit=limit).values("pk")
    blocked = Job.live.using(using).in_state(State.BLOCKED).filter(limiter__in=limiter_ids).order_by()
    # Bounded, so that the page of a limit with a long backlog stays fast.
    return run(using, lambda _: blocked[:MAX_COUNTED].count(), atomic=False)
