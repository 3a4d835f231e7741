"""Record what happens to batches, independently of the system, and report violations of the invariants B1 to B12."""

import json
import threading
import uuid
from collections import defaultdict
from functools import partial

from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import NewBatch
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Batch


def job(jobtype, **custom):
    fields = {"jid": uuid.uuid4().hex, "jobtype": jobtype, "args": [], "custom": custom}
    return parse_job(json.dumps(fields, separators=(",", ":")))


def insist(verb, *args, **named):
    """Call a verb until the database is available, as every client does. A refused call has had no effect."""
    while True:
        try:
            return verb(*args, **named)
        except BrokerUnavailable:
            continue


class Insistent:
    """Wrap a broker so that each of its verbs is retried by `insist`."""

    def __init__(self, broker):
        self._broker = broker

    def __getattr__(self, name):
        return partial(insist, getattr(self._broker, name))


class _Noted:
    """One batch, as its producer and its workers saw it. A moment is a position in the history."""

    def __init__(self, parent, kinds):
        self.parent, self.kinds = parent, kinds
        self.members = set()
        self.committed = None
        self.is_forgotten = False
        self.callbacks = defaultdict(list)


class History:
    """Call the verbs of a broker, and record their effects and the jobs that ran."""

    def __init__(self):
        self.batches = {}
        self.first_run, self.success = {}, {}
        self.given_up = set()  # manually: these count as executed
        self._moment = 0
        self._noting = threading.Lock()

    def __str__(self):
        count = len({jid for noted in self.batches.values() for jid in noted.members})
        return f"{len(self.batches)} batches with {count} members:"

    def new(self, broker, parent, kinds):
        bid = broker.new_batch(NewBatch(parent_bid=parent, **{kind: job("callback") for kind in kinds}))
        self.batches[bid] = _Noted(parent, kinds)
        return bid

    def push(self, broker, bid, count):
        pushed = [job("member", bid=bid) for _ in range(count)]
        for refusal in broker.push(pushed):
            if refusal is not None:
                raise refusal
        with self._noting:
            self.batches[bid].members |= {one.jid for one in pushed}

    def commit(self, broker, bid):
        self.batches[bid].committed = self.batches[bid].committed or self._now()
        broker.commit_batch(bid)

    def forget(self, bids):
        for bid in bids:
            self.batches[bid].is_forgotten = True

    def depth(self, bid):
        parent = self.batches[bid].parent
        return 1 + self.depth(parent) if parent else 0

    def callback_ran(self, one):
        """Record the run of a callback job, and return its batch and kind. Return None if it is not a callback."""
        custom = json.loads(one.text)["custom"]
        if "_bid" not in custom:
            return None
        self.batches[custom["_bid"]].callbacks[custom["_cb"]].append(self._now())
        return custom["_bid"], custom["_cb"]

    def member_ran(self, one):
        self.first_run.setdefault(one.jid, self._now())
        return json.loads(one.text)["custom"]["bid"]

    def member_succeeded(self, one):
        self.success[one.jid] = self._now()

    def _now(self):
        with self._noting:
            self._moment += 1
            return self._moment

    def violations(self):
        """Return all violations of the rules, once every job and batch has finished."""
        rows = {row.bid: row for row in Batch.objects.all()}
        if rows.keys() != self.batches.keys():
            return ["the stored batches are not the created batches"]
        found = []
        for bid, noted in self.batches.items():
            found += [f"{rule} {bid}" for rule in (*self._of_row(rows[bid], noted), *self._of_order(noted, rows[bid]))]
        return found

    def _of_row(self, row, noted):
        """Check the final counters and which callbacks ran."""
        if (row.total, row.pending, row.unrun, row.failed) != (len(noted.members), 0, 0, 0):
            yield f"B11 counters {row.total} {row.pending} {row.unrun} {row.failed} of {len(noted.members)}"
        if not row.is_over or (row.is_expired != noted.is_forgotten):
            yield "B12 it is not over, or over for another reason"
        if not noted.is_forgotten and row.is_broken != self._is_broken(row.bid):
            yield f"B4 broken={row.is_broken}"
        expected = {kind: 1 for kind in noted.kinds if not noted.is_forgotten}
        if row.is_broken:
            expected.pop("success", None)
        if {kind: len(ran) for kind, ran in noted.callbacks.items()} != expected:
            yield f"B1, B3, B4, B7, B10 callbacks {dict(noted.callbacks)} and not {expected}"

    def _of_order(self, noted, row):
        """Check the order of runs and callbacks."""
        complete, success = (noted.callbacks.get(kind, [None])[0] for kind in ("complete", "success"))
        children = [child for child in self.batches.values() if child.parent == row.bid]
        for kind, at in (("complete", complete), ("success", success)):
            if at is None:
                continue
            if at < noted.committed:
                yield f"B2 {kind} came before COMMIT"
            if any(self.first_run.get(jid, 0) > at for jid in noted.members - self.given_up):
                yield f"B3 {kind} came before a member's first run"
            if any(at < ran for child in children for ran in child.callbacks.get(kind, [])):
                yield f"B6 {kind} came before the child's"
        if complete and any(at > complete for child in children for at in child.callbacks.get("complete", [])):
            yield "B6 complete came before the child's"
        if success is None:
            return
        if any(self.success.get(jid, success) >= success for jid in noted.members):
            yield "B4 success came before a member's"
        if complete and success < complete:
            yield "B5 success came before complete"
        if any(at > success for child in children for ran in child.callbacks.values() for at in ran):
            yield "B6 success came before a child's callback"

    def _is_broken(self, bid):
        """Return True if a member, or one of a child, did not succeed. Then, and only then, success must not run."""
        below = [child for child, noted in self.batches.items() if noted.parent == bid]
        return any(jid not in self.success for jid in self.batches[bid].members) or any(map(self._is_broken, below))
