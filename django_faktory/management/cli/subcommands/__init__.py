"""The subcommands: each module of this package lists its own in `SUBCOMMANDS`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..subcommand import Subcommand


def subcommands() -> dict[str, Subcommand]:
    """Return all subcommands by name, in the order of their modules' names."""
    by_name: dict[str, Subcommand] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        for subcommand in import_module(f"{__name__}.{module.name}").SUBCOMMANDS:
            by_name[subcommand.name] = subcommand
    return by_name
