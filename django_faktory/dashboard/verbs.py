"""What people do to jobs in the admin: words, permission, states, and whether it destroys. `acts` does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django.http import HttpRequest

from .. import acts, permissions
from ..acts import Verb
from ..lifecycle import State
from ..models import Job
from ..store import cancelling


class Act(NamedTuple):
    """One of them."""

    label: str
    done: str
    codename: str
    states: frozenset[State]
    warning: str = ""
    """What is lost; empty where nothing is, and nobody is asked once more."""

    def is_allowed(self, request: HttpRequest) -> bool:
        """Whether this user may."""
        return bool(request.user.has_perm(permissions.needs(self.codename)))


_CANCELLED = frozenset({State.SCHEDULED, State.ENQUEUED, State.BLOCKED, State.WORKING, State.RETRIES})
_CLEARED = frozenset({State.ENQUEUED, State.BLOCKED})

ACTS = {
    "retry": Act("Retry now", "Retried", permissions.RETRY_JOB, acts.STATES[Verb.RETRY]),
    "requeue": Act("Run now", "Run by hand", permissions.REQUEUE_JOB, acts.STATES[Verb.REQUEUE]),
    "cancel": Act(
        "Cancel", "Cancelled", permissions.CANCEL_JOB, _CANCELLED,
        "Jobs that wait are dropped. Those that run are stopped within seconds, where the worker is ours.",
    ),
    "kill": Act(
        "Kill", "Killed", permissions.KILL_JOB, acts.STATES[Verb.KILL],
        "They will not run any more, unless somebody retries them among the dead.",
    ),
    "discard": Act(
        "Discard", "Discarded", permissions.DISCARD_JOB, acts.STATES[Verb.DISCARD],
        "They are dropped. There is no way back.",
    ),
    "prune": Act(
        "Delete", "Deleted", permissions.PRUNE_JOB, acts.STATES[Verb.PRUNE],
        "What is known of their end, their results too, is deleted. There is no way back.",
    ),
    "clear": Act(
        "Clear", "Cleared", permissions.CLEAR_QUEUE, _CLEARED,
        "All that waits in the queue is dropped. There is no way back.",
    ),
}  # fmt: skip
"""By the name that addresses and buttons have. `clear` is a queue's, the others are any job's."""


def carry_out(name: str, ids: Sequence[int], *, using: str) -> int:
    """Do it to these jobs; returns to how many it was done, the others are in another state."""
    jobs = Job.objects.using(using).filter(pk__in=ids)
    if name == "cancel":
        return cancelling.cancel(list(jobs.values_list("jid", flat=True)), using=using)
    return acts.carry_out(Verb.DISCARD if name == "clear" else Verb(name), jobs)


def fitting(job: Job, request: HttpRequest) -> list[tuple[str, Act]]:
    """What this user may do to this job now; of two that come to the same, the first."""
    found = [
        (name, act)
        for name, act in ACTS.items()
        if name != "clear" and job.state in act.states and act.is_allowed(request)
    ]
    names = [name for name, _ in found]
    return [(name, act) for name, act in found if not (name == "requeue" and "retry" in names)]
