"""Functions of higher layers that query sets call; `FaktoryConfig.ready` installs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import AppRegistryNotReady


# Late imports of the layers above would be a loop of imports, which the contracts in pyproject.toml refuse (ADR 0037).
class Operations(NamedTuple):
    """The functions: models import no higher layer."""

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
    # A module that uses them at import, while the apps still load, gets Django's own error for this.
    if not _installed:
        raise AppRegistryNotReady("django_faktory: its AppConfig.ready() has not been called yet")
    return _installed[0]
