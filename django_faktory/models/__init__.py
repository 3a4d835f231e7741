"""The stored models and the constraints that enforce their invariants. State changes live in `store`.

Imports no broker and no task, and one setting: the alias of `database`. Times are the database's, aware, in UTC.
"""

from .alarm import AlarmRecord
from .batch import Batch
from .cron import CronEntry, CronRun
from .history import History
from .job import Job, JobQuerySet, Tracking
from .limit import Limit, Limiter
from .lock import JobLock
from .outbox import OutboxEntry
from .queue import Queue
from .statistics import Delta, Measure
from .step import JobSignal, JobStep
from .turn import MaintenanceTurn
from .worker import WorkerProcess

__all__ = [
    "AlarmRecord",
    "Batch",
    "CronEntry",
    "CronRun",
    "Delta",
    "History",
    "Job",
    "JobLock",
    "JobQuerySet",
    "JobSignal",
    "JobStep",
    "Limit",
    "Limiter",
    "MaintenanceTurn",
    "Measure",
    "OutboxEntry",
    "Queue",
    "Tracking",
    "WorkerProcess",
]
