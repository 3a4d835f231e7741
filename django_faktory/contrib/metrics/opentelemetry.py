"""OpenTelemetry spans: one around each push and one around each run, joined by the job's `traceparent`.

`FAKTORY = {"MIDDLEWARE": ["django_faktory.contrib.metrics.opentelemetry.Spans", …]}`. Needs `opentelemetry-api` only;
the project's SDK setup decides where spans are sent. Source: OpenTelemetry's semantic conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...core.extras import explain_missing
from ...tasks.middleware import Call, Middleware

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.trace import SpanKind
except ImportError as error:
    raise ImportError(explain_missing(__name__, "opentelemetry-api", "metrics")) from error

__all__ = ["Spans"]

_SYSTEM = {"messaging.system": "faktory"}


class Spans(Middleware):
    """Middleware that makes the span of a run a child of the span that enqueued its job, across processes."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("django_faktory")

    @contextmanager
    def enqueue(self, calls: Sequence[Call]) -> Iterator[None]:
        """Open a producer span; store its context in each job as a W3C `traceparent`."""
        if not calls:
            yield
            return
        # All jobs of a push have the same task and queue.
        name = calls[0].result.task.name
        span_attributes = {
            **_SYSTEM,
            "messaging.operation.type": "send",
            "messaging.destination.name": _get_queue_name(calls[0]),
        }
        with self._tracer.start_as_current_span(
            f"send {name}", kind=SpanKind.PRODUCER, attributes=span_attributes
        ) as span:
            if len(calls) > 1:
                span.set_attribute("messaging.batch.message_count", len(calls))
            else:
                span.set_attribute("messaging.message.id", calls[0].result.id)
            # Inside the span, so that its context is the one that is injected.
            for call in calls:
                propagate.inject(call.custom)
            yield

    @contextmanager
    def run(self, call: Call) -> Iterator[None]:
        """Open a consumer span around the run. Records an exception and lets it propagate."""
        # Any client may write other types into `custom`; propagators expect strings.
        parent = propagate.extract({key: value for key, value in call.custom.items() if isinstance(value, str)})
        span_attributes: dict[str, str | int] = {
            **_SYSTEM,
            "messaging.operation.type": "process",
            "messaging.destination.name": _get_queue_name(call),
            "messaging.message.id": call.result.id,
            "messaging.message.delivery_attempt": call.result.attempts,
        }
        # The parent is the span of the push, whatever span is active in this thread.
        token = context.attach(parent)
        try:
            with self._tracer.start_as_current_span(
                f"process {call.result.task.name}", kind=SpanKind.CONSUMER, attributes=span_attributes
            ):
                yield
        finally:
            context.detach(token)


def _get_queue_name(call: Call) -> str:
    return str(call.result.task.queue_name)
