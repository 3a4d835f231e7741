"""What a history and the rows that are left say of a run: nothing lost, nothing made up, what ran twice, what sticks.

Total-queue checking: what was accepted, less what ended, is lost. Knows no Django.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    accepted: int
    lost: frozenset[str]
    """Accepted, and never run to the end."""
    made_up: frozenset[str]
    """Run or stored, and never sent by anybody."""
    unsure: frozenset[str]
    """Run or stored, though its client heard of no success: right, where a fault came just then."""
    doubled: Counter[str]
    """How often more than once each was begun."""
    stuck: frozenset[str]
    """Left in a state that is not final."""

    def __str__(self):
        return (
            f"{self.accepted} accepted: lost {len(self.lost)}, made up {len(self.made_up)}, unsure {len(self.unsure)},"
            f" begun again {self.doubled.total()}, stuck {len(self.stuck)}"
        )


FINAL = {"succeeded", "dead"}


def judge(history, rows):
    """`rows`: jid and state of each job that is left."""
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
