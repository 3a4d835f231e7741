"""Tasks: the decorator, options, arguments, results, batches and middleware.

Importable before Django's apps are ready: names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import JobContext, task

__all__ = ["JobContext", "task"]


def __getattr__(name: str) -> Any:
    # `base` needs the Tasks API and Django's settings.
    if name in __all__:
        from . import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
