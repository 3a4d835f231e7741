"""The access policy: which permission shows which resource and field, and which permission each action needs.

Admin and API call `may` and `may_see`, and name no permission themselves. The command line checks none: its user is
the machine's administrator, with access to the database anyway. `REDACT` applies to all three, see `redaction`.

Three rules: a resource is shown by its `view` permission; contents of jobs (arguments, results, errors, progress) are
shown by `view_job` only, wherever they are stored; an action shows nothing: the API lets a user act who may not view,
and reports only whether the action succeeded, while a page of the admin requires both permissions.

An action on jobs is checked by `JobAction.is_allowed` in the admin, other rows by `admin.base.requires_permission`; in
the API `HasActionPermission` checks the `needs` of each view. The Meta of each model reads its labels; a new label
needs a migration. Docs: docs/security.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

APP = "django_faktory"

_VERBS: Mapping[str, str] = {
    "job": "view add change retry requeue restart kill discard prune cancel signal",
    "batch": "view retry",
    "queue": "view pause resume clear",
    "workerprocess": "view quiet terminate",
    "cronentry": "view add change delete pause resume run",
    "joblock": "view release",
    "limit": "view add change delete pause resume",
    "outboxentry": "view delete retry",
    "gearmonkeyfunction": "view audit",
}
"""The actions on each resource. Their permissions have the form of Django's own: `verb_resource`."""

ACTIONS: Mapping[str, str] = {
    **{f"{resource}.{verb}": f"{verb}_{resource}" for resource, verbs in _VERBS.items() for verb in verbs.split()},
    "overview.view": "view_statistics",
}
"""Every action, as `resource.verb`, and the permission it needs. A resource has the name of its admin model."""

FIELDS: Mapping[str, str] = {
    "batch.callbacks": "job.view",  # they are jobs: jobtype, arguments, whether they failed
    "batch.members": "job.view",
    "cronentry.args": "job.view",
    "cronentry.kwargs": "job.view",
    "cronentry.job": "job.view",
    "cronentry.note": "job.view",  # of a run: the error of an enqueue may quote arguments
    "outboxentry.job": "job.view",
    "outboxentry.error": "job.view",  # a server's message may quote the job
    "overview.errors": "job.view",
    "overview.running": "job.view",
    "overview.tasks": "job.view",  # names of tasks
    "overview.workers": "workerprocess.view",  # host names and process ids
    "queue.limit": "limit.view",
    "workerprocess.running": "job.view",
}
"""Fields that need the permission of a second action in addition to `view` of their resource; no other field does."""

PUBLIC_QUERY_FIELDS = frozenset({"states", "queues", "tasks", "batches", "jids", "older", "newer", "among"})
"""Query fields by which a user without `job.view` may select jobs for an action.

Results of a selection by other fields (`args`, `texts`, `messages`, `errors`, `about`) would reveal parts of a job that
the user may not see.
"""


_VIEWERS = frozenset(codename for codename in ACTIONS.values() if codename.startswith("view_"))
_OPERATORS = _VIEWERS | {
    ACTIONS[action]
    for action in (
        "job.retry", "job.requeue", "job.cancel", "job.change", "batch.retry", "queue.pause", "queue.resume",
        "workerprocess.quiet", "workerprocess.terminate", "cronentry.pause", "cronentry.resume", "cronentry.run",
        "joblock.release", "limit.pause", "limit.resume", "outboxentry.retry", "gearmonkeyfunction.audit",
    )
}  # fmt: skip
ROLES: Mapping[str, frozenset[str]] = {
    "Faktory viewers": _VIEWERS,
    "Faktory operators": _OPERATORS,
    "Faktory administrators": frozenset(ACTIONS.values()),
}
"""Groups that `faktory groups` creates, and their permissions.

Operators may retry, edit and cancel jobs, which discards waiting ones, but not kill, discard or delete jobs, nor clear
queues. They may run cron entries, but not enqueue a job of a task that they choose.
"""


class HasPermissions(Protocol):
    """A user of Django or of a project's own user model."""

    def has_perm(self, perm: str, obj: Any = None) -> bool:
        """Return whether the user has this permission."""


def needs(action: str) -> str:
    """Return the full name of the permission that an action needs. Raises KeyError for an unknown action."""
    return f"{APP}.{ACTIONS[action]}"


def may(user: HasPermissions, action: str) -> bool:
    """Return whether the user may perform this action, `resource.verb`. Raises KeyError for an unknown action."""
    return bool(user.has_perm(needs(action)))


def may_see(user: HasPermissions, resource: str, field: str | None = None) -> bool:
    """Return whether the user may see this resource, or this field of it."""
    # A field needs both permissions: that of its resource and that of the data that it shows.
    second = FIELDS.get(f"{resource}.{field}")
    return may(user, f"{resource}.view") and (second is None or may(user, second))


def forbidden_query_fields(user: HasPermissions, fields: Iterable[str]) -> list[str]:
    """Return the fields of a query by which this user may not select jobs, sorted."""
    return [] if may_see(user, "job") else sorted(set(fields) - PUBLIC_QUERY_FIELDS)


# Permissions that Django stores

Labels = tuple[tuple[str, str], ...]
"""Permissions in addition to Django's own, with their labels, in the form of Meta.permissions."""

JOB_PERMISSIONS: Labels = (
    ("retry_job", "Can retry failed jobs"),
    ("requeue_job", "Can run dead and waiting jobs now"),
    ("restart_job", "Can start jobs over from their first step"),
    ("kill_job", "Can kill jobs"),
    ("discard_job", "Can discard jobs that are not running"),
    ("prune_job", "Can delete finished jobs"),
    ("cancel_job", "Can cancel jobs, including running ones"),
    ("signal_job", "Can send signals to jobs"),
)
BATCH_PERMISSIONS: Labels = (("retry_batch", "Can retry failed jobs of a batch"),)
QUEUE_PERMISSIONS: Labels = (
    ("pause_queue", "Can pause queues"),
    ("resume_queue", "Can resume queues"),
    ("clear_queue", "Can clear queues"),
    ("view_statistics", "Can view the numbers of all jobs, queues and workers"),
)
WORKER_PERMISSIONS: Labels = (
    ("quiet_workerprocess", "Can quiet workers"),
    ("terminate_workerprocess", "Can terminate workers"),
)
CRON_PERMISSIONS: Labels = (
    ("pause_cronentry", "Can pause cron entries"),
    ("resume_cronentry", "Can resume cron entries"),
    ("run_cronentry", "Can run cron entries now"),
)
LOCK_PERMISSIONS: Labels = (("release_joblock", "Can release locks manually"),)
LIMIT_PERMISSIONS: Labels = (
    ("pause_limit", "Can pause tasks"),
    ("resume_limit", "Can resume tasks"),
)
OUTBOX_PERMISSIONS: Labels = (("retry_outboxentry", "Can retry outbox entries"),)
GEARMONKEY_PERMISSIONS: Labels = (("audit_gearmonkeyfunction", "Can recover lost GearMonkey jobs"),)
