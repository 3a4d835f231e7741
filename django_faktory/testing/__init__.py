"""Test helpers for projects, for pytest and unittest: see `docs/testing.md`.

Importable before Django's apps are ready, because settings name `testing.backends`; needs no pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assertions import EnqueuedJob, MadeBatch, assert_enqueued, assert_enqueues, enqueued_jobs, made_batches
    from .draining import JobFailed, Ran, drain
    from .inlining import inline
    from .live import LiveFaktory, LiveFaktoryMixin

__all__ = [
    "EnqueuedJob",
    "JobFailed",
    "LiveFaktory",
    "LiveFaktoryMixin",
    "MadeBatch",
    "Ran",
    "assert_enqueued",
    "assert_enqueues",
    "drain",
    "enqueued_jobs",
    "inline",
    "made_batches",
]

_NAMES_BY_MODULE = {
    "assertions": ("EnqueuedJob", "MadeBatch", "assert_enqueued", "assert_enqueues", "enqueued_jobs", "made_batches"),
    "draining": ("JobFailed", "Ran", "drain"),
    "inlining": ("inline",),
    "live": ("LiveFaktory", "LiveFaktoryMixin"),
}


def __getattr__(name: str) -> Any:
    # Loaded lazily: these modules import models, and the settings' backends in this package are built while apps load.
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
