"""Specify the store in plain lists and dicts: one thread, no SQL, an explicit clock. Sources: W9 to W27.

It does not import `lifecycle`, on purpose. It leaves open which of several jobs of one lock key is ready, and reads
that from the rows; the machine checks that one of them is.
"""

from dataclasses import dataclass, field

from tests.store.model.plain_batches import DONE, DROPPED, EXECUTED, Member, PlainBatch

RESERVED_S, KEPT_S, UNIQUE_S, EXPIRES_S, SCHEDULED_S, RETRY_S, LEASE_S = 65, 105, 45, 55, 25, 25, 35
COMMIT_WITHIN_S, DEAD_S, DISCARDED_S, BATCH_KEPT_S = 1805, 180 * 86_400 + 5, 86_400, 7 * 86_400 + 5
"""Durations in seconds. The clock moves by multiples of ten, so that no duration ends exactly at a move."""

NARROW, ROOM = "narrow", 2
"""A queue with a limit, and the limit."""

LIVE = {"scheduled", "ready", "working", "retries"}


@dataclass(frozen=True)
class Spec:
    """The description of a job to push."""

    jid: str
    queue: str = "wide"
    priority: int = 5
    retry: int = 25
    is_kept: bool = False
    is_later: bool = False
    lock: str = ""
    unique: str = ""
    until_start: bool = False
    expires: bool = False
    bid: str = ""

    @property
    def has_options(self):
        return bool(self.lock or self.unique or self.expires or self.bid)


@dataclass
class Lock:
    """The lock of one key."""

    wid: str
    ends_at: int
    is_lapsed: bool = False


@dataclass
class PlainJob:
    """A row. The state "ready" means enqueued or blocked in the table."""

    spec: Spec
    state: str
    place: tuple[int, int] = (0, 0)
    """Position at which it entered its queue; the row's id settles ties."""
    row: int = 0
    is_blocked: bool = False
    due_at: int | None = None
    expires_at: int | None = None
    purge_at: int | None = None
    reserved_until: int | None = None
    unique: tuple[str, str] | None = None
    unique_ends_at: int = 0
    wid: str = ""
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    steps: set[str] = field(default_factory=set)
    """Names of the steps that its runs have committed."""
    has_progressed: bool = False
    """True if the current run has committed a step: earlier failures and losses no longer count when it ends."""
    lock: Lock | None = None
    has_pass: bool = False
    member: Member | None = None
    batch: PlainBatch | None = None
    callback: tuple[PlainBatch, str] | None = None
    """The batch that it is a callback of, and the kind of callback."""

    @property
    def belongs(self):
        return self.batch is not None or self.callback is not None

    @property
    def needs_more(self):
        """True if its end can make other jobs ready."""
        return self.belongs or self.lock is not None or self.has_pass


@dataclass
class Plain:
    """The whole store: jobs, batches, locks, queues, workers and counters."""

    now: int = 0
    step: int = 0
    jobs: dict[str, PlainJob] = field(default_factory=dict)
    batches: dict[str, PlainBatch] = field(default_factory=dict)
    locks: dict[str, Lock] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    quiet: set[str] = field(default_factory=set)
    processed: int = 0
    failed: int = 0
    late: int = 0
    fired: list[tuple[PlainBatch, str]] = field(default_factory=list)

    # --- push ---

    def push(self, specs, by=""):
        """Return "" or the name of the error for each job."""
        distinct = list({spec.jid: spec for spec in reversed(specs)}.values())[::-1]
        if any(spec.has_options for spec in distinct):
            self._free_overdue({(spec.queue, spec.unique) for spec in distinct if spec.unique})
        holders = {job.unique: jid for jid, job in self.jobs.items() if job.unique}
        fresh = [spec for spec in distinct if not self._stays(spec.jid)]
        refused = {spec.jid: why for spec in fresh if spec.bid and (why := self.refusal(spec.bid, by))}
        for spec in fresh:
            key = (spec.queue, spec.unique)
            if spec.jid not in refused and spec.unique and holders.setdefault(key, spec.jid) != spec.jid:
                refused[spec.jid] = "NotUnique"
            if spec.jid not in refused:
                self._store(spec)
        self._settle()
        return [refused.get(spec.jid, "") for spec in specs]

    def _stays(self, jid):
        job = self.jobs.get(jid)
        return job is not None and (job.state in LIVE or (job.state == "dead" and job.belongs))

    def _free_overdue(self, keys):
        for job in self.jobs.values():
            if job.unique in keys and job.unique_ends_at <= self.now:
                job.unique = None

    def _store(self, spec):
        begins = self.now + (SCHEDULED_S if spec.is_later else 0)
        batch = self.batches[spec.bid] if spec.bid else None
        job = PlainJob(
            spec,
            "scheduled" if spec.is_later else "ready",
            place=self._next_place(),
            due_at=begins if spec.is_later else None,
            expires_at=begins + EXPIRES_S if spec.expires else None,
            unique=(spec.queue, spec.unique) if spec.unique else None,
            unique_ends_at=begins + UNIQUE_S,
            batch=batch,
        )
        if batch:
            if batch.complete_st:
                batch.reopen()
            job.member = Member()
            batch.members.append(job.member)
        self.jobs[spec.jid] = job

    def _next_place(self):
        self.step += 1
        return (self.step, 0)

    # --- fetch ---

    def fetch(self, queues, wid, count):
        """Return the jids that this worker claims, in their order."""
        found = []
        for queue in () if wid in self.quiet else dict.fromkeys(queues):
            for job in [] if queue in self.paused else self.waiting(queue):
                if len(found) == count or (queue == NARROW and self.permits() >= ROOM):
                    break
                if self._claim(job, wid):
                    found.append(job.spec.jid)
        return found

    def waiting(self, queue):
        """Return the jobs of a queue that can be claimed, in their order."""
        ready = [job for job in self.jobs.values() if job.spec.queue == queue and job.state == "ready"]
        return sorted(
            (job for job in ready if not job.is_blocked),
            key=lambda job: (-job.spec.priority, job.place[0], job.row),
        )

    def permits(self):
        """Return the number of permits in use in the narrow queue."""
        return sum(job.has_pass for job in self.jobs.values())

    def _claim(self, job, wid):
        key = job.spec.lock
        if key:
            if key in self.locks and self.locks[key].ends_at > self.now:
                return False
            job.lock = self.locks[key] = Lock(wid, self.now + LEASE_S)
        job.state, job.wid = "working", wid
        job.reserved_until, job.due_at = self.now + RESERVED_S, None
        job.has_progressed = False
        job.has_pass = job.spec.queue == NARROW
        if job.spec.until_start:
            job.unique = None
        return True

    def record_step(self, jid, wid, attempt, name):
        """Record a step of the current run; return False if the sender does not hold the job."""
        job = self.jobs[jid]
        if job.state != "working" or (wid, attempt) != (job.wid, job.attempt):
            return False
        job.steps.add(name)
        job.has_progressed = True
        return True

    # --- ends ---

    def is_held(self, jid, wid, attempt):
        """Return True if a report of this sender has effect (W16)."""
        job = self.jobs.get(jid)
        if job is None or job.state != "working":
            return False
        return (not wid or not job.wid or wid == job.wid) and attempt in (None, job.attempt)

    def ack(self, jid, wid, attempt):
        if not self.is_held(jid, wid, attempt):
            self.late += 1
            return False
        job = self._release(jid)
        self.processed += 1
        self._end(job, "succeeded" if job.spec.is_kept else "", KEPT_S, is_good=True)
        return True

    def fail(self, jid, wid, attempt, verdict, *, has_wish):
        if jid not in self.jobs:
            return "JobNotFound"
        if not self.is_held(jid, wid, attempt):
            self.late += 1
            return False
        if verdict == "later":
            job = self._release(jid)
            job.state, job.due_at = "scheduled", self.now + RETRY_S
        else:
            self._fail(jid, verdict, has_wish=has_wish)
        return True

    def _fail(self, jid, verdict="", *, has_wish=False):
        job = self._release(jid)
        self._count_anew(job)
        retry = job.spec.retry
        self.processed += 1
        self.failed += 1
        if verdict == "kill" or (not verdict and (retry < 0 or (retry and job.failures >= retry))):
            to = "dead"
        elif verdict == "discard":
            to = "discarded" if job.spec.is_kept else ""
        elif retry == 0:
            to = "dead" if job.spec.is_kept else ""
        else:
            to = "retries"
        job.failures += 1
        if to == "retries":
            job.state, job.due_at = to, self.now + RETRY_S if has_wish else None
            self._count(job, to)
            self._settle()
        else:
            self._end(job, to, DEAD_S if to == "dead" else KEPT_S)

    def _release(self, jid):
        """End the run of a job: release its lock, permit and reservation."""
        job = self.jobs[jid]
        if job.lock and self.locks.get(job.spec.lock) is job.lock:
            del self.locks[job.spec.lock]
        job.lock, job.has_pass, job.reserved_until = None, False, None
        return job

    def _count_anew(self, job):
        if job.has_progressed:
            job.failures = job.losses = 0

    def _end(self, job, to, kept_s, *, is_good=False):
        """End a job finally, or until it is requeued."""
        job.due_at = None
        if to:
            job.state, job.purge_at = to, self.now + kept_s
        else:
            del self.jobs[job.spec.jid]
        if to != "dead":
            job.unique = None
        self._count(job, to, is_good=is_good)
        self._settle()

    # --- events of workers ---

    def give_back(self, jids):
        for jid in jids:
            job = self._release(jid)
            job.state, job.wid = "ready", ""

    def interrupt(self, jids):
        self.give_back(jids)
        for jid in jids:
            self._count_anew(self.jobs[jid])
            self.jobs[jid].expires_at = None  # it started before it expired

    def park(self, jids):
        for jid in jids:
            job = self._release(jid)
            self._count_anew(job)
            job.state, job.due_at, job.expires_at = "scheduled", self.now + RETRY_S, None

    def held_by(self, wid):
        return [jid for jid, job in self.jobs.items() if job.state == "working" and job.wid == wid]

    def reclaim_lost(self, wid):
        self.known.discard(wid)
        self.quiet.discard(wid)
        for jid in self.held_by(wid):
            job = self._release(jid)
            self._count_anew(job)
            job.losses += 1
            if job.losses >= 3:
                self.processed += 1
                self.failed += 1
                self._end(job, "dead", DEAD_S)
            else:
                job.state, job.wid = "ready", ""

    def beat(self, wid):
        if wid not in self.known:
            return "UnknownWorker"
        for lock in self.locks.values():
            if lock.wid == wid:
                lock.ends_at, lock.is_lapsed = self.now + LEASE_S, False
        return "quiet" if wid in self.quiet else ""

    # --- actions of operators ---

    def requeue(self, jid):
        job = self.jobs[jid]
        if job.state not in ("scheduled", "retries", "dead"):
            return 0
        job.state, job.place, job.due_at, job.purge_at = "ready", self._next_place(), None, None
        return 1

    def restart(self, jid):
        """Requeue a job without its steps."""
        if changed := self.requeue(jid):
            self.jobs[jid].steps.clear()
        return changed

    def kill(self, jid):
        job = self.jobs[jid]
        if job.state not in ("scheduled", "ready", "retries", "dead"):
            return 0
        self._end(job, "dead", DEAD_S)
        return 1

    def discard(self, jid):
        job = self.jobs[jid]
        if job.state not in ("scheduled", "ready", "retries", "dead"):
            return 0
        self._end(job, "discarded" if job.spec.is_kept else "", DISCARDED_S)
        return 1

    # --- effects of time ---

    def upkeep(self):
        """Apply what is due, in the order in which the machine calls the store."""
        for lock in self.locks.values():
            lock.is_lapsed = lock.is_lapsed or lock.ends_at <= self.now
        self._each("working", lambda job: job.reserved_until, lambda job: self._fail(job.spec.jid))
        (place, _) = self._next_place()
        for state in ("scheduled", "retries"):
            self._each(state, lambda job: job.due_at, lambda job: self._becomes_due(job, place))
        for state in ("scheduled", "ready", "retries"):
            self._each(state, lambda job: job.expires_at, self._expires)
        for batch in self.batches.values():
            if batch.ends_at is not None and batch.ends_at <= self.now:
                batch.ends_at, batch.is_expired, batch.is_broken = None, True, True
        self._settle()
        for batch in self.batches.values():
            batch.touch(self.now)
        self._settle()
        for state in ("dead", "succeeded", "discarded", "expired"):
            self._each(state, lambda job: job.purge_at, self._purged)
        for batch in [one for one in self.batches.values() if one.over_at is not None]:
            if batch.over_at + BATCH_KEPT_S <= self.now:
                batch.is_forgotten = True
                del self.batches[batch.bid]

    def _each(self, state, when, then):
        for job in [one for one in self.jobs.values() if one.state == state]:
            if (moment := when(job)) is not None and moment <= self.now:
                then(job)

    def _becomes_due(self, job, place):
        job.state, job.due_at, job.wid, job.place = "ready", None, "", (place, 0)

    def _expires(self, job):
        self._end(job, "expired" if job.spec.is_kept else "", KEPT_S)

    def _purged(self, job):
        was_dead = job.state == "dead"
        del self.jobs[job.spec.jid]
        if was_dead:
            self._count(job, "")
            self._settle()

    # --- batches ---

    def new(self, bid, *, parent, complete, success, by):
        """Return "", or the name of the error."""
        if parent and (why := self.refusal(parent, by)):
            return why
        above = self.batches[parent] if parent else None
        if above and above.complete_st:
            above.reopen()
        made = PlainBatch(bid, above, complete, success, self.now + COMMIT_WITHIN_S)
        self.batches[bid] = made
        if above:
            above.children.append(made)
        return ""

    def refusal(self, bid, by):
        """Return why this worker, or every sender, may not add to a batch (B9)."""
        batch = self.batches.get(bid)
        if batch is None:
            return "UnknownBatch"
        is_open = not batch.is_committed or batch.reopened_until is not None
        is_closed = batch.is_expired or batch.has_fired or not (is_open or self._is_inside(batch, by))
        return "BatchClosed" if is_closed or any(one.has_fired for one in batch.ancestors()) else ""

    def _is_inside(self, batch, by):
        working = [job for job in self.jobs.values() if job.state == "working" and (not by or job.wid == by)]
        return any(
            job.batch is batch or (job.callback is not None and job.callback[0].descends_from(batch)) for job in working
        )

    def open(self, bid, by):
        """Return "", or the name of the error."""
        why, batch = self.refusal(bid, by), self.batches[bid]
        if not why and batch.is_committed and batch.reopened_until is None:
            if batch.complete_st:
                batch.reopen()
            batch.reopened_until = self.now + COMMIT_WITHIN_S
        return why

    def commit(self, bid):
        batch = self.batches[bid]
        if batch.is_expired and not batch.is_committed:
            return "BatchClosed"
        batch.is_committed, batch.ends_at, batch.reopened_until = True, None, None
        self._settle()
        return ""

    def _count(self, job, to, *, is_good=False):
        """Record the outcome of a job in its batch."""
        for batch in filter(None, (job.batch, job.callback and job.callback[0])):
            batch.touch(self.now)
        if job.member and not job.member.is_settled:
            if is_good or to in ("", "discarded", "expired"):
                job.member.way, job.member.is_failed = DONE if is_good else DROPPED, False
                job.batch.is_broken |= not is_good
            elif to in ("retries", "dead"):
                job.member.way, job.member.is_failed = EXECUTED, True
        if job.callback:
            batch, kind = job.callback
            if is_good:
                setattr(batch, f"{kind}_st", "2")
                batch.given_up.discard(kind)
            elif to != "retries":
                batch.given_up.add(kind)
                batch.is_broken |= to != "dead"

    def _settle(self):
        while any(batch.settle(self.now, self._fire) for batch in list(self.batches.values())):
            pass  # one step at a time is enough: the loop ends when no batch has a step to take

    def _fire(self, batch, kind):
        jid = getattr(batch, kind)
        self.fired.append((batch, kind))
        self.jobs[jid] = PlainJob(Spec(jid), "ready", place=self._next_place(), callback=(batch, kind))
