"""Tasks: the decorator, options, arguments, results, batches and middleware.

Importable before Django's apps are ready: names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_names import import_on_use

if TYPE_CHECKING:
    from .base import JobContext, task

__all__ = ["JobContext", "task"]

__getattr__ = import_on_use(__name__, {"base": __all__})
