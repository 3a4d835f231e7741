"""Durable, transactional background jobs for Django: a Faktory server, a worker and a Tasks backend on the ORM.

Importable before Django's apps are ready; imports no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Discard, FaktoryError, Kill, MissingObject, NotUnique, Retry, TaskTimeout

if TYPE_CHECKING:
    from .tasks import JobContext, task

__all__ = [
    "Discard",
    "FaktoryError",
    "JobContext",
    "Kill",
    "MissingObject",
    "NotUnique",
    "Retry",
    "TaskTimeout",
    "task",
]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # These need the Tasks API, and Django's settings at the moment they decorate; not before.
    if name in ("JobContext", "task"):
        from . import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
