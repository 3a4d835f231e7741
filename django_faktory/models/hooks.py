"""Functions of higher layers that query sets call; `FaktoryConfig.ready` installs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import AppRegistryNotReady


# Not imported, not even inside functions: pyproject.toml forbids this cycle (ADR 0037).
class Operations(NamedTuple):
    """The functions that query sets call."""

    encode_args: Callable[[Sequence[Any]], list[Any]]
    """Return positional arguments as they are stored."""
    execute: Callable[[str, Any], int]
    """Apply a bulk verb, such as "kill", to the jobs of a query set; return how many were changed."""
    pause: Callable[[Any, str, str], int]
    """Pause the queues of a query set, by a user and for a reason; return how many were not paused before."""
    resume: Callable[[Any], int]
    """Resume the queues of a query set; return how many were paused."""


_installed: list[Operations] = []


def install(functions: Operations) -> None:
    """Set the functions that query sets call."""
    _installed[:] = [functions]


def operations() -> Operations:
    """Return the functions that were installed. Raises AppRegistryNotReady before."""
    # Django's own error for code that runs at import, while the apps still load.
    if not _installed:
        raise AppRegistryNotReady("django_faktory: its AppConfig.ready() has not been called yet")
    return _installed[0]
