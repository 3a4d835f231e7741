"""Gates: who may start now of the jobs that limits concern, and who waits, out of the claims' way. ADR 0016.

`let_pass` is the only way to a pass, and `release` the way back, in the transaction that ends the run. Rows of gates
are locked after those of jobs and locks, in the order of their ids; what is counted is counted under that lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import F
from django.db.models.functions import Now

from ..gating import Gate, Scope, allot, family_of, passes_of, passes_text
from ..lifecycle import State
from ..logs import get_logger
from ..models import Gate as GateRow
from ..models import Job, JobQuerySet, Limit
from ..payloads import Reservation
from . import locks
from .dialects import dialect_of, gates
from .dialects.base import Dialect
from .transactions import run

logger = get_logger(__name__)

CHUNK = 500
IDLE_S = 3600.0
"""How long the gate of a key is kept that nobody uses."""

_NUMBERS = ("concurrency", "rate", "per", "burst")


def let_pass(reservations: Sequence[Reservation], *, using: str, now: datetime | None = None) -> list[Reservation]:
    """Those of jobs just claimed that no limit concerns or that may start, with their passes; others are parked.

    Nobody may be handed a job before this is committed. A set is one transaction of a few statements.
    """
    wanted = {job.jid: job for job in reservations if job.passes is not None}
    if not wanted:
        return list(reservations)

    def verb(connection: BaseDatabaseWrapper) -> dict[str, str | None]:
        with connection.cursor() as cursor:
            return _let_pass(connection, cursor, wanted, now)

    at_once = dialect_of(connections[using]).passes
    passed = (
        run(using, lambda connection: at_once(connection, list(wanted.values()), now), atomic=False) if at_once else {}
    )
    passed = passed or run(using, verb)
    return [
        job if job.passes is None else msgspec.structs.replace(job, passes=passed[job.jid])
        for job in reservations
        if job.passes is None or job.jid in passed
    ]


def _let_pass(
    connection: BaseDatabaseWrapper, cursor: CursorWrapper, wanted: dict[str, Reservation], now: datetime | None
) -> dict[str, str | None]:
    dialect = dialect_of(connection)
    rows = gates.claimed(cursor, dialect, wanted)
    mine = {
        rows[jid][0]: job
        for jid, job in wanted.items()
        if jid in rows and rows[jid][1:] == (job.wid, job.attempt)  # else it was taken from its worker meanwhile
    }
    found = _gates_of(connection, cursor, mine.values())
    clock = now or dialect.now(cursor)
    asked = [[found[name] for name in _names(job) if name in found] for job in mine.values()]
    refusals = dict(zip(mine, allot(asked, clock), strict=True))
    passes = {row_id: passes_text(held) for row_id, held in zip(mine, asked, strict=True) if refusals[row_id] is None}
    gates.hand_out(cursor, passes)
    shut = {row_id: gate for row_id, gate in refusals.items() if gate is not None}
    if shut:
        _park(cursor, dialect, {row_id: (mine[row_id].queue, gate) for row_id, gate in shut.items()})
    used = [gate for gate in found.values() if any(gate in held for held in asked)]
    for gate in used:
        gate.filled_at = gate.filled_at if gate.has_rate else clock
    gates.save(cursor, used)
    return {mine[row_id].jid: text for row_id, text in passes.items()}


def _names(job: Reservation) -> list[tuple[str, str]]:
    names = [(str(Scope.TASK), job.jobtype), (str(Scope.QUEUE), job.queue)]
    return names if job.limit_key is None else [(str(Scope.KEY), job.limit_key), *names]


def _gates_of(
    connection: BaseDatabaseWrapper, cursor: CursorWrapper, jobs: Iterable[Reservation]
) -> dict[tuple[str, str], Gate]:
    """The gates of these jobs, locked; those of keys are made when they are first needed."""
    names = {name for job in jobs for name in _names(job)}
    if not names:
        return {}
    dialect = dialect_of(connection)
    found = {(gate.scope, gate.name): gate for gate in gates.by_name(cursor, dialect, names)}
    unknown = sorted(name for scope, name in names if scope == Scope.KEY and (scope, name) not in found)
    if unknown and make(connection, unknown):
        found = {(gate.scope, gate.name): gate for gate in gates.by_name(cursor, dialect, names)}
    return found


def make(connection: BaseDatabaseWrapper, keys: Sequence[str]) -> int:
    """Gates for keys that have none, by their own limit or that of their kind; returns how many have one now."""
    limits = Limit.objects.using(connection.alias).filter(scope=Scope.KEY)
    limits = limits.filter(name__in={*keys, *map(family_of, keys)}).order_by("id")
    if connection.features.has_select_for_update:
        limits = limits.select_for_update()
    known = {limit.name: limit for limit in limits}
    rows = [gate_row(limit, key) for key in keys if (limit := known.get(key) or known.get(family_of(key))) is not None]
    GateRow.objects.using(connection.alias).bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def gate_row(limit: Limit, name: str) -> GateRow:
    """A gate of this limit, as nobody has used it."""
    numbers = {field: getattr(limit, field) for field in _NUMBERS}
    tokens = limit.allowance.capacity if limit.rate else 0.0
    is_paused = limit.paused_at is not None
    return GateRow(limit=limit, scope=limit.scope, name=name, is_paused=is_paused, tokens=tokens, **numbers)


def _park(cursor: CursorWrapper, dialect: Dialect, shut: dict[int, tuple[str, Gate]]) -> None:
    """Put back whom gates have refused, and put away the others at the heads of their queues that would be too.

    A queue's own are left where they are: claims leave out the whole queue.
    """
    gates.take_back(
        cursor, {row_id: None if gate.scope == Scope.QUEUE else gate.id for row_id, (_, gate) in shut.items()}
    )
    closed = {gate.id: gate for _, gate in shut.values() if gate.scope != Scope.QUEUE}
    if not closed:
        return
    by_scope = {
        scope: {gate.name: gate.id for gate in closed.values() if gate.scope == scope}
        for scope in (Scope.TASK, Scope.KEY)
    }
    for queue in sorted({queue for queue, gate in shut.values() if gate.scope != Scope.QUEUE}):
        gates.park_head(cursor, dialect, queue, tasks=by_scope[Scope.TASK], keys=by_scope[Scope.KEY])
    for gate in closed.values():
        gate.is_awaited = True


def held_by(working: JobQuerySet) -> list[str | None]:
    """The passes of these working jobs, locked: to `release` when the jobs are changed."""
    found = working.filter(passes__isnull=False).order_by("id")
    if connections[working.db].features.has_select_for_update:
        found = found.select_for_update()
    return list(found.values_list("passes", flat=True))


def release(connection: BaseDatabaseWrapper, passes: Iterable[str | None]) -> None:
    """Give passes back, inside the transaction that ended the runs, and let go of whom there is room for then."""
    counts = Counter(gate for text in passes for gate in passes_of(text))
    if not counts:
        return
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        found = gates.by_id(cursor, dialect, counts)
        clock = dialect.now(cursor) if any(gate.has_rate for gate in found) else None
        freed: set[str] = set()
        for gate in found:
            was_shut = gate.room < 1
            gate.in_use = max(0, gate.in_use - counts[gate.id])
            if clock is not None:
                gate.fill(clock)
            freed |= _opened(cursor, dialect, gate, clock, was_shut=was_shut)
        gates.save(cursor, found)
    locks.tell(connection, freed)


def _opened(cursor: CursorWrapper, dialect: Dialect, gate: Gate, now: datetime | None, *, was_shut: bool) -> set[str]:
    """Let go of whom a gate has room for; returns the queues that got work."""
    if gate.scope == Scope.QUEUE:
        return {gate.name} if was_shut and gate.room else set()
    if not gate.is_awaited:
        return set()
    found: dict[str, int] = {}
    if gate.room:
        found, gate.is_awaited = gates.let_go(cursor, dialect, gate.id, min(gate.room, CHUNK))
    if gate.is_awaited and now is not None and gate.opens_at is None:
        if gate.room:
            gate.wait_for_next(now, has_let_go=bool(found))
        else:
            gate.wait_for_tokens(now)
    return set(found)


def awaited_gates(*, using: str) -> list[int]:
    """Gates whose time has come."""
    due = GateRow.objects.using(using).filter(opens_at__lte=Now()).order_by("id").values_list("pk", flat=True)
    return run(using, lambda _: list(due[:CHUNK]), atomic=False)


def open_due(*, using: str, now: datetime | None = None) -> set[str]:
    """Let go of the next sets of jobs that wait for their rate; returns the queues that got work."""
    return look_again(awaited_gates(using=using), using=using, now=now)


def look_again(ids: Sequence[int], *, using: str, now: datetime | None = None) -> set[str]:
    """See whether these gates can let anybody go, each in a transaction of its own; returns the queues."""
    queues: set[str] = set()
    for gate_id in ids:
        queues |= run(using, lambda connection, gate_id=gate_id: _look_again(connection, gate_id, now))  # type: ignore[misc]
    return queues


def _look_again(connection: BaseDatabaseWrapper, gate_id: int, now: datetime | None) -> set[str]:
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        found = gates.by_id(cursor, dialect, [gate_id])
        freed: set[str] = set()
        clock = now or dialect.now(cursor)
        for gate in found:
            gate.fill(clock)
            freed |= _opened(cursor, dialect, gate, clock, was_shut=True)
        gates.save(cursor, found)
    return freed


def settle_later(connection: BaseDatabaseWrapper, left: Iterable[int | None]) -> None:
    """After jobs that these gates had let go went elsewhere: others may come in their place, after the commit."""
    ids = sorted({gate for gate in left if gate is not None})
    if ids:
        alias = connection.alias
        transaction.on_commit(lambda: locks.tell(connection, look_again(ids, using=alias)), using=alias, robust=True)


def let_go_by(jobs: JobQuerySet) -> list[int]:
    """The gates that have let go those of these jobs that are ready: to `settle_later` when they are gone."""
    ready = jobs.in_state(State.ENQUEUED).filter(gate__isnull=False)
    return [gate for gate in ready.order_by().values_list("gate", flat=True).distinct() if gate is not None]


def sweep(*, using: str) -> int | None:
    """Mend what gates count and whom they forgot: after a crash, or an edit while jobs ran. Returns how many.

    None where no gate is in use: none counts a job, and nobody is at one.
    """

    def waited_at(connection: BaseDatabaseWrapper) -> list[int]:
        with connection.cursor() as cursor:
            return list(gates.waited_at(cursor))

    rows = GateRow.objects.using(using)
    listed = rows.values_list("pk", "in_use", "is_awaited")
    stored = run(using, lambda _: {pk: (in_use, awaited) for pk, in_use, awaited in listed}, atomic=False)
    at = run(using, waited_at, atomic=False)
    if not stored and not at:
        return None
    is_used = bool(at) or any(in_use or is_awaited for in_use, is_awaited in stored.values())
    mended = _recount({pk: in_use for pk, (in_use, _) in stored.items()}, using)
    for gate_id in at:
        if gate_id not in stored:
            mended += bool(free(gate_id, using=using))
        elif not stored[gate_id][1]:
            run(using, lambda _, pk=gate_id: rows.filter(pk=pk).update(is_awaited=True))  # type: ignore[misc]
    look_again([gate_id for gate_id in at if gate_id in stored], using=using)
    return mended if is_used or mended else None


def free(gate_id: int, *, using: str) -> set[str]:
    """Let all jobs go that wait at a gate that is no more; returns their queues."""
    queues: set[str] = set()

    def verb(connection: BaseDatabaseWrapper) -> int:
        with connection.cursor() as cursor:
            count, found = gates.free(cursor, dialect_of(connection), gate_id, CHUNK)
        queues.update(found)
        locks.tell(connection, found)
        return count

    while run(using, verb):
        pass
    return queues


def _recount(stored: Mapping[int, int], using: str) -> int:
    """Compare what gates count with the jobs that hold passes, and mend it under the gate's row."""

    def look(connection: BaseDatabaseWrapper) -> Counter[int]:
        with connection.cursor() as cursor:
            return Counter(gate for text in gates.held(cursor) for gate in passes_of(text))

    held = run(using, look, atomic=False)
    return sum(
        run(using, lambda connection, pk=pk: recount(connection, pk))  # type: ignore[misc]
        for pk, in_use in stored.items()
        if held[pk] != in_use
    )


def recount(connection: BaseDatabaseWrapper, gate_id: int) -> bool:
    """Set what a gate counts to what holds its passes; whether it was another. Inside a transaction."""
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        found = gates.by_id(cursor, dialect, [gate_id])
        for gate in found:
            count = gates.holders(cursor, gate.id)
            if count != gate.in_use:
                logger.warning("a gate counted wrong, mended gate=%s in_use=%d jobs=%d", gate.name, gate.in_use, count)
                gate.in_use = count
                locks.tell(connection, _opened(cursor, dialect, gate, dialect.now(cursor), was_shut=True))
                gates.save(cursor, found)
                return True
    return False


def stranded(held_for_s: float, *, using: str) -> list[Reservation]:
    """Jobs claimed so long ago that have not passed: handed to nobody, to be given back."""
    since = Now() - timedelta(seconds=held_for_s)
    found = Job.objects.using(using).in_state(State.WORKING).filter(passes="", started_at__lt=since).order_by("id")
    rows = run(using, lambda _: list(found.values_list("jid", "queue", "wid", "attempt")[:CHUNK]), atomic=False)
    return [
        Reservation(jid=jid, queue=queue, text="", wid=wid, attempt=attempt, passes="")
        for jid, queue, wid, attempt in rows
    ]


def forget_idle(*, using: str, idle_s: float = IDLE_S) -> int:
    """Delete the gates of keys that nobody used for long, whose bucket is full; returns how many."""
    gates_ = GateRow.objects.using(using).filter(scope=Scope.KEY, in_use=0, is_awaited=False, opens_at=None)
    longest = timedelta(seconds=idle_s)
    idle = gates_.filter(filled_at__lt=Now() - longest).exclude(per__gt=idle_s).exclude(name=F("limit__name"))
    ids = run(using, lambda _: list(idle.values_list("pk", flat=True)[:CHUNK]), atomic=False)
    return run(using, lambda _: gates_.filter(pk__in=ids).delete()[0], atomic=False) if ids else 0
