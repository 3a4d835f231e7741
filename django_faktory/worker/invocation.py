"""Call a task's function with decoded arguments, inside the middleware and so that it can be stopped.

Entry points are `call` (threads) and `acall` (event loop). Independent of reports and brokers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error

from ..core.job_control import Control
from ..core.json import jsontext
from ..errors import Cancelled, CannotBegin
from ..store.database_errors import ErrorKind, first_line, kind_of
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

    def call_function() -> Any:
        args, kwargs = _decode_arguments(task, result, text)
        return task.func(*_with_context(task, result, control, args), **kwargs)

    def call_with_middleware() -> Any:
        return middleware.run(_build_call(result, text), call_function)

    # Without middleware the job's text is not parsed for `custom`: that would cost every job.
    value = control.call(call_with_middleware if middleware.get_middleware() else call_function)
    _refuse_cancelled(control)
    return value


async def acall(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str, control: InterruptibleControl
) -> Any:
    """Await the task's coroutine function on this loop and return its value. Raises as `call` does."""

    async def call_function() -> Any:
        if not task.plain_json and may_have_references(text):
            # Decoding may query the database, which Django forbids on an event loop.
            args, kwargs = await sync_to_async(_decode_arguments)(task, result, text)
        else:
            args, kwargs = result.args, result.kwargs
        return await task.func(*_with_context(task, result, control, args), **kwargs)

    async def call_with_middleware() -> Any:
        return await middleware.arun(_build_call(result, text), call_function)

    function = call_with_middleware if middleware.get_middleware() else call_function
    value = await control.acall(function)
    _refuse_cancelled(control)
    return value


def _decode_arguments(task: FaktoryTask[..., Any], result: TaskResult[..., Any], text: str) -> Arguments:
    if task.plain_json or not may_have_references(text):
        return result.args, result.kwargs
    try:
        return decode_call(result.args, result.kwargs, missing=task.missing)
    except Error as error:
        if kind_of(error) is not ErrorKind.OUTAGE:
            raise
        raise CannotBegin(f"database unavailable: {first_line(error)}") from error


def _with_context(
    task: FaktoryTask[..., Any], result: TaskResult[..., Any], control: Control, args: list[Any]
) -> list[Any]:
    return [JobContext(task_result=result, control=control), *args] if task.takes_context else args


def _build_call(result: TaskResult[..., Any], text: str) -> Call:
    custom = jsontext.decode(text).get("custom")
    return Call(result=result, custom=custom if isinstance(custom, dict) else {})


def _refuse_cancelled(control: Control) -> None:
    """Raise Cancelled if the task has seen its cancellation and returned.

    A task that never read the flag has done its work, so its result is kept.
    """
    if control.has_seen_cancel:
        raise Cancelled("cancelled while it ran; the task saw it and ended")
