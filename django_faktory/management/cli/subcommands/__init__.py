"""The subcommands: functions with the decorator `subcommand`, in any module of this package."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..subcommand import Subcommand


def subcommands() -> dict[str, Subcommand]:
    """Return all subcommands by name, in the order of their modules' names."""
    by_name: dict[str, Subcommand] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        for function in vars(import_module(f"{__name__}.{module.name}")).values():
            by_name |= {one.name: one for one in getattr(function, "subcommands", ())}
    return by_name
