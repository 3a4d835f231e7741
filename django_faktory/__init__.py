"""Durable, transactional background jobs for Django: a Faktory server, a worker and a Tasks backend on the ORM.

Defines the public names of the package. Importable before Django's apps are ready: names that need the Tasks API or
settings (`task`, `push`, `Batch`, `Cron`, …) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy_names import import_on_use
from .errors import (
    BatchClosed,
    Discard,
    FaktoryError,
    Kill,
    Later,
    MissingObject,
    NotUnique,
    ResultTimeout,
    Retry,
    TaskTimeout,
    UnknownBatch,
    WaitTimedOut,
)

if TYPE_CHECKING:
    from .core.cron import Cron
    from .tasks.base import JobContext, task
    from .tasks.batch import Batch
    from .tasks.external import apush, push
    from .tasks.middleware import Middleware

__all__ = [
    "Batch",
    "BatchClosed",
    "Cron",
    "Discard",
    "FaktoryError",
    "JobContext",
    "Kill",
    "Later",
    "Middleware",
    "MissingObject",
    "NotUnique",
    "ResultTimeout",
    "Retry",
    "TaskTimeout",
    "UnknownBatch",
    "WaitTimedOut",
    "apush",
    "push",
    "task",
]
__version__ = "1.0.0"

# These modules import the Tasks API and read Django's settings, which may not be ready before.
__getattr__ = import_on_use(
    __name__,
    {
        "core.cron": ("Cron",),
        "tasks.base": ("JobContext", "task"),
        "tasks.batch": ("Batch",),
        "tasks.external": ("apush", "push"),
        "tasks.middleware": ("Middleware",),
    },
)
