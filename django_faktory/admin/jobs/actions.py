"""Actions on jobs in the admin: label, permission, legal states, and a warning if the action destroys data.

`operations.bulk` performs them.
"""

from __future__ import annotations

from typing import NamedTuple

from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ...core.lifecycle import State
from ...models import Job, permissions
from ...operations import bulk
from ..formats import StrOrPromise


class JobAction(NamedTuple):
    label: StrOrPromise
    done_label: StrOrPromise
    needs: str
    """Name of the action in `permissions.ACTIONS`, such as `job.retry`."""
    warning: StrOrPromise = ""
    """Consequence that the confirmation page states; without one the action needs no confirmation."""
    list_label: StrOrPromise = ""
    """Label in the menu of the list, if it differs from `label`."""

    def is_allowed(self, request: HttpRequest) -> bool:
        """Return whether the user may perform this action."""
        return permissions.may(request.user, self.needs)


ACTIONS = {
    "retry": JobAction(_("Retry now"), _("Retried"), "job.retry"),
    "requeue": JobAction(_("Run now"), _("Run manually"), "job.requeue"),
    "cancel": JobAction(
        _("Cancel"), _("Cancelled"), "job.cancel",
        _("Waiting jobs are discarded. Running jobs are stopped within seconds (Python workers only)."),
        _("Cancel (discard waiting jobs, stop running ones)"),
    ),
    "kill": JobAction(
        _("Kill"), _("Killed"), "job.kill",
        _("They move to the dead jobs and do not run unless someone retries them."),
    ),
    "discard": JobAction(
        _("Discard"), _("Discarded"), "job.discard",
        _("They are removed without running. This cannot be undone."),
        _("Discard (remove without running)"),
    ),
    "prune": JobAction(
        _("Delete"), _("Deleted"), "job.prune",
        _("Their history and results are deleted. This cannot be undone."),
        _("Delete finished jobs"),
    ),
    "clear": JobAction(
        _("Clear"), _("Cleared"), "queue.clear",
        _(
            "All waiting jobs in this queue are discarded. Its scheduled and retrying jobs, the queue itself and its "
            "pause stay. This cannot be undone."
        ),
    ),
}  # fmt: skip
"""Actions by the name used in URLs and buttons. `clear` acts on the jobs of a queue, the other actions on any job."""


def get_allowed_actions(job: Job, request: HttpRequest) -> list[tuple[str, JobAction]]:
    """Return the actions that the user may perform on this job now.

    For a failed job retry and requeue have the same effect; only retry is returned. Kill is left out for a dead job.
    """
    allowed = [
        (name, action)
        for name, action in ACTIONS.items()
        if name != "clear" and job.state in bulk.STATES[name] and action.is_allowed(request)
    ]
    names = [name for name, _action in allowed]
    superfluous = {"requeue"} if "retry" in names else set()
    if job.state == State.DEAD:
        superfluous.add("kill")
    return [(name, action) for name, action in allowed if name not in superfluous]
