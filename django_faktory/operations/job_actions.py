"""The actions on jobs: states, change, permission and texts of each, for querysets, admin, API and command line.

One table: lists, buttons, endpoints and subcommands are derived from it. `bulk` executes the actions.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from django.utils.translation import gettext_lazy as _
from django.utils.translation import override

from .. import conf
from ..core.lifecycle import UNFINISHED, Event, State, sources
from ..models import Job, permissions
from ..store.jobs import steps, transitions

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise, _StrPromise


class Verb(StrEnum):
    """Operations that can be applied to any set of jobs."""

    RETRY = "retry"
    REQUEUE = "requeue"
    RESTART = "restart"
    CANCEL = "cancel"
    KILL = "kill"
    DISCARD = "discard"
    PRUNE = "prune"


CLEAR = "clear"
"""Discard the jobs of a queue that wait for a worker."""


class JobAction(NamedTuple):
    needs: str
    """The permission required, as `resource.verb` (see `permissions`)."""
    states: frozenset[State]
    """States a job must be in; jobs in other states are not changed."""
    change: Callable[[], transitions.Change]
    label: _StrPromise
    done_label: _StrPromise
    help: str = ""
    """What it does, for the API and the command line, which are in English."""
    warning: _StrOrPromise = ""
    """The consequence, if the action needs a confirmation."""
    list_label: _StrOrPromise = ""
    """Label in the menu of the list, if it differs from `label`."""
    makes_ready: bool = False
    """Whether workers can claim the changed jobs at once."""

    @property
    def done_in_english(self) -> str:
        with override(None):
            return str(self.done_label)

    def is_allowed(self, user: permissions.HasPermissions) -> bool:
        """Return whether the user may perform this action."""
        return permissions.may(user, self.needs)


JOB_ACTIONS: dict[str, JobAction] = {
    Verb.RETRY: JobAction(
        "job.retry", frozenset({State.RETRIES, State.DEAD}), lambda: transitions.requeued, _("Retry now"), _("Retried"),
        "Run failed jobs now: dead ones, and those that wait for a retry.",
        makes_ready=True,
    ),
    Verb.REQUEUE: JobAction(
        "job.requeue", sources(Event.REQUEUE), lambda: transitions.requeued, _("Run now"), _("Run manually"),
        "Run jobs now that are dead, scheduled, or wait for a retry.",
        makes_ready=True,
    ),
    Verb.RESTART: JobAction(
        "job.restart", sources(Event.REQUEUE), lambda: transitions.restarted, _("Start over"), _("Started over"),
        "Run dead, scheduled and retrying jobs now, from their first step on.",
        _("Their committed steps are forgotten, so their effects may happen a second time. This cannot be undone."),
        _("Start over (forget committed steps)"),
        makes_ready=True,
    ),
    Verb.CANCEL: JobAction(
        "job.cancel", UNFINISHED, lambda: transitions.cancelled, _("Cancel"), _("Cancelled"),
        "Remove waiting jobs, and ask workers of this package to stop running ones.",
        _("Waiting jobs are discarded. Running jobs are stopped within seconds (Python workers only)."),
        _("Cancel (discard waiting jobs, stop running ones)"),
    ),
    Verb.KILL: JobAction(
        "job.kill", sources(Event.KILL), lambda: transitions.killed(conf.get("DEAD_TTL")), _("Kill"), _("Killed"),
        "Make jobs dead that are not running.",
        _("They move to the dead jobs and do not run unless someone retries them."),
    ),
    Verb.DISCARD: JobAction(
        "job.discard", sources(Event.DISCARD), lambda: transitions.discarded, _("Discard"), _("Discarded"),
        "Discard jobs that are not running.",
        _("They are removed without running. This cannot be undone."),
        _("Discard (remove without running)"),
    ),
    Verb.PRUNE: JobAction(
        "job.prune", sources(Event.PURGE), lambda: transitions.purged, _("Delete"), _("Deleted"),
        "Delete finished jobs.",
        _("Their history and results are deleted. This cannot be undone."),
        _("Delete finished jobs"),
    ),
    # Scheduled and retrying jobs of the queue stay, as after QUEUE REMOVE (W24); the queue and its pause stay too.
    CLEAR: JobAction(
        "queue.clear", frozenset({State.ENQUEUED, State.BLOCKED}), lambda: transitions.discarded, _("Clear"),
        _("Cleared"),
        warning=_(
            "All waiting jobs in this queue are discarded. Its scheduled and retrying jobs, the queue itself and its "
            "pause stay. This cannot be undone."
        ),
    ),
}  # fmt: skip
"""Actions by the name used in URLs, buttons and subcommands. `CLEAR` acts on jobs of a queue, a `Verb` on any job."""


def get_allowed_actions(job: Job, user: permissions.HasPermissions) -> list[tuple[Verb, JobAction]]:
    """Return the actions that the user may perform on this job now.

    For a failed job retry and requeue have the same effect; only retry is returned. Kill is left out for a dead job, a
    new start for a job without steps.
    """
    allowed = [verb for verb in Verb if job.state in JOB_ACTIONS[verb].states and JOB_ACTIONS[verb].is_allowed(user)]
    superfluous = {Verb.REQUEUE} if Verb.RETRY in allowed else set()
    if Verb.RESTART in allowed and not steps.has_steps(job):
        superfluous.add(Verb.RESTART)
    if job.state == State.DEAD:
        superfluous.add(Verb.KILL)
    return [(verb, JOB_ACTIONS[verb]) for verb in allowed if verb not in superfluous]
