"""How a task's function is called: with the arguments it was meant to get, inside the middleware, so that it can be
stopped. Knows no report and no broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async

from .. import jsontext, middleware
from ..arguments import decoded_call, may_have_references
from ..compat import TaskResult
from ..control import Control
from ..errors import Cancelled
from ..middleware import Call
from ..tasks import FaktoryTask, JobContext
from .stopping import Stoppable

Arguments = tuple[list[Any], Mapping[str, Any]]


def call(task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str, control: Stoppable) -> Any:
    """Call the function in this thread. Raises what it raises, and what its arguments, a middleware, a stop raise."""

    def inside() -> Any:
        args, kwargs = _read(task, result, text)
        return task.func(*_with_context(task, result, control, args), **kwargs)

    def wrapped() -> Any:
        return middleware.run(_as_call(result, text), inside)

    value = control.call(wrapped if middleware.configured() else inside)
    _refuse_cancelled(control)
    return value


async def acall(task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str, control: Stoppable) -> Any:
    """Await the coroutine function on this loop. Raises as `call` does."""

    async def inside() -> Any:
        if not task.plain_json and may_have_references(text):
            args, kwargs = await sync_to_async(_read)(task, result, text)  # it may ask the database
        else:
            args, kwargs = result.args, result.kwargs
        return await task.func(*_with_context(task, result, control, args), **kwargs)

    async def wrapped() -> Any:
        return await middleware.arun(_as_call(result, text), inside)

    value = await control.acall(wrapped if middleware.configured() else inside, timeout_s=task.timeout)
    _refuse_cancelled(control)
    return value


def _read(task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str) -> Arguments:
    if task.plain_json or not may_have_references(text):
        return result.args, result.kwargs
    return decoded_call(result.args, result.kwargs, missing=task.missing)


def _with_context(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], control: Control, args: list[Any]
) -> list[Any]:
    return [JobContext(task_result=result, control=control), *args] if task.takes_context else args


def _as_call(result: TaskResult[..., Any], text: str) -> Call:
    custom = jsontext.decode(text).get("custom")
    return Call(result=result, custom=custom if isinstance(custom, dict) else {})


def _refuse_cancelled(control: Control) -> None:
    """A task that was told of its cancellation and returned has given up; one that never asked has done its work."""
    if control.knows_of_cancel:
        raise Cancelled("cancelled while it ran; the task saw it and ended")
