"""Public names of a package that are imported on first use: their modules need Django's settings, apps or an extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def import_on_use(package: str, names_by_module: dict[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that has these names of its modules."""
    module_by_name = {name: module for module, names in names_by_module.items() for name in names}

    def get_name(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_by_name[name]}"), name)

    return get_name
