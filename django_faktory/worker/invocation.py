"""Call a task's function with decoded arguments, inside the middleware and so that it can be stopped.

Entry points are `call` (threads) and `acall` (event loop). Knows neither reports nor brokers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async

from ..core.job_control import Control
from ..core.json import jsontext
from ..errors import Cancelled
from ..tasks import middleware
from ..tasks.arguments import decode_call, may_have_references
from ..tasks.base import FaktoryTask, JobContext
from ..tasks.compat import TaskResult
from ..tasks.middleware import Call
from .interrupt import InterruptibleControl

Arguments = tuple[list[Any], Mapping[str, Any]]


def call(task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str, control: InterruptibleControl) -> Any:
    """Call the task's function in this thread and return its value.

    Raises the exception of the function, of argument decoding or of a middleware, the reason of a stop, or Cancelled.
    """

    def inside() -> Any:
        args, kwargs = _read(task, result, text)
        return task.func(*_with_context(task, result, control, args), **kwargs)

    def wrapped() -> Any:
        return middleware.run(_as_call(result, text), inside)

    # Without middleware the job's text is not parsed for `custom`: that would cost every job.
    value = control.call(wrapped if middleware.configured() else inside)
    _refuse_cancelled(control)
    return value


async def acall(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str, control: InterruptibleControl
) -> Any:
    """Await the task's coroutine function on this loop and return its value. Raises as `call` does."""

    async def inside() -> Any:
        if not task.plain_json and may_have_references(text):
            # Decoding may query the database, which Django forbids on an event loop.
            args, kwargs = await sync_to_async(_read)(task, result, text)
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
    return decode_call(result.args, result.kwargs, missing=task.missing)


def _with_context(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], control: Control, args: list[Any]
) -> list[Any]:
    return [JobContext(task_result=result, control=control), *args] if task.takes_context else args


def _as_call(result: TaskResult[..., Any], text: str) -> Call:
    custom = jsontext.decode(text).get("custom")
    return Call(result=result, custom=custom if isinstance(custom, dict) else {})


def _refuse_cancelled(control: Control) -> None:
    """Raise Cancelled if the task has seen its cancellation and returned.

    A task that never read the flag has done its work, so its result is kept.
    """
    if control.has_seen_cancel:
        raise Cancelled("cancelled while it ran; the task saw it and ended")
