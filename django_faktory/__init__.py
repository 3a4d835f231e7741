"""Durable, transactional background jobs for Django: a Faktory server, a worker and a Tasks backend on the ORM.

Defines the public names of the package. Importable before Django's apps are ready: names that need the Tasks API or
settings (`task`, `push`, `Batch`, `Cron`, …) are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    BatchClosed,
    Discard,
    FaktoryError,
    Kill,
    MissingObject,
    NotUnique,
    ResultTimeout,
    Retry,
    TaskTimeout,
    UnknownBatch,
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
    "Middleware",
    "MissingObject",
    "NotUnique",
    "ResultTimeout",
    "Retry",
    "TaskTimeout",
    "UnknownBatch",
    "apush",
    "push",
    "task",
]
__version__ = "1.0.0rc1"


def __getattr__(name: str) -> Any:
    # On first use: these modules import the Tasks API and read Django's settings, which may not be ready before.
    if name in ("JobContext", "task"):
        from .tasks import base

        return getattr(base, name)
    if name == "Cron":
        from .core.cron import Cron

        return Cron
    if name in ("apush", "push"):
        from .tasks import external

        return getattr(external, name)
    if name == "Middleware":
        from .tasks.middleware import Middleware

        return Middleware
    if name == "Batch":
        from .tasks.batch import Batch

        return Batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
