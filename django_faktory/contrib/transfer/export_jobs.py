"""Export the jobs of this database to the Redis of a Faktory.

Jobs are written there first and then deleted here in one transaction. An export may be interrupted and repeated: the
jids of a step are stored in Redis atomically with its jobs until the rows are deleted. If a jid is found there
while its row still exists, the row is only deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import conf
from ...core.lifecycle import State
from ...models import Job, OutboxEntry
from ...store import queues
from ...store import transfer as store
from .job_format import departure, score_of
from .redis_layout import NEW, OLD, Entry, FaktoryRedis, is_free
from .report import Counts, Report

_READY = (State.ENQUEUED, State.BLOCKED)
AGAIN = "was written there by a run that broke off, and was taken by a worker here since: it may run there too"


class Export:
    """One export; call `run`."""

    def __init__(self, redis: FaktoryRedis, alias: str, *, layout: str = "", is_dry: bool = False) -> None:
        """Read what is there. Without `layout`, that of the existing lists is used, or the newer one if there are
        none."""
        self._redis, self._alias, self._is_dry = redis, alias, is_dry
        self._layout = layout or (OLD if redis.contents().layout == OLD else NEW)
        self._there = redis.exported()
        # Written by an earlier run: counted separately in the report.
        self._before = frozenset(self._there)
        self._step: set[str] = set()
        self.report = Report(self._layout, is_dry)
        for state in store.EXPORTED:
            count = Job.objects.using(alias).in_state(state).count()
            if count:
                self.report.counts.append(Counts("state", str(state), count))

    def run(self, advance: Callable[[int], object]) -> Report:
        """Export all jobs; `advance` is called with the number of jobs of each step."""
        # Pauses first: no job of a paused queue may start there.
        self._pause_there()
        for counts in self.report.counts:
            self._hand_over(State(counts.name), counts, advance)
        self._add_problems()
        if not self._is_dry:
            self._redis.forget_exported(self._there)
        return self.report

    def _pause_there(self) -> None:
        paused = sorted(queues.paused(using=self._alias))
        self.report.paused = paused
        if not self._is_dry:
            self._redis.add_queues(queues.known_names(using=self._alias))
            self._redis.add_queues(paused, paused=True)

    def _hand_over(self, state: State, counts: Counts, advance: Callable[[int], object]) -> None:
        jobs = store.exportable(state, using=self._alias)
        # Only ready jobs are in the list of their queue; jobs in sets need no key for it.
        if hidden := [name for name in queues.known_names(using=self._alias) if not is_free(name, self._layout)]:
            if state in _READY and (count := jobs.filter(queue__in=hidden).count()):
                reason = f"this layout has no key for a queue of this name ({', '.join(hidden)})"
                self.report.problem(reason, count=count)
            jobs = jobs.exclude(queue__in=hidden) if state in _READY else jobs
        if self._is_dry:
            counts.moved = jobs.count()
            return
        while gone := store.hand_over(jobs, self._write, using=self._alias, limit=store.CHUNK):
            counts.before += len(self._step & self._before)
            counts.moved += gone - len(self._step & self._before)
            self._redis.forget_exported(self._step)
            self._there -= self._step
            advance(gone)

    def _write(self, rows: Sequence[Job]) -> None:
        """Write the jobs of a step to Redis, except those written by an interrupted step or run."""
        self._step = {row.jid for row in rows}
        fresh = [row for row in rows if row.jid not in self._there]
        lists: dict[str, list[bytes]] = {}
        sets: dict[str, list[Entry]] = {}
        for row in fresh:
            raw = _raw(row)
            if row.state in _READY:
                lists.setdefault(row.queue, []).append(raw)
            else:
                moment = row.purge_at if row.state == State.DEAD else row.run_at
                sets.setdefault(row.state, []).append(Entry(raw, score_of(moment)))  # type: ignore[arg-type]
        jids = [row.jid for row in fresh]
        if fresh:
            self._redis.add(lists, sets, jids, layout=self._layout)
            self._there.update(jids)

    def _add_problems(self) -> None:
        jobs = Job.objects.using(self._alias)
        members = jobs.in_state(*store.EXPORTED).exclude(bid=None, callback_of=None).count()
        for reason, count in (
            ("belongs to a batch, which the open Faktory does not know", members),
            ("a worker has it: stop the workers first", jobs.in_state(State.WORKING).count()),
            ("waits in the outbox: let it be handed on first", sum(map(_outbox, conf.outbox()))),
        ):
            if count:
                self.report.problem(reason, count=count)
        if again := store.known(sorted(self._there), using=self._alias) if not self._is_dry else set():
            self.report.problem(AGAIN, sorted(again))
        if self.report.found:
            self.report.notes.append(
                "priorities, locks, limits, results and the history of failures are known here only; numbers beyond "
                "2^53 are rounded there"
            )


def _raw(row: Job) -> bytes:
    return departure(
        text=row.payload,
        state=row.state,
        created_at=row.created_at,
        run_at=row.run_at,
        failure=row.failure,
        enqueued_at=row.enqueued_at,
    )


def _outbox(alias: str) -> int:
    return OutboxEntry.objects.using(alias).count()
