"""Match the arguments of a job with the parameters of its task, and find that task. Used by the admin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any, NamedTuple

from ..core.logs import get_logger
from ..tasks.base import FaktoryTask, find_registered, import_tasks, registered

logger = get_logger(__name__)


class BoundArgument(NamedTuple):
    parameter: Parameter
    name: str
    """The parameter's name; `*name` for one of its further positional values, the keyword for a further keyword."""
    value: Any


def find_task(jobtype: str) -> FaktoryTask[..., Any] | None:
    """Return the task of this project with this name, or None."""
    _import_tasks()
    return find_registered(jobtype)


def find_tasks() -> tuple[FaktoryTask[..., Any], ...]:
    _import_tasks()
    return registered()


@cache
def _import_tasks() -> None:
    """Import the tasks of all apps, once: a web process may not have imported them."""
    for module, error in import_tasks():
        logger.error(
            "tasks cannot be imported; pages show their jobs without names of arguments module=%s",
            module,
            exc_info=error,
        )


def parameters_of(task: FaktoryTask[..., Any]) -> list[Parameter]:
    """Return the parameters that receive arguments of a job: without the context, which the worker passes."""
    parameters = list(signature(task.func).parameters.values())
    return parameters[1:] if task.takes_context else parameters


def bind(task: FaktoryTask[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[BoundArgument] | None:
    """Return the arguments by parameter, in the order of the signature; None if the task cannot be called with them."""
    parameters = parameters_of(task)
    try:
        bound = signature(task.func).replace(parameters=parameters).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    found: list[BoundArgument] = []
    for parameter in parameters:
        if parameter.name not in bound:
            continue
        value = bound[parameter.name]
        if parameter.kind is Parameter.VAR_POSITIONAL:
            found += [BoundArgument(parameter, f"*{parameter.name}", item) for item in value]
        elif parameter.kind is Parameter.VAR_KEYWORD:
            found += [BoundArgument(parameter, name, item) for name, item in value.items()]
        else:
            found.append(BoundArgument(parameter, parameter.name, value))
    return found
