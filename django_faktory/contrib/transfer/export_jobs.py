"""Export the jobs of this database to the Redis of a Faktory.

Jobs are written there first and then deleted here in one transaction. An export may be interrupted and repeated: the
jids of a step are stored in Redis atomically with its jobs, and removed after their rows are deleted. If a jid is found
there while its row still exists, the row is only deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import conf
from ...core.lifecycle import State
from ...models import Job, OutboxEntry
from ...store import queues
from ...store import transfer as store
from .job_format import format_original, score_of
from .redis_layout import NEW, OLD, Entry, FaktoryRedis, has_own_key
from .report import Counts, Report

# Faktory has no blocked state: these jobs go to the list of their queue, jobs in other states to the set of the state.
_LISTED = (State.ENQUEUED, State.BLOCKED)
MAY_RUN_TWICE = "was exported by an interrupted run, then claimed by a worker here: it may run there too"


class Export:
    """One export; call `run`."""

    def __init__(
        self, redis: FaktoryRedis, alias: str, *, layout: str = "", is_dry: bool = False, chunk_size: int = store.CHUNK
    ) -> None:
        """Read the jids of an interrupted export, and count the jobs here.

        The default of `layout` is the layout of the lists in Redis, or the newer one if there are none.
        """
        self._redis, self._alias, self._is_dry, self._chunk_size = redis, alias, is_dry, chunk_size
        self._layout = layout or (OLD if redis.read_contents().layout == OLD else NEW)
        self._exported = redis.read_exported()
        # Jobs that an earlier run wrote: the report counts them separately.
        self._exported_before = frozenset(self._exported)
        self._step_jids: set[str] = set()
        self.report = Report(self._layout, is_dry)
        for state in store.EXPORTED:
            count = Job.objects.using(alias).in_state(state).count()
            if count:
                self.report.counts.append(Counts("state", str(state), count))

    def run(self, advance: Callable[[int], object]) -> Report:
        """Export all jobs; `advance` is called with the number of jobs of each step."""
        # Pauses first: no job of a paused queue may start there.
        self._export_queues()
        for counts in self.report.counts:
            self._export_state(State(counts.name), counts, advance)
        self._add_problems()
        if not self._is_dry:
            self._redis.forget_exported(self._exported)
        return self.report

    def _export_queues(self) -> None:
        paused = sorted(queues.read_paused(using=self._alias))
        self.report.paused = paused
        if not self._is_dry:
            self._redis.add_queues(queues.known_names(using=self._alias))
            self._redis.add_queues(paused, paused=True)

    def _export_state(self, state: State, counts: Counts, advance: Callable[[int], object]) -> None:
        jobs = store.find_exportable(state, using=self._alias)
        if state in _LISTED:
            names = queues.known_names(using=self._alias)
            unsupported = [name for name in names if not has_own_key(name, self._layout)]
            if count := jobs.filter(queue__in=unsupported).count():
                reason = f"this layout has no key for a queue of this name ({', '.join(unsupported)})"
                self.report.add_problem(reason, count=count)
            jobs = jobs.exclude(queue__in=unsupported)
        if self._is_dry:
            counts.moved = jobs.count()
            return
        while moved := store.hand_over(jobs, self._write, using=self._alias, limit=self._chunk_size):
            moved_before = len(self._step_jids & self._exported_before)
            counts.moved_before += moved_before
            counts.moved += moved - moved_before
            # Only after the rows are deleted: until then the jids show the next run which jobs it must not write again.
            self._redis.forget_exported(self._step_jids)
            self._exported -= self._step_jids
            advance(moved)

    def _write(self, rows: Sequence[Job]) -> None:
        """Write the jobs of a step to Redis, except those written by an interrupted step or run."""
        self._step_jids = {row.jid for row in rows}
        new_rows = [row for row in rows if row.jid not in self._exported]
        lists: dict[str, list[bytes]] = {}
        sets: dict[str, list[Entry]] = {}
        for row in new_rows:
            raw = format_original(row)
            if row.state in _LISTED:
                lists.setdefault(row.queue, []).append(raw)
            else:
                # The score of a dead job is the end of its storage, that of other jobs the time to run.
                moment = row.purge_at if row.state == State.DEAD else row.run_at
                sets.setdefault(row.state, []).append(Entry(raw, score_of(moment)))  # type: ignore[arg-type]
        jids = [row.jid for row in new_rows]
        if new_rows:
            self._redis.add(lists, sets, jids, layout=self._layout)
            self._exported.update(jids)

    def _add_problems(self) -> None:
        jobs = Job.objects.using(self._alias)
        members = jobs.in_state(*store.EXPORTED).exclude(bid=None, callback_of=None).count()
        for reason, count in (
            ("belongs to a batch, which the open Faktory does not know", members),
            ("a worker has it: stop the workers first", jobs.in_state(State.WORKING).count()),
            (
                "is still in the outbox: wait until it is relayed",
                sum(OutboxEntry.objects.using(alias).count() for alias in conf.outbox()),
            ),
        ):
            if count:
                self.report.add_problem(reason, count=count)
        if not self._is_dry and (still_stored := store.find_stored(sorted(self._exported), using=self._alias)):
            self.report.add_problem(MAY_RUN_TWICE, sorted(still_stored))
        if self.report.found:
            self.report.notes.append(
                "priorities, locks, limits, results and the history of failures are known here only; numbers beyond "
                "2^53 are rounded there"
            )
