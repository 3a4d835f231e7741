"""What time does, on every node: due jobs, reservations, lost workers, purging. No leader: steps may run twice.

One loop over a table of steps. Due jobs and cron entries have a clock of their own: the loop sleeps until the next one
is due, a second at most, so that a job is picked up when it should be. Pushes of this node that are due sooner end its
sleep.
The look for them asks every few seconds whether anything else is to be done, so that an idle node sends one statement
a second.
Knows no protocol and no worker's threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from django.db import connections

from . import conf, crontab, deadlines, limiting, wakeups
from .brokers import configured_locket
from .errors import BrokerUnavailable
from .logs import get_logger
from .store import (
    backfill,
    batches,
    counters,
    failures,
    gates,
    giving_back,
    locks,
    looking,
    measures,
    queues,
    ticks,
    tracking,
    upkeep,
    workers,
)
from .store.tidying import Tidier
from .wakeups.postgresql import ANY_QUEUE

R = TypeVar("R")
D = TypeVar("D")

logger = get_logger(__name__)

LONGEST_SLEEP_S = 1.0
"""Bounds how late a job is that another node scheduled for sooner than all that this one knew of."""

LOOK_AGAIN_S = 0.02
"""Another node is enqueueing what is due: look again when it has committed."""

LOOK_AROUND_S = 3.0
"""Between two looks at reservations, workers and expired jobs: with the sleep less than the 5 s of W19 and W20."""

FORGET_UNSEEN_S = 3600
"""How long a worker process that never sent a BEAT is listed after it was last seen."""


HEARD_WITHIN_S = 30.0
"""Twice the time between two BEATs: a worker that lives is heard so soon after an outage, if it lives.

While no server or no database was there, no BEAT could be received: a node counts no worker as lost, and ends no
reservation that a BEAT may extend, before it has listened that long itself. Else each outage longer than
WORKER_TIMEOUT, or than a reservation, would let running jobs run twice."""

IDLE_GATES_S = 50.0
"""How long nobody looks after gates where none was in use."""

VANISHED_S = 10.0
"""How long a job is left with a holder nobody knows: longer than any claim takes from its start to its commit."""


WHEN_SEEN = math.inf

LONGEST_STEP_S = 120.0
"""How long the database may take for one of a step's transactions."""

AFTER_FAILURE_S = 10.0
"""When a step that failed is tried again, unless it would be sooner."""


class Step(NamedTuple):
    """Run `work` every `every_s` seconds, again at once as long as it says that more is left.

    `every_s` is WHEN_SEEN for what a look sees by itself; those are taken once at the start too.
    """

    name: str
    every_s: float
    work: Callable[[], bool]


class Maintenance:
    """The loop. `on_lost` hears the wids given up (a server closes their connections), `on_work` the queues
    that got work, None for any (a server tries its waiting fetchers)."""

    def __init__(
        self,
        alias: str,
        *,
        on_lost: Callable[[list[str]], None] | None = None,
        on_work: Callable[[set[str] | None], None] | None = None,
    ) -> None:
        self.alias = alias
        self._on_lost = on_lost or (lambda _: None)
        self._on_work = on_work or (lambda _: None)
        self._stopping = threading.Event()
        self._alarm = threading.Event()  # ends the sleep
        self._awake_at = math.inf
        self._next_due_at: float | None = None  # as the latest look saw it
        self._look_around_at = 0.0
        self._seen: set[str] = set()  # steps that have something to do
        self._due_at: dict[str, float] = {}  # the others
        self._listens_since = math.inf  # without a break
        self._keyless_after: backfill.Position | None = None
        self._swept_to: locks.Place | None = None
        self._folded_to: tuple[str, str] | None = None
        self._listed_to = self._kept_to = ""
        self._gates_rest_until = 0.0
        self._tidier = Tidier(alias)
        self._round_at = self._success_at = time.monotonic()
        self._steps = self._all_steps()

    def _all_steps(self) -> tuple[Step, ...]:
        alias = self.alias
        return (
            Step("cron entries of code", WHEN_SEEN, self._read_crontab),
            Step("cron", WHEN_SEEN, self._take_ticks),
            Step("cron outcomes", 300.0, lambda: ticks.note_ends(using=alias)),
            Step("cron history", 600.0, lambda: ticks.forget_old(using=alias)),
            Step("reservations", WHEN_SEEN, self._reap),
            Step("workers", WHEN_SEEN, self._lose),
            Step("vanished workers", 10.0, self._lose_vanished),
            Step("unseen workers", 60.0, self._forget),
            Step("expired jobs", WHEN_SEEN, self._expire),
            Step("limits of code", WHEN_SEEN, self._read_limits),
            Step("gates", WHEN_SEEN, self._open_gates),
            Step("gates not passed", 60.0, self._give_back_unpassed),
            Step("gates' counts", 10.0, self._look_after_gates),
            Step("gates of keys", 600.0, lambda: gates.forget_idle(using=alias) == gates.CHUNK),
            Step("locks", WHEN_SEEN, self._lapse),
            Step("locks not taken", 60.0, self._give_back_stranded),
            Step("blocked jobs", 60.0, self._look_after_blocked),
            Step("jobs without keys", 3600.0, self._give_keys),
            Step("dead rows", 10.0, self._tidy),
            Step("purge", 60.0, self._purge),
            Step("tracking", 60.0, self._purge_tracking),
            Step("batches", 60.0, self._look_after_batches),
            Step("measures", 600.0, self._purge_measures),
            Step("totals of tasks", 600.0, self._fold_measures),
            Step("queues in use", 600.0, self._list_queues),
            Step("unused queues", 600.0, self._forget_queues),
            Step("counters", 600.0, lambda: counters.fold(using=alias) == counters.CHUNK),
        )

    def run(self) -> None:
        """Loop until `stop`; a database that is away is waited for, an error in one step stops no other."""
        deadlines.allow_this_thread(LONGEST_STEP_S)
        while not self._stopping.is_set():
            sleep_s = self._round()
            if not self._stopping.is_set():
                self._alarm.wait(sleep_s)
        connections[self.alias].close()

    def _round(self) -> float:
        """Look, and take the steps that are due; returns how long to sleep then."""
        self._seen.clear()
        self._awake_at = math.inf  # what is scheduled while it looks is looked for again
        self._alarm.clear()
        found_s = self._guarded("due jobs", self._enqueue_due, None)
        if found_s is not None:
            self._success_at = time.monotonic()
        self._listens_since = math.inf if found_s is None else min(self._listens_since, time.monotonic())
        sleep_s = LONGEST_SLEEP_S if found_s is None else found_s
        for step in self._steps:
            is_due = step.name in self._seen or time.monotonic() >= self._due_at.get(step.name, 0.0)
            if is_due and not self._stopping.is_set():
                more = self._guarded(step.name, step.work, None)
                pause_s = min(step.every_s, AFTER_FAILURE_S) if more is None else 0 if more else step.every_s
                self._due_at[step.name] = time.monotonic() + pause_s
                sleep_s = 0 if more else sleep_s
        self._round_at = time.monotonic()
        self._awake_at = self._round_at + sleep_s
        return sleep_s

    def since_round_s(self) -> float:
        """How long ago the loop went round, whatever came of it. From any thread."""
        return time.monotonic() - self._round_at

    def since_success_s(self) -> float:
        """How long ago its look at the database succeeded. From any thread."""
        return time.monotonic() - self._success_at

    def stop(self) -> None:
        """Ask the loop to end after the step at hand; from any thread or a signal handler."""
        self._stopping.set()
        self._alarm.set()

    def expect(self, at: datetime) -> None:
        """A job was stored that is due then: sleep no longer than that. From any thread; its clock is good enough."""
        if time.monotonic() + (at - datetime.now(UTC)).total_seconds() < self._awake_at:
            self._alarm.set()

    def run_once(self) -> None:
        """Every step once, until nothing is left to do: for commands and tests. As if it had listened all the time."""
        self._listens_since = -math.inf
        while self._enqueue_due() <= 0:
            pass
        for step in self._steps:
            while step.work():
                pass

    def _guarded(self, name: str, work: Callable[[], R], otherwise: D) -> R | D:
        try:
            return work()
        except BrokerUnavailable as error:
            logger.warning("maintenance waits for the database step=%s error=%s", name, error)
        except Exception:  # a loop: says what happened, and goes on
            logger.exception("maintenance step failed step=%s", name)
            connections[self.alias].close()
        return otherwise

    def _enqueue_due(self) -> float:
        """Enqueue what is due, set by set; returns how long there is nothing to do, in seconds."""
        wait_s, sleep_s = self._look()
        if wait_s is None or wait_s > 0:
            self._hear_of_others(wait_s)
            return sleep_s if wait_s is None else min(wait_s, sleep_s)
        queues = upkeep.enqueue_due(using=self.alias)
        if queues:
            self._next_due_at = None
            wakeups.announce(self.alias, queues)
            self._on_work(queues)
            return 0
        self._next_due_at = time.monotonic()
        return LOOK_AGAIN_S

    def _look(self) -> tuple[float | None, float]:
        """How long until the next job is due, and how long to sleep where none is; now and then also what else there is
        to do."""
        looks_around = time.monotonic() >= self._look_around_at
        found = looking.look(using=self.alias, worker_timeout_s=conf.get("WORKER_TIMEOUT") if looks_around else None)
        if looks_around:
            self._look_around_at = time.monotonic() + LOOK_AROUND_S
        tick_in_s = math.inf if found.tick_in_s is None else found.tick_in_s
        opens_in_s = math.inf if found.opens_in_s is None else found.opens_in_s
        saw = {
            "locks": found.lapsed,
            "reservations": found.over,
            "workers": found.silent,
            "expired jobs": found.expired,
            "cron": tick_in_s <= 0,
            "gates": opens_in_s <= 0,
        }
        self._seen.update(name for name, is_seen in saw.items() if is_seen)
        # A tick that is due and cannot be taken is with another node, for the length of a transaction.
        return found.due_in_s, min(max(min(tick_in_s, opens_in_s), LOOK_AGAIN_S), LONGEST_SLEEP_S)

    def _hear_of_others(self, wait_s: float | None) -> None:
        """What should be due by now and is gone, another node has enqueued: its hint may not come here."""
        now = time.monotonic()
        if self._next_due_at is not None and self._next_due_at <= now:
            self._on_work(None)
        self._next_due_at = None if wait_s is None else now + wait_s

    def _read_crontab(self) -> bool:
        crontab.sync(using=self.alias)
        return False

    def _take_ticks(self) -> bool:
        """Enqueue the jobs of entries that are due. What it scheduled, or left over, the next look sees."""
        queues = ticks.take_due(crontab.enqueue, using=self.alias)
        if queues:
            wakeups.announce(self.alias, queues)
            self._on_work(queues)
        return False

    def _reap(self) -> bool:
        may_judge = self._has_listened()
        dead_for_s = conf.get("DEAD_TTL")
        return failures.reap(using=self.alias, dead_for_s=dead_for_s, spares_kept=not may_judge) == failures.CHUNK

    def _lose(self) -> bool:
        if not self._has_listened():
            return False
        return self._give_up(workers.silent(conf.get("WORKER_TIMEOUT"), using=self.alias))

    def _has_listened(self) -> bool:
        """Whether each worker and server that lives has had the time to say so since the database is there."""
        listen_s: float = min(conf.get("WORKER_TIMEOUT"), HEARD_WITHIN_S)
        return time.monotonic() - self._listens_since >= listen_s

    def _lose_vanished(self) -> bool:
        return self._give_up(workers.vanished(VANISHED_S, using=self.alias))

    def _give_up(self, wids: list[str]) -> bool:
        if wids:
            jobs = failures.lose(wids, using=self.alias, dead_for_s=conf.get("DEAD_TTL"))
            logger.warning("workers lost wids=%s jobs=%d", ",".join(wids), jobs)
            self._on_lost(wids)
            if jobs:
                wakeups.announce(self.alias, {ANY_QUEUE})
                self._on_work(None)
        return False

    def _lapse(self) -> bool:
        lapsed = locks.lapse(using=self.alias)
        if lapsed:
            self._on_work(None)
        return lapsed == locks.CHUNK

    def _read_limits(self) -> bool:
        limiting.sync(using=self.alias)
        return False

    def _open_gates(self) -> bool:
        """Let the next sets of jobs go that wait for their rate. What comes after them, the next look sees."""
        self._tell(gates.open_due(using=self.alias))
        return False

    def _look_after_gates(self) -> bool:
        """Where none is in use, now and then: an idle node sends few statements."""
        if time.monotonic() >= self._gates_rest_until and gates.sweep(using=self.alias) is None:
            self._gates_rest_until = time.monotonic() + IDLE_GATES_S
        return False

    def _give_back_unpassed(self) -> bool:
        stranded = gates.stranded(VANISHED_S, using=self.alias)
        if stranded and giving_back.release(stranded, using=self.alias):
            logger.warning("jobs were claimed and have not passed their gates, given back jobs=%d", len(stranded))
            self._tell({job.queue for job in stranded})
        return len(stranded) == gates.CHUNK

    def _tell(self, queues: set[str]) -> None:
        if queues:
            wakeups.announce(self.alias, queues)
            self._on_work(queues)

    def _give_back_stranded(self) -> bool:
        stranded = locks.stranded(VANISHED_S, using=self.alias)
        if stranded and giving_back.release(stranded, using=self.alias):
            logger.warning("jobs were claimed and their locks never taken, given back jobs=%d", len(stranded))
            wakeups.announce(self.alias, {job.queue for job in stranded})
            self._on_work(None)
        return len(stranded) == locks.CHUNK

    def _look_after_blocked(self) -> bool:
        """A bounded number of jobs each time: where more are blocked, the next time goes on."""
        healed, self._swept_to = locks.sweep(using=self.alias, after=self._swept_to)
        if healed:
            logger.warning("keys had blocked jobs and none was ready, the next job of each is now keys=%d", healed)
            self._on_work(None)
        return False

    def _give_keys(self) -> bool:
        """Give keys to jobs that were pushed before their queue was locketed: all that wait are looked through."""
        locket = configured_locket()
        if not locket.is_enabled or (locket.queues is not None and not locket.queues):
            return False
        self._keyless_after = backfill.give_keys(
            locket.keyed, locket.queues, using=self.alias, after=self._keyless_after
        )
        return self._keyless_after is not None

    def _look_after_batches(self) -> bool:
        """Give up those never committed, let go of those long ended, and make sure that none waits for nothing."""
        expired = batches.expire(using=self.alias)
        purged = batches.purge(using=self.alias, kept_for_s=conf.get("BATCH_TTL"))
        healed = batches.sweep(using=self.alias)
        if healed:
            logger.error("batches had steps due that nobody took, they are taken now batches=%d", healed)
        return batches.CHUNK in (expired, purged)

    def _forget(self) -> bool:
        workers.forget_unseen(FORGET_UNSEEN_S, using=self.alias)
        return False

    def _expire(self) -> bool:
        dropped = 0
        while count := upkeep.expire(using=self.alias):
            dropped += count
            if count < upkeep.CHUNK or self._stopping.is_set():
                break
        if dropped:
            logger.info("jobs expired before a worker took them jobs=%d", dropped)
        return False

    def _tidy(self) -> bool:
        self._tidier.look()
        return False

    def _purge(self) -> bool:
        return upkeep.purge(using=self.alias) == upkeep.CHUNK

    def _purge_measures(self) -> bool:
        return measures.purge(using=self.alias, kept_for_s=conf.get("METRICS_TTL")) == measures.CHUNK

    def _fold_measures(self) -> bool:
        """All rows of totals, a bounded number at a time."""
        self._folded_to = measures.fold_unused(using=self.alias, after=self._folded_to)
        return self._folded_to is not None

    def _list_queues(self) -> bool:
        """Add rows of queues that jobs wait in: one that was not pushed to it, such as a callback, adds none."""
        names = queues.names_in_use(using=self.alias, after=self._listed_to)
        queues.add(names, using=self.alias)
        self._listed_to = names[-1] if len(names) == queues.NAMES_AT_ONCE else ""
        return bool(self._listed_to)

    def _forget_queues(self) -> bool:
        count, self._kept_to = queues.forget_unused(using=self.alias, after=self._kept_to)
        if count:
            logger.info("forgot queues that were not used queues=%d", count)
        return bool(self._kept_to)

    def _purge_tracking(self) -> bool:
        return tracking.purge_tracking(using=self.alias) == tracking.CHUNK
