"""Parse a history into jobs, attempts, faults, limits and batches. Uses no Django and judges nothing."""

import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

SUSPECT_S = 2.0
"""Seconds without running, or without the database, after which a process may have lost its jobs and locks."""

STALL_S = 1.0
"""Seconds that a write to the database takes at least when it is noted as a stall."""

REPORTED_S = 3.0
"""Seconds within which a task worker reports the end of a job, unless it is killed."""


@dataclass
class Attempt:
    """One run of a job, as noted by the process that ran it."""

    jid: str
    executor: str
    pid: str
    begin: float
    noted_end: float = inf
    outcome: str = ""
    """`ok`, `fail` or `cut`; empty if its end was not noted."""
    end: float = inf
    """Latest possible end: its process was killed, was due to stop, or may have lost the job."""
    is_suspect: bool = False

    @property
    def is_wire(self):
        """Return True if a wire client ran it; such a client notes each answer."""
        return self.executor != self.pid

    def __str__(self):
        return f"{self.begin:.3f}-{self.end:.3f} by {self.executor} {self.outcome or 'no end'}"


class Limit(NamedTuple):
    """A limit's value, from the earliest moment it may have been in force to the latest."""

    since: float
    until: float
    most: float


@dataclass
class BatchNotes:
    tag: str
    parent: str
    kinds: list[str]
    bid: str = ""
    commit: float = inf
    committed: float = inf
    reopened: list[tuple[float, float]] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)


class Evidence:
    def __init__(self, history):
        self.history = history
        self.specs, self.sent = {}, {}
        for note in history["sent"]:
            self.specs[note.rest[0]] = json.loads(note.rest[1])
            self.sent[note.rest[0]] = note.at
        self.ok = {note.rest[0]: note.at for note in history["ok"]}
        self.undone = history.jids("undone")
        self.refused = {note.rest[0]: (note.at, note.rest[1]) for note in history["refused"]}
        self.acked = {(note.rest[0], note.rest[1]): note.at for note in history["acked"]}
        self.kills = _by_pid(history["kill"])
        self.terms = _by_pid(history["term"])
        self.ends_of_sessions = sorted(note.at for note in history["dbfault"])
        self.stalls = [(float(note.rest[0]), float(note.rest[1])) for note in history["stall"]]

    @cached_property
    def attempts(self):
        """Attempts by jid, ordered by beginning."""
        found, open_ = defaultdict(list), {}
        for note in sorted(self.history["begin"]):
            jid, executor, pid, number = note.rest
            attempt = open_[pid, number, jid] = Attempt(jid, executor, pid, note.at)
            found[jid].append(attempt)
        for note in self.history["end"]:
            jid, _, pid, number, outcome = note.rest
            attempt = open_[pid, number, jid]
            attempt.noted_end, attempt.outcome = note.at, outcome
        for attempt in open_.values():
            self._bound(attempt)
        return found

    def all_attempts(self):
        return [attempt for attempts in self.attempts.values() for attempt in attempts]

    def _bound(self, attempt):
        """Set the attempt's latest possible end, and whether it is suspect."""
        end, lost = min([attempt.noted_end, *self._ends_of_process(attempt)]), self.lost_since(attempt)
        attempt.is_suspect = lost <= end
        attempt.end = max(attempt.begin, min(end, lost))

    def lost_since(self, attempt):
        """Return the time since which its process may have lost its jobs; `inf` if there is none.

        Since then it was stopped, its commands got no answer, or the database was slow.
        """
        gaps = [(at, at + s) for at, s in self._gaps.get(attempt.pid, []) if s >= SUSPECT_S]
        # A task worker keeps its identity as long as its process lives, so an earlier gap counts. A wire client notices
        # that it was declared lost, and takes a new identity.
        stood_still = [
            at for at, end in gaps if end >= attempt.begin - 1 or (at < attempt.begin and not attempt.is_wire)
        ]
        mute = self._mutes.get(attempt.executor, [])
        stalls = [at for at, s in self.stalls if s >= SUSPECT_S and at + s >= attempt.begin and at <= attempt.noted_end]
        return min([*stood_still, *mute, *stalls], default=inf)

    @cached_property
    def _gaps(self):
        found = defaultdict(list)
        for note in [*self.history["gap"], *self.history["frozen"]]:
            found[note.rest[0]].append((float(note.rest[1]), float(note.rest[2])))
        return found

    @cached_property
    def _mutes(self):
        found = defaultdict(list)
        for note in self.history["mute"]:
            found[note.rest[0]].append(float(note.rest[1]))
        return found

    def is_killed(self, attempt, until):
        """Return True if its process was killed or asked to stop between its beginning and `until`."""
        return any(at <= until for at in self._ends_of_process(attempt))

    def _ends_of_process(self, attempt):
        """Return when its process was ended. The note precedes the signal, so an attempt may begin in between."""
        times = [*self.kills.get(attempt.pid, []), *self.terms.get(attempt.pid, [])]
        return [max(at, attempt.begin) for at in times]

    def is_reported(self, attempt):
        """Return whether the server is known to have received the end of this attempt before it was lost."""
        if attempt.is_wire:
            acked = self.acked.get((attempt.jid, attempt.executor))
            mutes = self._mutes.get(attempt.executor, [])
            return acked is not None and not any(attempt.noted_end <= at <= acked for at in mutes)
        latest = attempt.noted_end + REPORTED_S
        return not (self.is_killed(attempt, latest) or self._stands_still(attempt, latest))

    def _stands_still(self, attempt, latest):
        """Return whether its process stopped between the attempt's end and `latest`, long enough to be lost."""
        gaps = self._gaps.get(attempt.pid, [])
        return any(s >= SUSPECT_S and attempt.noted_end <= at <= latest for at, s in gaps)

    def has_fault(self, since, until):
        """Return True if database sessions were ended, or the database was slow, between `since` and `until`."""
        place = bisect_left(self.ends_of_sessions, since)
        ended = place < len(self.ends_of_sessions) and self.ends_of_sessions[place] <= until
        return ended or any(at <= until and at + s >= since for at, s in self.stalls)

    @cached_property
    def limits(self):
        """Limits in force, by scope and name."""
        found = defaultdict(list)
        asked = {}
        for note in sorted([*self.history["limit"], *self.history["limited"]], key=lambda note: note.at):
            scope, name, value = note.rest
            place = scope, name
            if place not in asked:
                asked[place] = note.at  # the limit's first note: before it there was no limit
                found[place].append(Limit(0.0, inf, inf))
            if note in self._limited:
                last = found[place].pop()
                found[place] += [last._replace(until=note.at), Limit(asked[place], inf, _most(value))]
            else:
                asked[place] = note.at
        return found

    @cached_property
    def _limited(self):
        return {*self.history["limited"]}

    @cached_property
    def batches(self):
        found = {}
        for note in self.history["new"]:
            fields = json.loads(note.rest[1])
            found[note.rest[0]] = BatchNotes(note.rest[0], fields["parent"], fields["kinds"])
        for note in self.history["new-ok"]:
            found[note.rest[0]].bid = note.rest[1]
        for word, name in (("commit", "commit"), ("committed", "committed")):
            for note in self.history[word]:
                setattr(found[note.rest[0]], name, note.at)
        ends = defaultdict(list)
        for note in sorted(self.history["recommit"]):
            ends[note.rest[0]].append(note.at)
        for note in self.history["reopened"]:
            until = min((at for at in ends[note.rest[0]] if at >= note.at), default=inf)
            found[note.rest[0]].reopened.append((note.at, until))
            found[note.rest[0]].commit = min(until, found[note.rest[0]].commit)
        for jid, spec in self.specs.items():
            if "tag" in spec and (jid in self.ok or jid in self.attempts):
                found[spec["tag"]].members.append(jid)
        for batch in found.values():
            if batch.parent:
                found[batch.parent].children.append(batch.tag)
        return found

    @cached_property
    def calls(self):
        """The callbacks that began, by batch tag and kind: each jid with the time of its first beginning."""
        found = defaultdict(dict)
        for note in sorted(self.history["called"]):
            jid, tag, kind = note.rest
            found[tag, kind].setdefault(jid, note.at)
        return found


def _by_pid(notes):
    found = defaultdict(list)
    for note in notes:
        # A graceful stop gives running jobs some time: its second word is the moment when that time is over.
        found[note.rest[0]].append(float(note.rest[1]) if len(note.rest) > 1 else note.at)
    return found


def _most(value):
    return inf if value == "none" else int(value)
