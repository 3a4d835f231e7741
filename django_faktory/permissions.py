"""What each act asks for: one permission each, defined here and nowhere else; admin and API ask for the same.

Looking, writing and editing have Django's own: view_…, add_…, change_…, delete_…. `needs` gives the full name, as
`user.has_perm` takes it. Pure: the models' Meta reads it.
"""

from __future__ import annotations

APP = "django_faktory"

# jobs; to enqueue asks for add_job, to edit for change_job
RETRY_JOB = "retry_job"
REQUEUE_JOB = "requeue_job"
KILL_JOB = "kill_job"
DISCARD_JOB = "discard_job"
PRUNE_JOB = "prune_job"
CANCEL_JOB = "cancel_job"

# batches
RETRY_BATCH = "retry_batch"

# queues
PAUSE_QUEUE = "pause_queue"
RESUME_QUEUE = "resume_queue"
CLEAR_QUEUE = "clear_queue"
VIEW_STATISTICS = "view_statistics"

# worker processes
QUIET_WORKER = "quiet_workerprocess"
TERMINATE_WORKER = "terminate_workerprocess"

# cron entries; to write, edit and delete those of the admin asks for Django's own
PAUSE_CRON = "pause_cronentry"
RESUME_CRON = "resume_cronentry"
RUN_CRON = "run_cronentry"

# locks
RELEASE_LOCK = "release_joblock"

# limits; to write, edit and delete them asks for Django's own
PAUSE_TASK = "pause_limit"
RESUME_TASK = "resume_limit"

# the outbox
RETRY_OUTBOX = "retry_outboxentry"

# GearMonkey
AUDIT_GEARMONKEY = "audit_gearmonkeyfunction"

Told = tuple[tuple[str, str], ...]
"""Names with their words, as Meta.permissions has them."""

JOB: Told = (
    (RETRY_JOB, "Can run failed jobs again now"),
    (REQUEUE_JOB, "Can run dead and waiting jobs now"),
    (KILL_JOB, "Can send jobs to dead"),
    (DISCARD_JOB, "Can drop jobs that do not run"),
    (PRUNE_JOB, "Can delete jobs that ended"),
    (CANCEL_JOB, "Can cancel jobs, those that run too"),
)
BATCH: Told = ((RETRY_BATCH, "Can retry what failed of a batch"),)
QUEUE: Told = (
    (PAUSE_QUEUE, "Can pause queues"),
    (RESUME_QUEUE, "Can resume queues"),
    (CLEAR_QUEUE, "Can drop all that is enqueued in a queue"),
    (VIEW_STATISTICS, "Can view the numbers of all jobs, queues and workers"),
)
WORKER: Told = (
    (QUIET_WORKER, "Can have workers fetch no more jobs"),
    (TERMINATE_WORKER, "Can have workers finish and exit"),
)
CRON: Told = (
    (PAUSE_CRON, "Can pause cron entries"),
    (RESUME_CRON, "Can resume cron entries"),
    (RUN_CRON, "Can run cron entries now"),
)
LOCK: Told = ((RELEASE_LOCK, "Can release locks by hand"),)
LIMIT: Told = (
    (PAUSE_TASK, "Can pause tasks"),
    (RESUME_TASK, "Can resume tasks"),
)
OUTBOX: Told = ((RETRY_OUTBOX, "Can let refused jobs be handed on again"),)
GEARMONKEY: Told = ((AUDIT_GEARMONKEY, "Can look for lost GearMonkey jobs"),)


def needs(codename: str) -> str:
    """The permission's full name."""
    return f"{APP}.{codename}"
