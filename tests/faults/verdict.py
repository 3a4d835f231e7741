"""Judge a run by its history and the remaining rows: jobs that are lost, made up, doubled or stuck.

Total-queue checking: an accepted job that never ended is lost. Uses no Django.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    accepted: int
    lost: frozenset[str]
    """Accepted, but never run to the end."""
    made_up: frozenset[str]
    """Run or stored, but never sent."""
    unsure: frozenset[str]
    """Run or stored, although its client received no success; correct if a fault happened at that moment."""
    doubled: Counter[str]
    """Number of additional runs, by jid."""
    stuck: frozenset[str]
    """Left in a state that is not final at the end."""

    def __str__(self):
        return (
            f"{self.accepted} accepted: lost {len(self.lost)}, made up {len(self.made_up)}, unsure {len(self.unsure)},"
            f" begun again {self.doubled.total()}, stuck {len(self.stuck)}"
        )


FINAL = {"succeeded", "dead"}


def judge(history, rows):
    """Judge a history; `rows` maps the jid of each remaining job to its state."""
    accepted, sent = history.jids("ok"), history.jids("sent")
    begun = Counter(note.rest[0] for note in history["begin"])
    known = begun.keys() | rows.keys()
    return Verdict(
        accepted=len(accepted),
        lost=frozenset(accepted - history.jids("end")),
        made_up=frozenset(known - sent),
        unsure=frozenset((known & sent) - accepted),
        doubled=Counter({jid: times - 1 for jid, times in begun.items() if times > 1}),
        stuck=frozenset(jid for jid, state in rows.items() if state not in FINAL),
    )
