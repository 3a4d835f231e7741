"""Find problems of tasks that Django's own checks miss, and add remedies to Django's error messages.

`FaktoryBackend.validate_task` calls `problem_with` and `remedy_for`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import lru_cache
from types import FunctionType
from typing import Any

from .compat import Task
from .options import did_you_mean


def problem_with(task: Task[..., Any]) -> str:
    """Return a problem that Django does not detect or reports unclearly; "" if there is none."""
    if not isinstance(task.priority, int | float):
        return f"priority: expected a whole number from -100 to 100, got {task.priority!r:.80}"
    # Django's own messages about other callables are clear.
    return _problem_with_function(task.func) if inspect.isfunction(task.func) else ""


@lru_cache(maxsize=4096)  # called at each enqueue, and functions do not change
def _problem_with_function(func: FunctionType) -> str:
    if func.__module__ == "__main__":
        return (
            "it is defined in the main program, which workers do not import; move it to a module, such as the tasks.py "
            "of an app"
        )
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        return "expected a function that returns, got a generator: its body would never run; collect what it yields"
    first_parameter = next(iter(func.__code__.co_varnames[: func.__code__.co_argcount]), "")
    if "." in func.__qualname__ and "<locals>" not in func.__qualname__ and first_parameter in ("self", "cls"):
        return (
            f"expected a function, got a method: a job has no {first_parameter}; move it out of its class and pass an "
            "id"
        )
    return ""


def name_of(task: Task[..., Any]) -> str:
    """Return a task's name for a message, for any kind of function."""
    func = task.func
    return f"{getattr(func, '__module__', '?')}.{getattr(func, '__qualname__', repr(func))}"


def remedy_for(message: str, *, alias: str, queues: Collection[str], queue: str) -> str:
    """Return a remedy for one of Django's error messages; "" if the message suffices."""
    if "module level" in message:
        return " A worker finds it by its name: move it out of the function or class around it."
    if "first argument" in message:
        return " Make it the first argument: def task(context, …)."
    if "aware" in message:
        return " Pass a timedelta, or timezone.now() + timedelta(…) of django.utils."
    if message.startswith("Queue "):
        names = sorted(map(str, queues))
        return (
            f" TASKS[{alias!r}]['QUEUES'] has {', '.join(names)}: add it there, or set it to [] to allow any"
            f"{did_you_mean(str(queue), names)}"
        )
    return ""
