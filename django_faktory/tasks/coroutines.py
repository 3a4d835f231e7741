"""Name what to await, in place of Django's error about the ORM in a coroutine.

Django raises it before a query is sent, so nothing has happened yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from django.core.exceptions import SynchronousOnlyOperation

P = ParamSpec("P")
R = TypeVar("R")


def coroutine_error(called: str, instead: str) -> SynchronousOnlyOperation:
    """Return the error for a function that was called in a coroutine; `instead` is what to write."""
    return SynchronousOnlyOperation(f"{called}: it queries the database, which a coroutine cannot: write {instead}")


def names_awaitable(called: str, instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that query the database; see `coroutine_error`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except SynchronousOnlyOperation:
                raise coroutine_error(called, instead) from None

        return call

    return decorate
