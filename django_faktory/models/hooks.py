"""Functions of higher layers that query sets call; `FaktoryConfig.ready` installs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import AppRegistryNotReady


# Imports of the layers above, even late ones, would be a cycle, which pyproject.toml forbids (ADR 0037).
class Operations(NamedTuple):
    """The installed functions, because models must not import higher layers."""

    encode_args: Callable[[Sequence[Any]], list[Any]]
    """Return positional arguments as they are stored."""
    execute: Callable[[str, Any], int]
    pause: Callable[[Any], int]
    resume: Callable[[Any], int]


_installed: list[Operations] = []


def install(functions: Operations) -> None:
    """Set the functions that querysets call."""
    _installed[:] = [functions]


def operations() -> Operations:
    """Return the functions that were installed. Raises AppRegistryNotReady before."""
    # Django's own error for code that runs at import, while the apps still load.
    if not _installed:
        raise AppRegistryNotReady("django_faktory: its AppConfig.ready() has not been called yet")
    return _installed[0]
