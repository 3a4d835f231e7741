"""Time-based maintenance on every node: due jobs, reservations, lost workers, purging.

`Maintenance` runs one loop over a table of steps. Any node runs a step for which the query for pending work finds
something; a periodic step runs on the node that takes its turn (ADR 0045). The loop sleeps until the next job or cron
entry is due, at most one second on one node, the watcher, and three on the others; a job pushed on this node that is
due sooner ends the sleep. An idle node sends one statement for each sleep. Independent of the protocol and of worker
threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.conf import settings
from django.db import connections
from django.utils import timezone

from .. import conf
from ..brokers import configured_locket, configured_store
from ..core.logs import get_logger
from ..errors import BrokerUnavailable
from ..store import alarm_records, notifier, queues, sharing, workers
from ..store.batches import batches
from ..store.cron import entries, runs
from ..store.dialects.bounds import Bounds
from ..store.jobs import failures, releases, steps, tracking, waits
from ..store.limits import limiters
from ..store.locks import backfill, locks
from ..store.maintenance import due
from ..store.maintenance.background import BackgroundStep
from ..store.maintenance.pending_work import PendingWork, find_pending_work
from ..store.maintenance.retention import Retention
from ..store.maintenance.turns import LEASE_S, NodeTurns, forget_readings
from ..store.maintenance.vacuum import Vacuumer
from ..store.outages import of_this_node
from ..store.statistics import deltas, histograms
from ..tasks import cron, limits
from . import db_watchdog
from .background_loops import Loop

R = TypeVar("R")

logger = get_logger(__name__)

LONGEST_SLEEP_S = 1.0
"""Longest sleep of the watcher in seconds: the delay of a job that another process scheduled earlier than all jobs
known here."""

RECHECK_DUE_S = 0.02
"""Seconds before the next query while another node is enqueueing the due jobs: its commit will follow soon."""

CHECK_ALL_EVERY_S = 3.0
"""Seconds between checks of reservations, workers and expired jobs, and the longest sleep of nodes that do not watch.

With the sleep between steps this is below the 5 s of W19 and W20.
"""

FULL_LOOK_S = (0.0, 60.0)
"""Shortest and longest time between two queries that begin before the bound (ADR 0046)."""

WATCH = "watch"
"""The turn of the watcher, the node that queries for pending work every second."""

WATCH_LEASE_S = 7.0
"""Seconds after which another node may become the watcher, if this one has sent nothing."""

WATCHER_FIRST_S = 2.0
"""Seconds for which only the watcher takes a turn that is due, so that steps that continue stay with their node."""

FOLD_EVERY_S = 2.0
"""Seconds between two folds of deltas: INFO reads those of this time one by one."""
FOLD_IDLE_S = 10.0
"""Seconds until the next look at the deltas after one that found few."""

LONG_STEP_S = 1.0
"""Seconds from which on a step is logged: due jobs wait for it."""

FORGET_UNSEEN_S = 3600
"""Seconds for which a worker process that never sent a BEAT is listed after it was last seen."""


HEARD_WITHIN_S = 30.0
"""Seconds after an outage within which every live worker sends a BEAT: twice the default of BEAT_INTERVAL.

During an outage of the servers or of the database no BEAT is recorded. So a node counts no worker as lost, and ends no
reservation that a BEAT may extend, until the database has been reachable for this time. Otherwise each outage longer
than WORKER_TIMEOUT, or than a reservation, would make running jobs run twice.
"""

SUSPENDED_S = 3.0
"""A round that begins this many seconds late means that the process was suspended: it counts no worker as lost until
every live worker has had time to send a BEAT."""

IDLE_LIMITERS_S = 50.0
"""Seconds between checks of the limiters' counts while no limiter is in use."""

VANISHED_S = 10.0
"""Seconds a job stays with an unknown holder: longer than any claim takes from its start to its commit."""


ON_DEMAND = math.inf
"""Interval of steps that run only when the query for pending work finds something, on any node."""

STOP_S = 2.0
"""Seconds that a stopping node waits for retention, and for a recount, which are safe to kill."""

LONGEST_STEP_S = LEASE_S
"""Timeout in seconds for each transaction of a step."""

RECOUNT_S = 3600.0
"""Timeout in seconds for the count of all live jobs."""

AFTER_FAILURE_S = 10.0
"""Seconds before a failed step is tried again, unless its interval is shorter."""


class PeriodicStep(NamedTuple):
    """Run `work` every `every_s` seconds on one node, and again at once while it returns True (more is left).

    Also runs it when `when` finds work for it. ON_DEMAND means only then, and once at the start, on each node.
    """

    name: str
    every_s: float
    work: Callable[[], object]
    when: Callable[[PendingWork], bool] = lambda _: False

    @property
    def has_turn(self) -> bool:
        """Whether the step is periodic: one node at a time runs it."""
        return self.every_s != ON_DEMAND

    def run(self) -> bool:
        """Run the work; return whether more is left. Any result other than True means that none is."""
        return self.work() is True


class Maintenance(Loop):
    """The maintenance loop.

    `on_lost` receives the wids of lost workers (a server closes their connections). `on_work` receives the queues that
    have new work, None for any queue (a server tries its waiting FETCHes).
    """

    def __init__(
        self,
        alias: str,
        *,
        on_lost: Callable[[list[str]], None] | None = None,
        on_work: Callable[[set[str] | None], None] | None = None,
        max_sleep_s: float = LONGEST_SLEEP_S,
        retry_after_s: float = AFTER_FAILURE_S,
    ) -> None:
        super().__init__()
        self.alias = alias
        self._store = configured_store(alias)
        self._max_sleep_s = max_sleep_s
        self._retry_after_s = retry_after_s
        self._on_lost = on_lost or (lambda _: None)
        self._on_work = on_work or (lambda _: None)
        self._alarm = threading.Event()  # ends the sleep; not an alarm of `operations.alarms`
        self._wake_at = math.inf
        self._next_job_due_at: float | None = None  # by the monotonic clock, as of the latest query
        self._check_all_at = 0.0
        self._bounds = {
            checks_all: Bounds(full_look_s=FULL_LOOK_S, max_marks=3, takes_turns=False) for checks_all in (False, True)
        }
        self._pending: PendingWork | None = None  # as of the latest query; None after a failed one
        self._step_due_at: dict[str, float] = {}  # next run of the steps without turns
        self._listens_since = math.inf  # without interruption; inf while the database is unreachable
        self._positions: dict[str, Any] = {}  # of steps that continue where their last run ended
        self._folded_until: datetime | None = None
        self._skip_limiters_until = self._fold_at = 0.0
        self._vacuumer = Vacuumer(alias)
        self._retention = Retention(self._store)
        self._recounting = BackgroundStep("recount", self._recount)
        self._round_at = self._success_at = time.monotonic()
        self._steps = self._all_steps()
        self._turns = NodeTurns([WATCH, *(step.name for step in self._steps if step.has_turn)], using=alias)

    def _all_steps(self) -> tuple[PeriodicStep, ...]:
        alias, store = self.alias, self._store
        return (
            PeriodicStep("turns", ON_DEMAND, self._add_turns, lambda found: found.turn_in_s is None),
            PeriodicStep("cron entries of code", ON_DEMAND, lambda: cron.sync(using=alias)),
            PeriodicStep("cron rows", 300.0, self._adopt_entries, lambda found: found.has_unscheduled_entries),
            # The next query finds entries that were left over.
            PeriodicStep("cron", ON_DEMAND, self._run_due_cron_entries, lambda found: _is_over(found.tick_in_s)),
            PeriodicStep("cron outcomes", 300.0, lambda: runs.record_run_outcomes(using=alias)),
            PeriodicStep("cron history", 600.0, lambda: runs.forget_old(using=alias)),
            # Before reservations: a dead worker's reservations expire too, and would count as failures of its jobs.
            PeriodicStep("workers", ON_DEMAND, self._reclaim_lost_workers, lambda found: found.has_silent_workers),
            PeriodicStep(
                "reservations", ON_DEMAND, self._reap_reservations, lambda found: found.has_expired_reservations
            ),
            PeriodicStep("unknown workers", 10.0, self._reclaim_unknown_workers),
            PeriodicStep("unseen workers", 60.0, lambda: workers.delete_stale(FORGET_UNSEEN_S, using=alias)),
            PeriodicStep("lost workers", 3600.0, lambda: alarm_records.purge_lost(using=alias)),
            PeriodicStep("expired jobs", ON_DEMAND, self._expire_jobs, lambda found: found.has_expired_jobs),
            PeriodicStep("limits of code", ON_DEMAND, lambda: limits.sync(using=alias)),
            # The next query finds jobs whose rate admits them later.
            PeriodicStep("limiters", ON_DEMAND, self._open_limiters, lambda found: _is_over(found.opens_in_s)),
            PeriodicStep("limiters' counts", 10.0, self._check_limiters),
            PeriodicStep("limiters of keys", 600.0, lambda: limiters.delete_idle(using=alias) == limiters.CHUNK),
            PeriodicStep("locks", ON_DEMAND, self._expire_locks, lambda found: found.has_expired_locks),
            PeriodicStep("jobs without lock or permits", 60.0, self._release_stranded),
            PeriodicStep("blocked jobs", 60.0, self._check_blocked_jobs),
            PeriodicStep("jobs without keys", 3600.0, self._backfill_lock_keys),
            # The vacuum itself runs in a thread of its own: due jobs do not wait for it (ADR 0009).
            PeriodicStep("dead rows", 10.0, self._vacuumer.start_if_due),
            PeriodicStep("purge", 60.0, lambda: due.purge(store) == due.CHUNK),
            PeriodicStep("steps", 600.0, lambda: self._continue("steps", steps.purge)),
            PeriodicStep("signals", 30.0, self._sweep_signals),
            PeriodicStep("history", 60.0, self._retention.start),
            PeriodicStep("tracking", 60.0, lambda: tracking.purge_tracking(store) == tracking.CHUNK),
            PeriodicStep("batches", 60.0, self._maintain_batches),
            PeriodicStep("measures", 600.0, self._purge_histograms),
            PeriodicStep("minutes of measures", 600.0, self._fold_minutes),
            PeriodicStep("totals of tasks", 600.0, lambda: self._continue("totals", histograms.fold_idle_series)),
            PeriodicStep("queues in use", 600.0, self._list_queues),
            PeriodicStep("unused queues", 600.0, self._forget_queues),
            PeriodicStep("sizes", ON_DEMAND, self._fold_sizes, lambda _: self._may_fold()),
            PeriodicStep("recount", 86_400.0, self._recounting.start),
        )

    def run(self) -> None:
        """Loop until `stop`. Waits for an unreachable database; an error in one step stops no other step."""
        # Steps process hundreds of rows, so they get more time than a command (ADR 0017).
        db_watchdog.set_thread_limit(LONGEST_STEP_S)
        while not self._stopping.is_set():
            sleep_s = self._round()
            if not self._stopping.is_set():
                self._alarm.wait(sleep_s)
        self._run_guarded("turns", self._turns.give_back)
        self._join_background(STOP_S)
        connections[self.alias].close()

    def _round(self) -> float:
        """Query for due work and run the due steps; return the seconds to sleep."""
        # While the process was suspended (SIGSTOP, a sleeping machine), it received no BEAT.
        if time.monotonic() - self._round_at > self._longest_sleep_s() + SUSPENDED_S:
            self._listens_since = math.inf
        self._pending = None
        self._wake_at = math.inf  # a push during this round must end the next sleep
        self._alarm.clear()
        due_in_s = self._run_guarded("due jobs", self._enqueue_due)
        if due_in_s is not None:
            self._success_at = time.monotonic()
        # A failed query restarts this: while the database was unreachable no BEAT could be stored (ADR 0017).
        self._listens_since = math.inf if due_in_s is None else min(self._listens_since, time.monotonic())
        due_steps = self._run_guarded("turns", self._find_due_steps) or set()
        sleep_s = min(self._longest_sleep_s(), math.inf if due_in_s is None else due_in_s)
        for step in self._steps:
            # A step with more work runs again in the next round, so that a backlog does not delay due jobs.
            if not self._stopping.is_set() and self._run_if_due(step, due_steps):
                sleep_s = 0
        self._round_at = time.monotonic()
        self._wake_at = self._round_at + sleep_s
        return sleep_s

    def _longest_sleep_s(self) -> float:
        return self._max_sleep_s if WATCH in self._turns.held else max(self._max_sleep_s, CHECK_ALL_EVERY_S)

    def _find_due_steps(self) -> set[str]:
        """Return the steps with turns that this node has or may take; become the watcher if no other node is."""
        due = set(self._turns.held)
        is_watcher = WATCH in due and self._turns.take(WATCH, lease_s=WATCH_LEASE_S)
        overdue_s = 0.0 if is_watcher else WATCHER_FIRST_S
        turn_in_s = self._pending.turn_in_s if self._pending else None
        if turn_in_s is not None and turn_in_s <= -overdue_s:
            due |= self._turns.find_due(overdue_s=overdue_s)
        if WATCH in due and not is_watcher:
            self._turns.take(WATCH, lease_s=WATCH_LEASE_S)
        return due

    def _run_if_due(self, step: PeriodicStep, due_steps: set[str]) -> bool:
        """Run the step if it is due; return whether more is left."""
        has_turn = step.name in due_steps and self._run_guarded(step.name, partial(self._turns.take, step.name))
        # A step without a time in `_step_due_at` has not run yet: each runs in the first round.
        is_due = not step.has_turn and time.monotonic() >= self._step_due_at.get(step.name, 0.0)
        if not (has_turn or is_due or (self._pending is not None and step.when(self._pending))):
            return False
        began = time.monotonic()
        has_more = self._run_guarded(step.name, step.run)
        took_s = time.monotonic() - began
        if took_s >= LONG_STEP_S:
            logger.warning("maintenance step took long step=%s seconds=%.1f", step.name, took_s)
        pause_s = step.every_s if has_more is not None else min(step.every_s, self._retry_after_s)
        if not step.has_turn:
            self._step_due_at[step.name] = time.monotonic() + (0 if has_more else pause_s)
        elif has_turn and not has_more:
            self._run_guarded(step.name, partial(self._turns.finish, step.name, pause_s=pause_s, took_s=took_s))
        return bool(has_more)

    def since_round_s(self) -> float:
        """Return seconds since the loop's last round, successful or not. Safe from any thread."""
        return time.monotonic() - self._round_at

    def since_success_s(self) -> float:
        """Return seconds since the last successful query. Safe from any thread."""
        return time.monotonic() - self._success_at

    def stop(self) -> None:
        """End the loop after the current step. Safe from any thread and from a signal handler."""
        super().stop()
        self._alarm.set()

    def wake_by(self, at: datetime) -> None:
        """Sleep no longer than until `at`, when a stored job is due. Safe from any thread.

        Compares with this machine's clock, which is accurate enough.
        """
        if time.monotonic() + (at - datetime.now(UTC)).total_seconds() < self._wake_at:
            self._alarm.set()

    def run_once(self) -> None:
        """Run every step until no work is left, whichever node has its turn: for commands and tests.

        Assumes that live workers have sent BEATs.
        """
        self._listens_since = -math.inf
        while self._enqueue_due() <= 0:
            pass
        for step in self._steps:
            while step.run():
                pass
        self._join_background(LONGEST_STEP_S)

    def _join_background(self, timeout_s: float) -> None:
        for background in (self._retention, self._recounting):
            background.join(timeout_s)

    def _run_guarded(self, name: str, work: Callable[[], R]) -> R | None:
        """Return the result of `work`, or None after an error, which is logged."""
        try:
            result = work()
        except BrokerUnavailable as error:
            of_this_node.record_failure(f"maintenance: {name}", error)
        except Exception:  # the loop must survive: log and continue
            logger.exception("maintenance step failed step=%s", name)
            connections[self.alias].close()
        else:
            of_this_node.record_success()
            sharing.give_back()
            return result
        return None

    def _enqueue_due(self) -> float:
        """Enqueue due jobs, one set at a time; return the seconds until there is more to do."""
        wait_s, sleep_s = self._query_pending_work()
        if wait_s is None or wait_s > 0:
            self._notice_other_nodes(wait_s)
            return sleep_s if wait_s is None else min(wait_s, sleep_s)
        queues = due.enqueue_due(self._store, since=self._pending and self._pending.due_at)
        if queues:
            self._next_job_due_at = None
            self._notify_workers(queues)
            return 0
        self._next_job_due_at = time.monotonic()
        return RECHECK_DUE_S

    def _query_pending_work(self) -> tuple[float | None, float]:
        """Return seconds until the next job is due (None: no job), and the longest sleep.

        Every CHECK_ALL_EVERY_S the same query also checks for all other work.
        """
        checks_all = time.monotonic() >= self._check_all_at
        pending = find_pending_work(
            using=self.alias,
            worker_timeout_s=conf.get("WORKER_TIMEOUT") if checks_all else None,
            steps=self._turns.steps,
            bounds=self._bounds[checks_all],
        )
        if checks_all:
            self._check_all_at = time.monotonic() + CHECK_ALL_EVERY_S
        self._pending = pending
        wakes_in_s = [in_s for in_s in (pending.tick_in_s, pending.opens_in_s) if in_s is not None]
        # A due cron run that cannot be taken is locked by another node, for the length of a transaction: do not spin.
        return pending.due_in_s, min(max(min(wakes_in_s, default=math.inf), RECHECK_DUE_S), self._longest_sleep_s())

    def _notice_other_nodes(self, wait_s: float | None) -> None:
        """Wake waiting FETCHes if a job that should be due by now is gone: another node enqueued it.

        The notification of that node may not reach this one.
        """
        now = time.monotonic()
        if self._next_job_due_at is not None and self._next_job_due_at <= now:
            self._on_work(None)
        self._next_job_due_at = None if wait_s is None else now + wait_s

    def _add_turns(self) -> None:
        self._turns.add()

    def _adopt_entries(self) -> None:
        entries.adopt(default_zone=settings.TIME_ZONE, using=self.alias)

    def _run_due_cron_entries(self) -> None:
        self._notify_workers(runs.enqueue_due_runs(cron.enqueue, using=self.alias))

    def _open_limiters(self) -> None:
        self._notify_workers(limiters.unblock_due(self._store))

    def _reap_reservations(self) -> bool:
        may_judge = self._has_listened()
        # Before the node has listened long enough, reservations that a BEAT may extend are spared.
        return failures.reap(self._store, skip_extendable=not may_judge) == failures.CHUNK

    def _reclaim_lost_workers(self) -> None:
        if self._has_listened():
            self._reclaim_jobs_of(workers.find_stale_wids(conf.get("WORKER_TIMEOUT"), using=self.alias))

    def _has_listened(self) -> bool:
        """Return True if every live worker and server has had time to report since the database became reachable."""
        listen_s: float = min(conf.get("WORKER_TIMEOUT"), HEARD_WITHIN_S)
        return time.monotonic() - self._listens_since >= listen_s

    def _reclaim_unknown_workers(self) -> None:
        # These wids were counted as lost while a claim of theirs was in flight, so there is no BEAT to wait for.
        self._reclaim_jobs_of(workers.find_unknown_wids(VANISHED_S, using=self.alias))

    def _reclaim_jobs_of(self, wids: list[str]) -> None:
        if wids:
            jobs = failures.reclaim_lost(self._store, wids)
            logger.warning("workers lost wids=%s jobs=%d", ",".join(wids), jobs)
            self._on_lost(wids)
            if jobs:
                self._on_work(None)

    def _expire_locks(self) -> bool:
        expired = locks.mark_expired(using=self.alias)
        if expired:
            self._on_work(None)
        return expired == locks.CHUNK

    def _check_limiters(self) -> None:
        """Check the limiters' counts; rarely while none is in use, so that an idle node sends few statements."""
        if time.monotonic() >= self._skip_limiters_until and limiters.sweep(using=self.alias) is None:
            self._skip_limiters_until = time.monotonic() + IDLE_LIMITERS_S

    def _release_stranded(self) -> bool:
        released, queues = releases.release_stranded(self._store, VANISHED_S)
        if released:
            logger.warning("jobs were claimed and got no lock or no permits, released jobs=%d", released)
            self._notify_workers(queues)
        return released == releases.CHUNK

    def _notify_workers(self, queues: set[str]) -> None:
        if queues:
            notifier.announce(self.alias, queues)
            self._on_work(queues)

    def _check_blocked_jobs(self) -> None:
        """Check a bounded number of blocked jobs; the next run continues where this one ended."""
        repaired, self._positions["blocked"] = locks.sweep(using=self.alias, after=self._positions.get("blocked"))
        if repaired:
            logger.warning("keys had blocked jobs and none was ready, the next job of each is now keys=%d", repaired)
            self._on_work(None)

    def _backfill_lock_keys(self) -> bool:
        """Give lock keys to jobs that were pushed before LOCKET applied to their queue; scans all waiting jobs."""
        locket = configured_locket()
        if not locket.is_enabled or (locket.queues is not None and not locket.queues):
            return False
        return self._continue("keys", partial(backfill.give_keys, locket.with_lock_key, locket.queues))

    def _sweep_signals(self) -> bool:
        queues, self._positions["signals"] = waits.sweep(self._store, after=self._positions.get("signals"))
        if queues:
            self._on_work(queues)
        return self._positions["signals"] is not None

    def _continue(self, name: str, work: Callable[..., object]) -> bool:
        """Do a bounded part of some work, which returns where it ended; return whether more is left."""
        self._positions[name] = work(using=self.alias, after=self._positions.get(name))
        return self._positions[name] is not None

    def _maintain_batches(self) -> bool:
        """Expire uncommitted batches, purge batches that ended long ago, and execute overdue steps of batches."""
        expired = batches.expire(self._store)
        purged = batches.purge(self._store, kept_for_s=conf.get("BATCH_TTL"))
        repaired = batches.sweep(self._store)
        if repaired:
            logger.error("overdue steps of batches executed batches=%d", repaired)
        return expired >= batches.CHUNK or purged >= batches.CHUNK

    def _expire_jobs(self) -> None:
        expired = 0
        # A loop, not another round: one log line has the number of all expired jobs.
        while count := due.expire(self._store):
            expired += count
            if count < due.CHUNK or self._stopping.is_set():
                break
        if expired:
            logger.info("jobs waited past their expires_in and are dropped jobs=%d", expired)

    def _purge_histograms(self) -> bool:
        return histograms.purge(using=self.alias, kept_for_s=conf.get("METRICS_TTL")) == histograms.CHUNK

    def _fold_minutes(self) -> bool:
        """Combine the rows of minutes into hours, one hour at a time, up to the latest hour that is old enough."""
        end = timezone.now() - timedelta(seconds=histograms.MINUTES_KEPT_S)
        end = end.replace(minute=0, second=0, microsecond=0)
        # Minutes more than a day before `end` stay as they are: pages add up minutes and hours.
        start = self._folded_until or end - timedelta(days=1)
        hour = histograms.find_hour(using=self.alias, start=start, end=end)
        if hour is None:
            self._folded_until = end
            return False
        folded = histograms.fold_hour(hour, using=self.alias)
        if folded is None:
            self._folded_until = hour + histograms.HOUR
        return folded != 0  # 0: another node folds the hour; the next run checks its rows again

    def _may_fold(self) -> bool:
        # The watcher needs no further turn: it is one node, and an idle one sends no statement for it.
        return WATCH in self._turns.held and time.monotonic() >= self._fold_at

    def _fold_sizes(self) -> None:
        has_folded = deltas.fold(using=self.alias)
        self._fold_at = time.monotonic() + (FOLD_EVERY_S if has_folded else FOLD_IDLE_S)

    def _recount(self) -> None:
        """Correct the numbers of live jobs. Those of ended jobs are too many to count every day (`faktory recount`)."""
        db_watchdog.set_thread_limit(RECOUNT_S)
        if wrong := deltas.recount(using=self.alias, with_history=False):
            logger.warning("numbers of jobs were wrong numbers=%d", len(wrong))

    def _list_queues(self) -> bool:
        """Add rows of queues in which jobs wait: a job that was not pushed, such as a callback, adds none."""
        # Continues after the last name, so that each run reads a bounded number of queues.
        names = queues.find_names_in_use(using=self.alias, after=self._positions.get("in use", ""))
        queues.add(names, using=self.alias)
        self._positions["in use"] = names[-1] if len(names) == queues.NAMES_AT_ONCE else ""
        return bool(self._positions["in use"])

    def _forget_queues(self) -> bool:
        after = self._positions.get("unused", "")
        count, self._positions["unused"] = queues.forget_unused(using=self.alias, after=after)
        forget_readings(using=self.alias)
        if count:
            logger.info("forgot queues that were not used queues=%d", count)
        return bool(self._positions["unused"])


def _is_over(in_s: float | None) -> bool:
    return in_s is not None and in_s <= 0
