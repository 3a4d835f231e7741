"""The table of task options: `OPTIONS` has the rule of each, its member of `custom`, and whether workers read it.

`to_custom` writes the options into a job. Defaults and types are the fields of `tasks.base.FaktoryTask`; `TaskOptions`
describes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import iscoroutinefunction
from operator import attrgetter
from typing import Any, NamedTuple

from ..core.limits import Allowance, InvalidLimit
from ..core.payloads import FUNCTION, MAX_BACKTRACE_LINES, MAX_NAME, MAX_RESERVE_FOR, MIN_RESERVE_FOR
from ..core.suggestions import find_closest

TIMEOUT_MARGIN_S = 30
"""Minimum seconds by which a reservation exceeds the timeout: the worker must report before the broker reclaims the
job.
"""
# The reservation has to cover the timeout, and the protocol reserves a day at most (W9).
LONGEST_TIMEOUT_S = MAX_RESERVE_FOR - TIMEOUT_MARGIN_S

_MAX_INTEGER = 2**31 - 1
_FLAG = "True or False"
_DURATION = "a number of seconds above 0"
_TIMEOUT = f"seconds above 0, at most {LONGEST_TIMEOUT_S}"

_OPTION_OF_OTHER_LIBRARY = {
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
"""Option names of Celery, Dramatiq, Huey, Procrastinate and Sidekiq, with the options to use here."""
_METHOD_OF_OTHER_LIBRARY = {
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
"""Method names of the same libraries, with the calls to use here."""


def suggest_option(name: str, known: Iterable[str]) -> str:
    """Return a hint at a similar option, as the end of an error message; "" if none is similar."""
    # Names of other libraries first: a similar spelling is a worse guess than a known meaning.
    meant = _OPTION_OF_OTHER_LIBRARY.get(name)
    return f"; did you mean {meant!r}?" if meant else did_you_mean(name, known)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar of the known names, as the end of an error message; "" if none is similar."""
    similar = find_closest(name, known)
    return f"; did you mean {similar!r}?" if similar else ""


def suggest_method(name: str) -> str:
    """Return a hint at the equivalent of another library's method, as the end of an error message, or ""."""
    return f": here it is {_METHOD_OF_OTHER_LIBRARY[name]}" if name in _METHOD_OF_OTHER_LIBRARY else ""


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


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_key(value: Any) -> bool:
    return value is None or callable(value) or (isinstance(value, str) and value != "")


def _is_duration(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def is_timeout(value: Any) -> bool:
    """Return whether the value is a timeout in seconds, or None."""
    return value is None or (_is_duration(value) and value <= LONGEST_TIMEOUT_S)


def _is_limit(value: Any) -> bool:
    try:
        return value is None or bool(Allowance.of(value))
    except InvalidLimit:
        return False


def _convert_lock(value: Any, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | bool:
    key: str | bool | None = value(*args, **kwargs) if callable(value) else value
    # A lock of None opts out of LOCKET as well, which only `false` does (docs/locks.md).
    return False if key is None else key


def _convert_limit_key(value: Any, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    key = value(*args, **kwargs) if callable(value) else value
    # A limit that is defined on the task has keys of its own.
    return key if task.limit is None or not isinstance(key, str) else f"{task.jobtype}:{key}"


class TaskOption(NamedTuple):
    """One option of a task."""

    is_valid: Callable[[Any], bool]
    expected: str
    """Text after "expected" in the error about a value that is not valid."""
    is_read_at_run: bool = False
    """Whether workers read it from the registry, at the run of a job; the others act when the job is enqueued."""
    member: str = ""
    """Member of the job's `custom` that has its value, in the form every Faktory client uses; "": none."""
    convert: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any] = lambda value, *_: value
    """Return the member's value for a value other than None, the task and the arguments; None: leave it out."""


OPTIONS: dict[str, TaskOption] = {
    "jobtype": TaskOption(_is_name, f"a name of 1 to {MAX_NAME} printable characters"),
    "max_attempts": TaskOption(
        lambda value: value is None or _is_whole(value, 1, _MAX_INTEGER),
        f"a whole number from 1 (never retried) to {_MAX_INTEGER}",
    ),
    "backoff": TaskOption(
        lambda value: value is None or (callable(value) and not iscoroutinefunction(value)),
        "a function, not a coroutine, of (exception, task_result) that returns seconds",
        is_read_at_run=True,
    ),
    "retry_on": TaskOption(
        lambda value: value is None or _are_exceptions(value),
        "an exception class, or a list of them",
        is_read_at_run=True,
    ),
    "discard_on": TaskOption(_are_exceptions, "an exception class, or a list of them", is_read_at_run=True),
    "reserve_for": TaskOption(
        lambda value: value is None or _is_whole(value, MIN_RESERVE_FOR, MAX_RESERVE_FOR),
        f"whole seconds from {MIN_RESERVE_FOR} to {MAX_RESERVE_FOR}",
    ),
    "result_ttl": TaskOption(
        lambda value: value is None or _is_whole(value, 0, _MAX_INTEGER),
        f"whole seconds from 0 to {_MAX_INTEGER}",
    ),
    "atomic": TaskOption(_is_flag, _FLAG, is_read_at_run=True),
    "backtrace": TaskOption(
        lambda value: _is_whole(value, -1, MAX_BACKTRACE_LINES),
        f"a whole number from -1 (none) to {MAX_BACKTRACE_LINES}",
    ),
    "unique_for": TaskOption(_is_duration, _DURATION, member="unique_for"),
    "unique_until": TaskOption(
        lambda value: value in ("success", "start"),
        '"success" or "start"',
        member="unique_until",
        convert=lambda value, task, *_: value if task.unique_for is not None else None,
    ),
    "expires_in": TaskOption(_is_duration, _DURATION, member="expires_in"),
    # A number, as the protocol has it (W27).
    "track": TaskOption(_is_flag, _FLAG, member="track", convert=lambda value, *_: 1 if value else None),
    "about": TaskOption(
        lambda value: isinstance(value, str), "a text", member="about", convert=lambda value, *_: value or None
    ),
    "lock": TaskOption(
        # `is`, not `==`: 1 equals True, and is no key.
        lambda value: value is True or _is_key(value),
        "a key, True, or a function of the arguments that returns one of these or None",
        member="lock",
        convert=_convert_lock,
    ),
    "limit": TaskOption(
        _is_limit, 'a number, a rate such as "100/s", or {"concurrency": 5, "rate": "10/m", "burst": 3}'
    ),
    "limit_key": TaskOption(
        _is_key,
        "a key, or a function of the arguments that returns one or None",
        member="limit",
        convert=_convert_limit_key,
    ),
    "encrypt": TaskOption(lambda value: value is None or _is_flag(value), "True, False or None"),
    "plain_json": TaskOption(_is_flag, _FLAG, is_read_at_run=True),
    "missing": TaskOption(lambda value: value in ("fail", "discard"), '"fail" or "discard"', is_read_at_run=True),
    "gearmonkey": TaskOption(
        lambda value: value == "" or (isinstance(value, str) and re.fullmatch(FUNCTION, value) is not None),
        "the name of a function: 1 to 100 letters, digits and _ . - { }",
    ),
    "timeout": TaskOption(is_timeout, _TIMEOUT, is_read_at_run=True),
    "own_timeout": TaskOption(is_timeout, _TIMEOUT, member="timeout"),
}

_SENT = tuple((name, option.member, option.convert) for name, option in OPTIONS.items() if option.member)


# A tuple of the values of a task. Each copy of a task is compared by it, also one for a single enqueue.
options_at_run = attrgetter("takes_context", *(name for name, option in OPTIONS.items() if option.is_read_at_run))


def to_custom(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's options as members of `custom`."""
    custom: dict[str, Any] = {}
    for name, member, convert in _SENT:
        value = getattr(task, name)
        if value is not None and (sent := convert(value, task, args, kwargs)) is not None:
            custom[member] = sent
    return custom
