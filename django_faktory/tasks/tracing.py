"""Request ID and W3C trace context of the current request, set by `request_context` or by the project.

`request_context` is a Django middleware. `middleware.Trace` copies both values to jobs, and restores them in workers.
Source: https://www.w3.org/TR/trace-context/, "traceparent header".
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

__all__ = ["request_context", "request_id", "traceparent"]

request_id: ContextVar[str] = ContextVar("django_faktory.request_id", default="")
"""Id of the current request: printable ASCII without spaces, at most 200 characters; "" for none."""
traceparent: ContextVar[str] = ContextVar("django_faktory.traceparent", default="")
"""W3C trace context, such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01; "" for none."""

_VARIABLES: dict[str, tuple[ContextVar[str], re.Pattern[str]]] = {
    "request_id": (request_id, re.compile(r"[!-~]{1,200}")),
    "traceparent": (traceparent, re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,200})?")),
}

View = Callable[[HttpRequest], Any]


def current_context() -> dict[str, str]:
    return {name: value for name, (variable, _) in _VARIABLES.items() if (value := variable.get())}


@contextmanager
def use_context(values: Mapping[str, Any]) -> Iterator[None]:
    """Set the context inside the block; clear values that are missing or malformed."""
    tokens = [
        (variable, variable.set(_match_or_empty(values.get(name), form)))
        for name, (variable, form) in _VARIABLES.items()
    ]
    try:
        yield
    finally:
        # A worker's thread runs one job after the other, and must not keep the ids of the previous job.
        for variable, token in tokens:
            variable.reset(token)


def trace_id_of(traceparent: object) -> str:
    """Return the trace ID of a `traceparent`; "" if it is malformed, or if its ID has only zeros."""
    text = _match_or_empty(traceparent, _VARIABLES["traceparent"][1])
    return text.split("-")[1].strip("0") and text.split("-")[1] if text else ""


def request_context(get_response: View) -> View:
    """Django middleware: read the headers `traceparent` and `X-Request-ID`; generate a missing request ID."""

    async def around_async(request: HttpRequest) -> HttpResponseBase:
        with use_context(_read_headers(request)):
            response: Awaitable[HttpResponseBase] = get_response(request)
            return await response

    def around(request: HttpRequest) -> HttpResponseBase:
        with use_context(_read_headers(request)):
            response: HttpResponseBase = get_response(request)
            return response

    # Django chooses the sync or the async chain by this mark.
    return markcoroutinefunction(around_async) if iscoroutinefunction(get_response) else around


request_context.sync_capable = True  # type: ignore[attr-defined]  # attributes that Django reads
request_context.async_capable = True  # type: ignore[attr-defined]


def _read_headers(request: HttpRequest) -> dict[str, str]:
    # The header is the client's: a value of another form could forge log lines.
    request_id = _match_or_empty(request.headers.get("X-Request-ID"), _VARIABLES["request_id"][1])
    return {"traceparent": request.headers.get("traceparent", ""), "request_id": request_id or secrets.token_hex(16)}


def _match_or_empty(value: object, form: re.Pattern[str]) -> str:
    return value if isinstance(value, str) and form.fullmatch(value) else ""
