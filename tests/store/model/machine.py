"""Call any verb of the store at any time, and compare the store with its model after each call.

Time passes by moving all stored times into the past, so that verbs are called as in production, without `now`.
"""

from datetime import timedelta
from random import Random

import msgspec
from django.db import connection, transaction
from django.db.models import DateTimeField, F
from django.utils import timezone
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from django_faktory.core.job_parser import parse_job
from django_faktory.core.json import jsontext
from django_faktory.core.lifecycle import ENDED
from django_faktory.core.limits import Allowance
from django_faktory.core.payloads import (
    Ack,
    Beat,
    FetchRequest,
    Interruption,
    NewBatch,
    Reservation,
    WorkerIdentity,
    failure,
    rfc3339,
)
from django_faktory.core.steps import Parking, StepRecord
from django_faktory.errors import BatchClosed, FaktoryError, ReservationLost
from django_faktory.models import Batch, Job, JobLock, JobStep, Limiter, WorkerProcess
from django_faktory.store import queues, workers
from django_faktory.store.batches import batches
from django_faktory.store.jobs import failures, releases, steps
from django_faktory.store.jobs.acknowledgements import ack
from django_faktory.store.jobs.claims import fetch
from django_faktory.store.jobs.exchanges import exchange
from django_faktory.store.jobs.pushes import push
from django_faktory.store.limits import definitions, limiters
from django_faktory.store.locks import locks
from django_faktory.store.maintenance import due
from django_faktory.store.statistics import counts, deltas
from django_faktory.store.store import Store
from tests import emptying
from tests.store import by_ids
from tests.store.model import plain
from tests.store.model.plain import NARROW, Plain, Spec

USING = {"using": "default"}
QUEUES = ("wide", NARROW, "other")
WIDS = ("w1", "w2")
SENDERS = (*WIDS, "")
JOB = (
    "pk", "jid", "state", "queue", "sort_priority", "attempt", "failures", "losses", "unique_key", "wid", "run_at",
    "lock_key", "lock_token", "permits", "bid", "callback_of",
)  # fmt: skip
BATCH = (
    "bid", "total", "pending", "unrun", "failed", "complete_st", "success_st", "is_broken", "finished_at"
)  # fmt: skip

picks = st.integers(0, 1000)
flags = st.booleans()
seldom = st.sampled_from([False, False, False, True])
specs = st.builds(
    Spec,
    jid=st.just(""),
    queue=st.sampled_from(QUEUES),
    priority=st.sampled_from([1, 5, 5, 9]),
    retry=st.sampled_from([25, 25, 1, 0, -1]),
    is_kept=flags,
    is_later=seldom,
    lock=st.sampled_from(["", "", "k1", "k2"]),
    unique=st.sampled_from(["", "", "u"]),
    until_start=flags,
    expires=seldom,
)
senders = st.sampled_from(["holder", "holder", "holder", "unnamed", "stranger", "stale"])
orders = st.permutations(QUEUES)


class StoreComparedWithModel(RuleBasedStateMachine):
    """Run the rules on the store and on the model. `steps` counts the rules that ran, in all examples together."""

    steps = 0

    @initialize()
    def begin(self):
        emptying.empty(connection)
        definitions.save_limit("queue", NARROW, Allowance(concurrency=plain.ROOM), **USING)
        self.model = Plain()
        self.made = 0
        self.attempts = {}
        self.replaced = set()
        self.have_fired = set()
        rng = Random(0)  # hypothesis cannot draw its values a second time
        self.store = Store(rng=rng, dead_for_s=plain.DEAD_S, commit_within_s=plain.COMMIT_WITHIN_S)
        for wid in WIDS:
            self._hello(wid)

    # --- producers ---

    @rule(pushed=st.lists(specs, min_size=1, max_size=3), by=st.sampled_from(SENDERS), pick=picks, joins=flags)
    def push(self, pushed, by, pick, joins):
        pushed = [self._named(spec, pick if joins else None) for spec in pushed]
        assert self._push(pushed, by) == self.model.push(pushed, by)

    @precondition(lambda self: self.model.jobs)
    @rule(spec=specs, pick=picks)
    def push_a_jid_again(self, spec, pick):
        """Push a jid that exists already (W10)."""
        again = self._replaced(spec, jid=self._job(pick).spec.jid)
        assert self._push([again], "") == self.model.push([again])

    def _push(self, pushed, by):
        answers = [_name(answer) for answer in push(self.store, [_payload(spec, by) for spec in pushed])]
        again = [spec.jid for spec, answer in zip(pushed, answers, strict=True) if not answer]
        # The model forgets an ended job that is pushed again; the store keeps it until its retention is over.
        self.replaced.update(Job.objects.in_state(*ENDED).filter(jid__in=again).values_list("pk", flat=True))
        return answers

    def _named(self, spec, pick):
        self.made += 1
        bids = list(self.model.batches)
        return self._replaced(spec, jid=f"job-{self.made:06d}", bid=bids[pick % len(bids)] if bids and pick else "")

    def _replaced(self, spec, **changes):
        return Spec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__} | changes)

    # --- workers ---

    @rule(order=orders, most=st.integers(1, 3), wid=st.sampled_from(SENDERS), count=st.integers(1, 3))
    def fetch(self, order, most, wid, count):
        """Compare the claimed jobs and their order (W13)."""
        [found] = fetch(self.store, [FetchRequest(queues=tuple(order[:most]), wid=wid, count=count)])
        assert [job.jid for job in found] == self.model.fetch(order[:most], wid, count)
        self._adopt_attempts(found)

    @precondition(lambda self: self._working())
    @rule(pick=picks, sender=senders, twice=flags)
    def ack(self, pick, sender, twice):
        """Acknowledge a running job, as its holder or as another sender (W16)."""
        jid, wid, attempt = self._report(pick, sender)
        ends = [Ack(jid=jid, wid=wid, attempt=attempt)] * (1 + twice)
        assert ack(self.store, ends) == [self.model.ack(jid, wid, attempt) for _ in ends]

    @rule(pick=picks)
    def ack_a_job_that_does_not_run(self, pick):
        """Acknowledge an ended or unknown job: no job changes, and the report is counted."""
        idle = sorted(jid for jid, job in self.model.jobs.items() if job.state != "working")
        jid = ["job-unknown", *idle][pick % (1 + len(idle))]
        assert ack(self.store, [Ack(jid=jid, wid="w1")]) == [self.model.ack(jid, "w1", None)]

    @precondition(lambda self: self._working())
    @rule(pick=picks, sender=senders, verdict=st.sampled_from(["", "", "kill", "discard", "later"]), has_wish=flags)
    def fail(self, pick, sender, verdict, has_wish):
        """Fail a running job, as its holder or as another sender (W17, W18)."""
        jid, wid, attempt = self._report(pick, sender)
        wish = plain.RETRY_S if has_wish or verdict == "later" else None
        has_progressed = self.model.jobs[jid].has_progressed
        report = failure(
            jid=jid, wid=wid, attempt=attempt, verdict=verdict, retry_in_s=wish, has_progressed=has_progressed
        )
        [answer] = failures.fail(self.store, [report])
        expected = self.model.fail(jid, wid, attempt, verdict, has_wish=has_wish)
        assert (answer if isinstance(answer, bool) else _name(answer)) == expected

    @precondition(lambda self: self._working())
    @rule(pick=picks, sender=senders, name=st.sampled_from("abc"))
    def step(self, pick, sender, name):
        """Commit a step of a running job, as its holder or as another sender."""
        jid, wid, attempt = self._report(pick, sender)
        held = Reservation(jid=jid, queue="", text="", wid=wid, attempt=attempt or 0)
        if sender == "holder":
            assert {found for found, _ in steps.read_steps(self.store, held)} == self.model.jobs[jid].steps
            if name in self.model.jobs[jid].steps:
                return
        try:
            with transaction.atomic():
                steps.record_step(self.store, held, StepRecord(name=name))
            answer = True
        except ReservationLost:
            answer = False
        assert answer == self.model.record_step(jid, wid, attempt, name)

    @rule(pick=picks)
    def fail_an_unknown_job(self, pick):
        [answer] = failures.fail(self.store, [failure(jid=f"unknown-{pick}")])
        assert _name(answer) == "JobNotFound"

    @precondition(lambda self: self._working())
    @rule(pick=picks)
    def give_back(self, pick):
        """Release a job, which keeps its old place (W14)."""
        job = self._running(pick)
        row = Job.live.get(jid=job.spec.jid)
        reservation = Reservation(
            jid=row.jid, queue=row.queue, text="", wid=row.wid, attempt=row.attempt, lock_key=row.lock_key,
            lock_token=row.lock_token, permits=row.permits,
        )  # fmt: skip
        assert releases.release(self.store, [reservation]) == 1
        self.model.give_back([row.jid])

    @precondition(lambda self: self._working())
    @rule(order=orders, wid=st.sampled_from(WIDS), count=st.integers(0, 2), spec=specs, pick=picks, sender=senders)
    def ack_push_and_fetch_in_one(self, order, wid, count, spec, pick, sender):
        """Run a whole exchange of the server: its pending ends, pushes and fetches are one transaction."""
        spec = self._named(spec, None)
        jid, by, attempt = self._report(pick, sender)
        # jobs that its end makes ready may be claimed in this exchange or in the next
        if self.model.jobs[jid].needs_more:
            count = 0
        requests = [FetchRequest(queues=tuple(order), wid=wid, count=count)] if count else []
        done = exchange(self.store, [_payload(spec, "")], [Ack(jid=jid, wid=by, attempt=attempt)], requests)
        assert done.acked == [self.model.ack(jid, by, attempt)]
        assert [_name(answer) for answer in done.pushed] == self.model.push([spec])
        expected = [self.model.fetch(order, wid, count)] if count else []
        assert [[job.jid for job in found] for found in done.fetched] == expected
        self._adopt_attempts(job for found in done.fetched for job in found)

    @rule(wid=st.sampled_from(WIDS))
    def worker_dies(self, wid):
        """Reclaim the jobs of a lost worker (W20)."""
        held = len(self.model.held_by(wid))
        assert failures.reclaim_lost(self.store, [wid]) == held
        self.model.reclaim_lost(wid)

    @rule(wid=st.sampled_from(WIDS))
    def unregister(self, wid):
        held = self.model.held_by(wid)
        workers.unregister(self.store, [wid])
        self.model.interrupt(held)
        self.model.known.discard(wid)
        self.model.quiet.discard(wid)

    @rule(wid=st.sampled_from(WIDS))
    def worker_interrupts(self, wid):
        held = self.model.held_by(wid)
        jobs = [self.model.jobs[jid] for jid in held]
        interruptions = [
            Interruption(jid=jid, wid=wid, attempt=job.attempt, queue=job.spec.queue, message="stopped")
            for jid, job in zip(held, jobs, strict=True)
        ]
        assert failures.interrupt(self.store, interruptions) == [True] * len(held)
        self.model.interrupt(held)

    @rule(wid=st.sampled_from(WIDS))
    def tasks_end_until_later(self, wid):
        held = self.model.held_by(wid)
        jobs = [self.model.jobs[jid] for jid in held]
        parked = [
            Parking(jid=jid, wid=wid, attempt=job.attempt, queue=job.spec.queue, message="", in_s=plain.RETRY_S)
            for jid, job in zip(held, jobs, strict=True)
        ]
        assert failures.interrupt(self.store, parked) == [True] * len(held)
        self.model.park(held)

    @rule(wid=st.sampled_from(WIDS))
    def hello(self, wid):
        self._hello(wid)

    def _hello(self, wid):
        workers.register(self.store, [WorkerIdentity(wid=wid)])
        self.model.known.add(wid)

    @rule(wid=st.sampled_from(WIDS))
    def beat(self, wid):
        """Send BEAT, which also extends the locks of the worker's jobs (W21)."""
        [answer] = workers.beat(self.store, [Beat(wid=wid)])
        assert (answer if isinstance(answer, str) else _name(answer)) == self.model.beat(wid)

    @precondition(lambda self: self.model.known)
    @rule(wid=st.sampled_from(WIDS))
    def quiet(self, wid):
        """Set a known worker to quiet (W15)."""
        workers.advance([wid], "quiet", **USING)
        self.model.quiet |= {wid} & self.model.known

    # --- operators ---

    @precondition(lambda self: self.model.jobs)
    @rule(pick=picks, verb=st.sampled_from(["requeue", "restart", "kill", "discard"]))
    def act(self, pick, verb):
        job = self._job(pick)
        if verb in ("requeue", "restart"):
            self._age_enqueued_jobs()  # SQLite's own clock has milliseconds, and the order must not depend on them
        more = {"dead_for_s": plain.DEAD_S} if verb == "kill" else {}
        changed = getattr(by_ids, verb)([Job.objects.latest_of(job.spec.jid).pk], **USING, **more)
        assert changed == getattr(self.model, verb)(job.spec.jid)
        self._age_enqueued_jobs()

    @rule(queue=st.sampled_from(QUEUES))
    def pause_or_resume(self, queue):
        """Pause a queue, or resume it if it is paused (W24)."""
        if queue in self.model.paused:
            queues.resume(self.store, [queue])
        else:
            queues.pause(self.store, [queue])
        self.model.paused ^= {queue}

    # --- batches ---

    @rule(pick=picks, nested=flags, complete=flags, success=flags, by=st.sampled_from(SENDERS))
    def new_batch(self, pick, nested, complete, success, by):
        bids = list(self.model.batches)
        parent = bids[pick % len(bids)] if nested and bids else ""
        self.made += 1
        jids = [f"{kind}-{self.made:06d}" * wanted for kind, wanted in (("complete", complete), ("success", success))]
        callbacks = [_payload(Spec(jid), "") if jid else None for jid in jids]
        new = NewBatch(parent_bid=parent, complete=callbacks[0], success=callbacks[1])
        try:
            bid, answer = batches.new(self.store, new, caller_wid=by), ""
        except FaktoryError as error:
            bid, answer = "refused", _name(error)
        assert answer == self.model.new(bid, parent=parent, complete=jids[0], success=jids[1], by=by)

    @precondition(lambda self: self.model.batches)
    @rule(pick=picks)
    def commit(self, pick):
        """Commit a batch; a second COMMIT changes nothing (B8)."""
        bid = self._bid(pick)
        try:
            batches.commit(self.store, bid)
            answer = ""
        except BatchClosed as error:
            answer = _name(error)
        assert answer == self.model.commit(bid)

    @precondition(lambda self: self.model.batches)
    @rule(pick=picks, by=st.sampled_from(SENDERS))
    def open_batch(self, pick, by):
        """Open a batch again, or compare the refusal (B9)."""
        bid = self._bid(pick)
        try:
            opened = batches.reopen(self.store, bid, caller_wid=by)
            answer = "" if opened == bid else "another"
        except FaktoryError as error:
            answer = _name(error)
        assert answer == self.model.open(bid, by)

    # --- time and faults ---

    @rule(seconds=st.sampled_from([20, 20, 70, 70, 2000, 700_000, 16_000_000]))
    def time_passes(self, seconds):
        """Move the clock, and run all time-based maintenance: W19, B12, ends of locks, expiry, old rows."""
        self._move_on(timedelta(seconds=seconds))
        self.model.now += seconds
        locks.mark_expired(**USING)
        failures.reap(self.store)
        due.enqueue_due(self.store)
        due.expire(self.store)
        batches.expire(self.store)
        due.purge(self.store)
        batches.purge(self.store, kept_for_s=plain.BATCH_KEPT_S)
        steps.purge(**USING)
        rows = set(Job.objects.values_list("pk", flat=True))
        assert set(JobStep.objects.values_list("job_id", flat=True)) <= rows, "steps are deleted after their job"
        self.model.upkeep()
        self.sweeps_find_nothing_to_repair()

    def teardown(self):
        self.sweeps_find_nothing_to_repair()

    @rule(pushed=st.lists(specs, max_size=2), order=orders, wid=st.sampled_from(WIDS), pick=picks)
    def crash_before_the_commit(self, pushed, order, wid, pick):
        """Check that a transaction that is rolled back has no effect."""
        with transaction.atomic():
            push(self.store, [_payload(self._named(spec, pick), wid) for spec in pushed])
            fetch(self.store, [FetchRequest(queues=tuple(order), wid=wid, count=3)])
            if self._working():
                ack(self.store, [Ack(jid=self._running(pick).spec.jid)])
            transaction.set_rollback(True)

    def _move_on(self, delta):
        for model in (Job, JobStep, Batch, JobLock, Limiter, WorkerProcess):
            moments = [field.name for field in model._meta.fields if isinstance(field, DateTimeField)]
            model.objects.update(**{name: F(name) - delta for name in moments})

    def _age_enqueued_jobs(self):
        Job.objects.update(enqueued_at=F("enqueued_at") - timedelta(seconds=1))

    # --- invariants ---

    @invariant()
    def store_equals_model(self):
        type(self).steps += 1
        stored = Job.objects.exclude(pk__in=self.replaced).values_list(*JOB, named=True)
        rows = {row.jid: row for row in stored}
        assert len(rows) == len(stored), "a jid has one job, beside the ended ones that it had before"
        self._learn_from(rows)
        assert {jid: _fields_of_row(row) for jid, row in rows.items()} == {
            jid: _fields_of_model(job) for jid, job in self.model.jobs.items()
        }
        assert {batch.bid: _status(batch) for batch in Batch.objects.values_list(*BATCH, named=True)} == {
            bid: batch.status() for bid, batch in self.model.batches.items()
        }
        totals = counts.read(using="default").totals
        assert [*totals.values()] == [self.model.processed, self.model.failed, self.model.late]
        assert deltas.recount(using="default") == {}
        self._locks_are_right(rows)
        assert list(Limiter.objects.values_list("in_use", flat=True)) == [self.model.permits()]
        assert self.model.permits() <= plain.ROOM

    @invariant()
    def callbacks_obey_the_rules(self):
        """Check B1 to B7 for each callback at the moment when it is enqueued."""
        for batch, kind in self.model.fired:
            is_first = (batch.bid, kind) not in self.have_fired
            self.have_fired.add((batch.bid, kind))
            assert is_first, f"B1: the {kind} callback of {batch.bid} was enqueued twice"
            assert batch.is_committed, "B2"
            assert batch.reopened_until is None, "B2: it was opened again"
            assert all(member.way for member in batch.members), "B3"
            custom = jsontext.members(Job.objects.latest_of(getattr(batch, kind)).payload)["custom"]
            above = {"_pbid": f'"{batch.parent.bid}"'} if batch.parent else {}
            assert jsontext.members(custom) == {"_bid": f'"{batch.bid}"', "_cb": f'"{kind}"'} | above
            if kind == "success":
                assert batch.complete_st == "2", "B5"
                assert not batch.pending, "B4"
                assert all(child.success_st == "2" for child in batch.children), "B6"
        self.model.fired.clear()

    def sweeps_find_nothing_to_repair(self):
        """Check that sweeps find no work: they repair crashes between two commits, and none happens here."""
        assert not batches.sweep(self.store)
        assert not locks.sweep(**USING).repaired
        assert not limiters.sweep(**USING)

    def _learn_from(self, rows):
        """Read values that the model leaves open: ids that settle ties, the ready job of a key, random retry delays."""
        for jid, job in self.model.jobs.items():
            row = rows.get(jid)
            if row is None:
                continue
            job.row, job.is_blocked = row.pk, row.state == "blocked"
            if job.state == "retries" and job.due_at is None and row.run_at:
                wait_s = round((row.run_at - timezone.now()).total_seconds())
                count = job.failures - 1
                assert count**4 + 15 - 2 <= wait_s <= count**4 + 15 + 29 * (count + 1), "W18"
                job.due_at = self.model.now + wait_s

    def _locks_are_right(self, rows):
        held = {lock.key: lock.jid for lock in JobLock.objects.filter(is_lapsed=False)}
        live = {key: lock for key, lock in self.model.locks.items() if not lock.is_lapsed}
        assert held.keys() == live.keys()
        running = [job.spec.lock for job in self.model.jobs.values() if job.lock and job.lock in live.values()]
        assert len(running) == len(set(running)), "at most one job of each key runs"
        places = {}
        for row in rows.values():
            if row.state in ("enqueued", "blocked") and row.lock_key:
                places.setdefault((row.lock_key, row.queue, row.sort_priority), []).append(row.state)
            assert row.state != "blocked" or row.lock_key, "a job without a lock key is not blocked"
        for (key, *_), states in places.items():
            assert key in live or "enqueued" in states, f"the lock {key} is free, and no job with it is ready"

    # --- choosing ---

    def _job(self, pick):
        return self.model.jobs[sorted(self.model.jobs)[pick % len(self.model.jobs)]]

    def _bid(self, pick):
        return list(self.model.batches)[pick % len(self.model.batches)]

    def _working(self):
        return sorted(jid for jid, job in self.model.jobs.items() if job.state == "working")

    def _running(self, pick):
        return self.model.jobs[self._working()[pick % len(self._working())]]

    def _report(self, pick, sender):
        """Return the jid, the worker id and the attempt of a report."""
        job = self._running(pick)
        wid = {"unnamed": "", "stranger": "w3"}.get(sender, job.wid)
        *earlier, attempt = self.attempts[job.spec.jid]
        stale = earlier[pick % len(earlier)] if earlier else attempt - 1
        return job.spec.jid, wid, {"stale": stale, "holder": attempt}.get(sender)

    def _adopt_attempts(self, claimed):
        """Give the model's jobs the attempts of their claims. No run of a jid has an attempt of an earlier one."""
        for job in claimed:
            known = self.attempts.setdefault(job.jid, [])
            assert job.attempt > max(known, default=0)
            known.append(job.attempt)
            self.model.jobs[job.jid].attempt = job.attempt


def _payload(spec, by):
    """Return the job as a client would send it, with its sender."""
    custom = {"lock": spec.lock, "bid": spec.bid} if spec.bid else {"lock": spec.lock}
    custom = {key: value for key, value in custom.items() if value}
    if spec.unique:
        custom |= {"unique_for": plain.UNIQUE_S, "unique_until": "start" if spec.until_start else "success"}
    if spec.expires:
        custom["expires_in"] = plain.EXPIRES_S
    fields = {
        "jid": spec.jid, "jobtype": "noop", "args": [spec.unique], "queue": spec.queue, "priority": spec.priority,
        "retry": spec.retry, "reserve_for": plain.RESERVED_S, "custom": custom,
    }  # fmt: skip
    if spec.is_later:
        fields["at"] = rfc3339(timezone.now() + timedelta(seconds=plain.SCHEDULED_S))
    job = parse_job(jsontext.encode(fields))
    options = msgspec.structs.replace(job.options, caller_wid=by) if job.options else None
    return msgspec.structs.replace(job, options=options, result_ttl=plain.KEPT_S if spec.is_kept else None)


def _name(answer):
    return "" if answer is None else type(answer).__name__


def _fields_of_row(row):
    state = "ready" if row.state in ("enqueued", "blocked") else row.state
    is_working = state == "working"
    return (
        state, row.queue, is_working and row.attempt, row.failures, row.losses, row.unique_key is not None,
        row.wid if is_working else "", is_working and row.lock_token is not None,
        row.permits is not None, row.bid or "", row.callback_of or "",
    )  # fmt: skip


def _fields_of_model(job):
    is_working = job.state == "working"
    return (
        job.state, job.spec.queue, is_working and job.attempt, job.failures, job.losses, job.unique is not None,
        job.wid if is_working else "", is_working and job.lock is not None,
        job.has_pass, job.spec.bid, job.callback[0].bid if job.callback else "",
    )  # fmt: skip


def _status(row):
    return (*row[1:-1], row.finished_at is not None)
