"""Spans of OpenTelemetry: one around each push, one around each run, joined by the job's `traceparent`.

`FAKTORY = {"MIDDLEWARE": ["django_faktory.metrics.opentelemetry.Spans", …]}`. Needs `opentelemetry-api` only; whoever
sets up its SDK decides where spans go. Source: OpenTelemetry's semantic conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import context, propagate, trace
from opentelemetry.trace import SpanKind

from ..middleware import Call, Middleware

_SYSTEM = {"messaging.system": "faktory"}


class Spans(Middleware):
    """The span of a run is a child of the one that enqueued its job, in whatever process that was."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("django_faktory")

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """A producer's span; each job carries on its context, `traceparent` in the W3C's words."""
        if not calls:
            yield
            return
        name = calls[0].result.task.name
        told = {**_SYSTEM, "messaging.operation.type": "send", "messaging.destination.name": _queue(calls[0])}
        with self._tracer.start_as_current_span(f"send {name}", kind=SpanKind.PRODUCER, attributes=told) as span:
            if len(calls) > 1:
                span.set_attribute("messaging.batch.message_count", len(calls))
            else:
                span.set_attribute("messaging.message.id", calls[0].result.id)
            for call in calls:
                propagate.inject(call.custom)
            yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """A consumer's span. An error is noted, and goes on."""
        parent = propagate.extract({key: value for key, value in call.custom.items() if isinstance(value, str)})
        told: dict[str, str | int] = {
            **_SYSTEM,
            "messaging.operation.type": "process",
            "messaging.destination.name": _queue(call),
            "messaging.message.id": call.result.id,
            "messaging.message.delivery_attempt": call.result.attempts,
        }
        token = context.attach(parent)
        try:
            with self._tracer.start_as_current_span(
                f"process {call.result.task.name}", kind=SpanKind.CONSUMER, attributes=told
            ):
                yield
        finally:
            context.detach(token)


def _queue(call: Call) -> str:
    return str(call.result.task.queue_name)
