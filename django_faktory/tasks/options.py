"""Validation of the options of `@task`: `RULES` has a predicate and an error text for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import iscoroutinefunction
from typing import Any

from ..core.limits import Allowance, InvalidLimit
from ..core.payloads import FUNCTION, MAX_BACKTRACE_LINES, MAX_NAME, MAX_RESERVE_FOR, MIN_RESERVE_FOR

TIMEOUT_MARGIN_S = 30
"""Least seconds by which a reservation exceeds the timeout: the worker must report before the broker reclaims the job.
"""
# The reservation has to cover the timeout, and the protocol reserves a day at most (W9).
LONGEST_TIMEOUT_S = MAX_RESERVE_FOR - TIMEOUT_MARGIN_S

_MAX_INTEGER = 2**31 - 1


_OPTIONS_ELSEWHERE = {
    "autoretry_for": "retry_on",
    "bind": "takes_context",
    "default_retry_delay": "backoff",
    "expires": "expires_in",
    "max_retries": "max_attempts",
    "queue": "queue_name",
    "rate_limit": "limit",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "soft_time_limit": "timeout",
    "throws": "discard_on",
    "time_limit": "timeout",
}
"""Option names of those libraries, with their equivalents here."""
_CALLS_ELSEWHERE = {
    "apply_async": "using(…).enqueue(…)",
    "apply_async_on_commit": "using(…).enqueue(…), which commits with its transaction",
    "defer": "enqueue(…)",
    "delay": "enqueue(…)",
    "delay_on_commit": "enqueue(…), which commits with its transaction",
    "perform_async": "enqueue(…)",
    "s": "callback(…), for a batch",
    "send": "enqueue(…)",
    "si": "callback(…), for a batch",
}
"""Method names of Celery, Dramatiq, Huey, Procrastinate and Sidekiq, with their equivalents here."""


def suggest_option(name: str, known: Iterable[str]) -> str:
    """Return a hint at a similar option, as the end of an error message; "" if none is similar."""
    # Names of other libraries first: a similar spelling is a worse guess than a known meaning.
    suggestions = (
        [_OPTIONS_ELSEWHERE[name]] if name in _OPTIONS_ELSEWHERE else get_close_matches(name, list(known), n=1)
    )
    return f"; did you mean {suggestions[0]!r}?" if suggestions else ""


def suggest_method(name: str) -> str:
    """Return a hint at the equivalent of another library's method, as the end of an error message, or ""."""
    return f": here it is {_CALLS_ELSEWHERE[name]}" if name in _CALLS_ELSEWHERE else ""


def classes_of(value: Any) -> Any:
    """Return a tuple of one class or several; return any other value unchanged, so that its rule reports it."""
    if isinstance(value, type):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _are_exceptions(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(item, type) and issubclass(item, BaseException) for item in value
    )


def _is_whole(value: Any, low: int, high: int) -> bool:
    # bool is a subclass of int: True would otherwise count as 1.
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_limit(value: Any) -> bool:
    try:
        return value is None or bool(Allowance.of(value))
    except InvalidLimit:
        return False


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "jobtype": (_is_name, f"a name of 1 to {MAX_NAME} printable characters"),
    "max_attempts": (
        lambda value: value is None or _is_whole(value, 1, _MAX_INTEGER),
        f"a whole number from 1 (never retried) to {_MAX_INTEGER}",
    ),
    "backoff": (
        lambda value: value is None or (callable(value) and not iscoroutinefunction(value)),
        "a function, not a coroutine, of (exception, task_result) that returns seconds",
    ),
    "retry_on": (lambda value: value is None or _are_exceptions(value), "an exception class, or a list of them"),
    "discard_on": (_are_exceptions, "an exception class, or a list of them"),
    "reserve_for": (
        lambda value: value is None or _is_whole(value, MIN_RESERVE_FOR, MAX_RESERVE_FOR),
        f"whole seconds from {MIN_RESERVE_FOR} to {MAX_RESERVE_FOR}",
    ),
    "result_ttl": (
        lambda value: value is None or _is_whole(value, 0, _MAX_INTEGER),
        f"whole seconds from 0 to {_MAX_INTEGER}",
    ),
    "atomic": (lambda value: isinstance(value, bool), "True or False"),
    "backtrace": (
        lambda value: _is_whole(value, -1, MAX_BACKTRACE_LINES),
        f"a whole number from -1 (none) to {MAX_BACKTRACE_LINES}",
    ),
    "unique_for": (lambda value: value is None or _is_duration(value), "a number of seconds above 0"),
    "unique_until": (lambda value: value in ("success", "start"), '"success" or "start"'),
    "expires_in": (lambda value: value is None or _is_duration(value), "a number of seconds above 0"),
    "lock": (
        # `is`, not `==`: 1 equals True, and is no key.
        lambda value: value is None or value is True or callable(value) or (isinstance(value, str) and value != ""),
        "a key, True, or a function of the arguments that returns one of these or None",
    ),
    "limit": (_is_limit, 'a number, a rate such as "100/s", or {"concurrency": 5, "rate": "10/m", "burst": 3}'),
    "limit_key": (
        lambda value: value is None or callable(value) or (isinstance(value, str) and value != ""),
        "a key, or a function of the arguments that returns one or None",
    ),
    "track": (lambda value: isinstance(value, bool), "True or False"),
    "encrypt": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "plain_json": (lambda value: isinstance(value, bool), "True or False"),
    "missing": (lambda value: value in ("fail", "discard"), '"fail" or "discard"'),
    "gearmonkey": (
        lambda value: value == "" or (isinstance(value, str) and re.fullmatch(FUNCTION, value) is not None),
        "the name of a function: 1 to 100 letters, digits and _ . - { }",
    ),
    "timeout": (
        lambda value: value is None or (_is_duration(value) and value <= LONGEST_TIMEOUT_S),
        f"seconds above 0, at most {LONGEST_TIMEOUT_S}",
    ),
}
