"""Find database backends that prepare the session for each cursor, such as those of multi-tenant projects.

django-tenants sets `search_path` in `_cursor`; backends for row-level security set a session variable in `cursor` or
`create_cursor`. Statements on such a connection must go through `connection.cursor()`.
"""

from __future__ import annotations

import functools
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

_CURSOR_METHODS = ("cursor", "_cursor", "create_cursor", "_prepare_cursor", "make_cursor")


def own_methods(connection: BaseDatabaseWrapper) -> list[str]:
    """Return the names of methods and options that create this connection's cursors and are not Django's own."""
    connection = connection.ops.connection
    backend: Any = type(connection)
    patched = [name for name in _CURSOR_METHODS if _is_patched(connection, name)]
    factory = ["OPTIONS['cursor_factory']"] if connection.settings_dict["OPTIONS"].get("cursor_factory") else []
    return [*_overridden(backend), *patched, *factory]


def has_own_cursor(connection: BaseDatabaseWrapper) -> bool:
    """Return whether statements have to go through `connection.cursor()`. Fast enough to call for each statement."""
    connection = connection.ops.connection  # the wrapper itself, also of `django.db.connection`, which is a proxy
    backend: Any = type(connection)
    attributes = connection.__dict__  # debug toolbars patch `cursor` of the instance
    return (
        ("cursor" in attributes and _is_patched(connection, "cursor"))
        or "_cursor" in attributes
        or "create_cursor" in attributes
        or "cursor_factory" in connection.settings_dict["OPTIONS"]
        or bool(_overridden(backend))
    )


def _is_patched(connection: BaseDatabaseWrapper, name: str) -> bool:
    # Django's TestCase blocks aliases by patching `cursor`, and puts the class's method back as an attribute.
    method = vars(connection).get(name)
    return method is not None and getattr(method, "__func__", None) is not getattr(type(connection), name)


@functools.cache
def _overridden(backend: type[BaseDatabaseWrapper]) -> tuple[str, ...]:
    """Return the methods of a backend that are defined outside Django, patched ones included."""
    names = [name for name in _CURSOR_METHODS if not _is_defined_in_django(getattr(backend, name))]
    # Compared with the base class, not by module: pytest-django replaces this one on the base class for a while.
    if backend.ensure_connection is not BaseDatabaseWrapper.ensure_connection:
        names.append("ensure_connection")
    return tuple(names)


def _is_defined_in_django(method: object) -> bool:
    # A decorator that uses functools.wraps copies __module__, but not the globals of its own wrapper.
    module = getattr(method, "__globals__", {}).get("__name__", "")
    return bool(module.startswith("django."))
