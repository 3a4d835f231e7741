"""Check a run against its rules: each rule is a function of evidence and final store, and yields its violations.

Uses no Django. A rule with an exception documents that exception.
"""

from collections import Counter, defaultdict
from itertools import combinations, pairwise
from math import inf

from tests.outside.evidence import SUSPECT_S

FINAL = {"succeeded", "dead"}
MAX_LOSSES = 3
EARLY_S = 0.05
"""Tolerance in seconds: two clocks of one machine are read one after the other."""

HELD_AHEAD_S, DELIVERED_S = 4.0, 1.0
"""Seconds for which a claimed job counts as running before it begins: in a task worker, and in a wire client."""

FAULT_S = 5.0
"""Seconds after a database fault in which commands may fail: a connection notices the fault on its next use."""

NEIGHBOURS_S, PLAIN = 2.5, 3
"""Longest latency in seconds of a command, unless fewer than `PLAIN` plain commands were answered quickly meanwhile."""


def lost(evidence, left):
    """Report accepted jobs that did not end as their script says. Exception: the third loss of a worker (W20)."""
    for jid in sorted(evidence.ok.keys() - evidence.undone):
        spec, row = evidence.specs[jid], left.jobs.get(jid)
        wanted = "dead" if spec.get("dies") else "succeeded"
        attempts = evidence.attempts.get(jid, [])
        if row is None or row.state not in FINAL:
            yield f"{jid} {spec['task']}: accepted, {row.state if row else 'not stored'} at the end; {_join(attempts)}"
        elif row.state != wanted:
            is_poison = row.state == "dead" and row.losses >= MAX_LOSSES and _are_real(evidence, jid, attempts)
            if not is_poison and not _has_expired(evidence, row, attempts):
                yield f"{jid} {spec['task']}: {row.state} {row.errtype}, wanted {wanted}; {_join(attempts)}"
        elif wanted == "succeeded" and not any(attempt.outcome == "ok" for attempt in attempts):
            yield f"{jid} {spec['task']}: succeeded, and no attempt ended well; {_join(attempts)}"


def _has_expired(evidence, row, attempts):
    """Return whether the database was slow for so long that a living worker could not extend a reservation."""
    return row.errtype == "ReservationExpired" and any(
        s >= SUSPECT_S and at <= attempt.end and at + s >= attempt.begin
        for at, s in evidence.stalls
        for attempt in attempts
    )


def _are_real(evidence, jid, attempts):
    """Return whether processes were lost often enough for the maximum of losses.

    A process may be killed between the claim and the first note of the attempt. Such a loss needs a kill of its own.
    """
    lost = [attempt for attempt in attempts if attempt.is_suspect or evidence.is_killed(attempt, inf)]
    killed = {pid for pid, times in evidence.kills.items() if max(times) >= evidence.sent[jid]}
    return bool(lost) and len(lost) + len(killed - {attempt.pid for attempt in lost}) >= MAX_LOSSES


def _join(attempts):
    return "attempts: " + ("; ".join(map(str, attempts)) or "none")


def made_up(evidence, left):
    """Report jobs that ran or are stored, but were never sent or were rolled back."""
    called = {jid for jids in evidence.calls.values() for jid in jids}
    known = {*evidence.attempts, *left.jobs} - called - left.callbacks
    for jid in sorted(known - evidence.sent.keys()):
        yield f"{jid}: never sent"
    for jid in sorted(known & evidence.undone):
        yield f"{jid}: its transaction was rolled back"


def run_twice(evidence, left):
    """Report overlapping attempts at one job, and repeated attempts without a reason."""
    for jid, attempts in evidence.attempts.items():
        for before, after in pairwise(attempts):
            if after.begin < before.end and not before.is_suspect and not after.is_suspect:
                yield f"{jid}: two attempts at once: {before}; {after}"
            elif not _is_run_again_rightly(evidence, left, before, after):
                yield f"{jid}: run again without a reason: {before}; {after}"


def _is_run_again_rightly(evidence, left, before, after):
    """Return True if the first attempt failed or lost its process.

    An atomic task may also be rolled back by the database: its session ends, or its end meets a deadlock.
    """
    if before.outcome == "fail" or before.is_suspect or after.is_suspect:
        return True
    if evidence.is_killed(before, after.begin):
        return before.outcome != "ok" or not evidence.is_reported(before)
    if before.is_wire and (before.jid, before.executor) not in evidence.acked:
        return False  # a wire client repeats an ACK until it is answered
    if not evidence.is_reported(before):
        return True  # lost, because its process or its node was suspended before the end was reported
    if not evidence.specs.get(before.jid, {}).get("effect"):
        return False
    row = left.jobs.get(before.jid)
    return bool(row and row.interruptions) or evidence.has_fault(before.begin, after.begin)


def never_ended(evidence, left):
    """Report attempts without an end in processes that were neither killed nor stopped."""
    for attempt in evidence.all_attempts():
        if not attempt.outcome and not attempt.is_suspect and not evidence.is_killed(attempt, inf):
            yield f"{attempt.jid}: {attempt}"


def failures(evidence, left):
    """Report stored failures that no script caused, and failures that are missing. A stop uses up no attempt."""
    for jid, row in left.jobs.items():
        failed = [attempt for attempt in evidence.attempts.get(jid, []) if attempt.outcome == "fail"]
        sure = [one for one in failed if not one.is_suspect and evidence.is_reported(one)]
        # If a session is ended while a task uses it, the task itself fails.
        of_sessions = (
            sum(error.startswith("django.db.utils.") for error in row.errors) if evidence.ends_of_sessions else 0
        )
        if not len(sure) <= row.failures <= len(failed) + of_sessions:
            yield f"{jid}: {row.failures} failures stored, {len(failed)} happened: {row.errtype} {row.errors}"


def effects(evidence, left):
    """Report atomic tasks and steps that succeeded and did not write exactly once, or did not succeed and wrote.

    Exception: the steps that a dead job has committed.
    """
    for jid, row in left.jobs.items():
        spec = evidence.specs.get(jid, {})
        if spec.get("effect") and row.state in FINAL:
            wanted = int(row.state == "succeeded")
            parts = [f"{jid}.{part}" for part in range(spec.get("parts", 0))]
            for one in parts or [jid]:
                may_differ = parts and not wanted and left.effects[one] == 1
                if left.effects[one] != wanted and not may_differ:
                    yield f"{one}: {row.state} and written {left.effects[one]} times"


def locks(evidence, left):
    """Report two jobs with the same lock key that ran at the same time."""
    of_key = defaultdict(list)
    for attempt in evidence.all_attempts():
        if key := evidence.specs.get(attempt.jid, {}).get("lock"):
            of_key[key].append(attempt)
    for key, attempts in of_key.items():
        judged = sorted((one for one in attempts if not one.is_suspect), key=lambda one: one.begin)
        for before, after in pairwise(judged):
            if after.begin < before.end:
                yield f"{key}: {before.jid} {before}; {after.jid} {after}"


def limits(evidence, left):
    """Report a job that began above its limit: above every value in force since its claim."""
    of_limit = defaultdict(list)
    for attempt in evidence.all_attempts():
        spec = evidence.specs.get(attempt.jid, {})
        for place in (("task", spec.get("task")), ("queue", spec.get("queue")), ("key", spec.get("limit"))):
            if place in evidence.limits and not attempt.is_suspect:
                of_limit[place].append(attempt)
    for place, attempts in of_limit.items():
        running = []
        for attempt in sorted(attempts, key=lambda one: one.begin):
            running = [one for one in running if one.end > attempt.begin] + [attempt]
            most = _in_force(evidence.limits[place], attempt)
            if len(running) > most:
                jobs = ", ".join(f"{one.jid} {one}" for one in running)
                yield f"{place[1]}: {len(running)} at {attempt.begin:.3f}, {most} allowed: {jobs}"


def _in_force(numbers, attempt):
    """Return the largest limit that may have been in force since this job was claimed."""
    claimed = attempt.begin - (DELIVERED_S if attempt.is_wire else HELD_AHEAD_S)
    return max(one.most for one in numbers if one.since <= attempt.begin and one.until >= claimed)


def unique(evidence, left):
    """Report two jobs with the same unique key that were both accepted before either ended."""
    of_key = defaultdict(list)
    for jid, at in evidence.ok.items():
        if (key := evidence.specs[jid].get("unique")) is not None:
            ended = [one.noted_end for one in evidence.attempts.get(jid, []) if one.outcome == "ok"]
            of_key[key].append((at, min(ended, default=inf), jid))
    for key, jobs in of_key.items():
        for (ok, end, jid), (ok_too, end_too, jid_too) in combinations(jobs, 2):
            if max(ok, ok_too) < min(end, end_too):
                yield f"key {key}: {jid} and {jid_too} were accepted"


def early(evidence, left):
    """Report scheduled jobs that began before their time."""
    for jid, attempts in evidence.attempts.items():
        at = evidence.specs.get(jid, {}).get("at")
        if at is not None and attempts[0].begin < at - EARLY_S:
            yield f"{jid}: {at - attempts[0].begin:.3f} s early"


def callbacks(evidence, left):
    """Report callbacks of batches that are repeated, early or missing; success needs all members to succeed."""
    for batch in evidence.batches.values():
        is_sure = _is_sure(evidence, batch)
        for kind in ("complete", "success"):
            calls = evidence.calls.get((batch.tag, kind), {})
            if len(calls) > 1:
                yield f"{batch.tag}: {kind} was enqueued {len(calls)} times: {sorted(calls)}"
            if calls:
                yield from _too_early(evidence, batch, kind, min(calls.values()), left)
            elif kind in batch.kinds and is_sure and (kind == "complete" or _has_succeeded(evidence, batch, left)):
                yield f"{batch.tag} {batch.bid}: {kind} never came"


def _is_sure(evidence, batch):
    """Return True if COMMIT was answered for the batch and all its descendants; any other is open until it expires."""
    is_closed = all(until < inf for _, until in batch.reopened)
    return (
        is_closed and batch.committed < inf and all(_is_sure(evidence, evidence.batches[tag]) for tag in batch.children)
    )


def _has_succeeded(evidence, batch, left):
    below = [evidence.batches[tag] for tag in batch.children]
    jobs = [left.jobs.get(jid) for jid in batch.members]
    return all(row and row.state == "succeeded" for row in jobs) and all(
        _has_succeeded(evidence, child, left) for child in below
    )


def _too_early(evidence, batch, kind, called, left):
    if called < batch.commit:
        yield f"{batch.tag}: {kind} came before COMMIT"
    for since, until in batch.reopened:
        if since < called < until:
            yield f"{batch.tag}: {kind} came while it was open again, {until - called:.3f} s before COMMIT"
    for jid in batch.members:
        attempts = evidence.attempts.get(jid, [])
        if kind == "complete":
            ran = min((one.end for one in attempts), default=inf)
            # A session that ends before the task notes its beginning fails an attempt that no history has.
            row = left.jobs.get(jid)
            if evidence.ends_of_sessions and row and any(e.startswith("django.db.utils.") for e in row.errors):
                continue
        else:
            ran = min((one.noted_end for one in attempts if one.outcome == "ok"), default=inf)
        if ran > called:
            sent = evidence.sent.get(jid, inf)
            times = f"sent {sent:.3f}, commit {batch.commit:.3f}, opened again {batch.reopened}"
            yield f"{batch.tag}: {kind} came at {called:.3f} before its member {jid} ({times}); {_join(attempts)}"
    for tag in batch.children:
        # A child's success may follow the parent's complete: a member that failed once counts as executed.
        for one in ("complete", "success") if kind == "success" else ("complete",):
            for jid in evidence.calls.get((tag, one), {}):
                ended = min((a.noted_end for a in evidence.attempts.get(jid, []) if a.outcome == "ok"), default=inf)
                if ended > called:
                    yield f"{batch.tag}: {kind} came before {one} of its child {tag}"


def answers(evidence, left):
    """Report commands refused without a database fault, and commands that were refused but executed."""
    for jid, (at, why) in evidence.refused.items():
        sent, spec = evidence.sent[jid], evidence.specs[jid]
        has_fault = evidence.has_fault(sent - FAULT_S, at)
        if why.startswith(("-NOTUNIQUE", "NOTUNIQUE")):
            if jid in left.jobs:
                yield f"{jid}: refused as not unique, and stored"
        elif "shutdown" in why or (spec.get("adds") and "batch" in why):
            pass
        elif "unavailable" not in why:
            yield f"{jid}: refused with {why}"
        elif not has_fault and spec["kind"] != "held":
            yield f"{jid}: refused with {why} after {at - sent:.1f} s, and the database had no fault"
        elif not has_fault and jid in left.jobs:
            yield f"{jid}: refused with {why}, and stored"
    for note in evidence.history["new-refused"]:
        tag, why = note.rest
        sent = next(one.at for one in evidence.history["new"] if one.rest[0] == tag)
        if "shutdown" not in why and "batch" not in why and not evidence.has_fault(sent - FAULT_S, note.at):
            stored = "stored" if tag in left.descriptions else "not stored"
            yield f"BATCH NEW {tag}: {why} after {note.at - sent:.1f} s, {stored}; the database had no fault"
    for note in evidence.history["error"]:
        verb, begun, why = note.rest
        if "unavailable" in why and not evidence.has_fault(float(begun) - FAULT_S, note.at):
            yield f"{verb}: refused with {why} after {note.at - float(begun):.1f} s, and the database had no fault"


def neighbours(evidence, left):
    """Report commands that waited for another transaction while plain commands were answered quickly."""
    answered = evidence.ok | {jid: at for jid, (at, _) in evidence.refused.items()}
    spans = [(evidence.sent[jid], at, evidence.specs[jid]["kind"], jid) for jid, at in answered.items()]
    plain = [(sent, at) for sent, at, kind, _ in spans if kind == "plain"]
    for sent, at, kind, jid in spans:
        if kind == "may_block" and at - sent > NEIGHBOURS_S and not evidence.has_fault(sent - FAULT_S, at):
            quick = [1 for begun, ended in plain if sent < begun and ended < at and ended - begun < (at - sent) / 4]
            if len(quick) >= PLAIN:
                yield f"{jid}: answered after {at - sent:.1f} s, {len(quick)} plain ones meanwhile"


def counters(evidence, left):
    """Report counts of INFO that differ from the stored jobs, and locks, permits or sizes that are left at the end."""
    states = Counter(row.state for row in left.jobs.values())
    lost_for_good = sum(row.errtype == "WorkerLost" and row.state == "dead" for row in left.jobs.values())
    failed = sum(row.failures for row in left.jobs.values()) + lost_for_good
    if left.failed != failed:
        yield f"INFO: total_failures {left.failed}, {failed} happened"
    if left.processed != failed + states["succeeded"]:
        yield f"INFO: total_processed {left.processed}, {failed} failed and {states['succeeded']} succeeded"
    if any(left.sizes.values()):
        yield f"INFO: sizes {left.sizes}"
    for what in ("held_locks", "used_limits", "wrong_batches"):
        if found := getattr(left, what):
            yield f"{what.replace('_', ' ')}: {found}"


RULES = (
    lost, made_up, run_twice, never_ended, failures, effects, locks, limits, unique, early, callbacks, answers,
    neighbours, counters,
)  # fmt: skip


def judge(evidence, left):
    """Return all violations, by name of the rule."""
    return {rule.__name__: found for rule in RULES if (found := list(rule(evidence, left)))}
