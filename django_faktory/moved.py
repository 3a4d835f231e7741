"""Raise an ImportError that names the new path when a moved public module is imported.

Importing this module installs a finder at the end of `sys.meta_path`, where Python asks it only for modules that no
other finder knows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "django_faktory.api": "django_faktory.contrib.api",
    "django_faktory.batches": "django_faktory.tasks.batch",
    "django_faktory.compat": "django_faktory.tasks.compat",
    "django_faktory.crontab": "django_faktory.tasks.cron",
    "django_faktory.gating": "django_faktory.core.limits",
    "django_faktory.gearmonkey": "django_faktory.contrib.gearmonkey",
    "django_faktory.limiting": "django_faktory.tasks.limits",
    "django_faktory.locket": "django_faktory.core.locket",
    "django_faktory.metrics": "django_faktory.contrib.metrics",
    "django_faktory.middleware": "django_faktory.tasks.middleware",
    "django_faktory.redaction": "django_faktory.tasks.redaction",
    "django_faktory.results": "django_faktory.tasks.results",
    "django_faktory.tls": "django_faktory.brokers.tls",
    "django_faktory.tracing": "django_faktory.tasks.tracing",
    "django_faktory.transfer": "django_faktory.contrib.transfer",
}
"""Old and new paths of public modules; the submodules of a package have moved with it."""


def new_place(path: str) -> str:
    """Return "… has moved: import …" for the dotted path of a module that has moved, or of a name in it; else ""."""
    # Two parts name the module of the package root that has moved; its submodules and names have moved with it.
    old_place = ".".join(path.split(".")[:2])
    return f"{old_place} has moved: import {MOVED[old_place]}" if old_place in MOVED else ""


class MovedFinder:
    """Finder that finds nothing; it raises ImportError for the old places."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ImportError if a module of this name has moved."""
        del path, target  # parts of the protocol
        if message := new_place(name):
            raise ImportError(message, name=name)


# At the end: a module that exists is found before, so only a failing import takes longer.
sys.meta_path.append(MovedFinder())
