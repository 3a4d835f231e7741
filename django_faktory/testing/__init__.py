"""Test helpers for projects, for pytest and unittest: see `docs/testing.md`.

Importable before Django's apps are ready, because settings name `testing.backends`; needs no pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_names import import_on_use

if TYPE_CHECKING:
    from .assertions import EnqueuedJob, MadeBatch, assert_enqueued, assert_enqueues, enqueued_jobs, made_batches
    from .draining import JobFailed, Ran, drain
    from .inlining import inline
    from .interruptions import interrupt_after
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
    "interrupt_after",
    "made_batches",
]

_ASSERTIONS = ("EnqueuedJob", "MadeBatch", "assert_enqueued", "assert_enqueues", "enqueued_jobs", "made_batches")
# These modules import models, and the settings' backends in this package are built while apps load.
__getattr__ = import_on_use(
    __name__,
    {
        "assertions": _ASSERTIONS,
        "draining": ("JobFailed", "Ran", "drain"),
        "inlining": ("inline",),
        "interruptions": ("interrupt_after",),
        "live": ("LiveFaktory", "LiveFaktoryMixin"),
    },
)
