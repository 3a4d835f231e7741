"""Run the examples of docs/middleware.md, with the packages that they are for."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import sentry_sdk
import structlog
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from django_faktory.tasks.middleware import Middleware
from tests.project import middleware, tasks
from tests.tasks.work import work

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

PAGE = (Path(__file__).parent.parent.parent / "docs" / "middleware.md").read_text(encoding="utf-8")


def example(heading, name):
    """Return the class `name` from the first code block of the page's section."""
    code = re.search(rf"## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]
    names = {"Middleware": Middleware, "contextmanager": contextmanager}
    exec(code, names)
    return names[name]


@pytest.fixture
def use(settings, monkeypatch):
    def switch_on(kind):
        monkeypatch.setattr(middleware, kind.__name__, kind, raising=False)
        settings.FAKTORY = {"MIDDLEWARE": [f"tests.project.middleware.{kind.__name__}"]}

    return switch_on


def test_structlog_has_the_job_context_only_while_the_job_runs(use, monkeypatch):
    use(example("structlog", "LogContext"))
    seen = []
    monkeypatch.setattr(tasks, "noticing", lambda: seen.append(structlog.contextvars.get_contextvars()))
    result = tasks.calls_noticing.enqueue()
    work()
    assert seen == [{"jid": result.id, "task": "calls_noticing"}]
    assert structlog.contextvars.get_contextvars() == {}


@pytest.mark.parametrize("task", [tasks.fails, tasks.fails_for_good])
def test_sentry_gets_one_event_for_a_failure_with_its_default_integrations(use, task):
    """The worker logs the exception of the last attempt as an ERROR, which Sentry's LoggingIntegration reports too."""
    transport = Kept({})
    integrations = [LoggingIntegration(), DedupeIntegration()]
    with sentry_sdk.isolation_scope():
        sentry_sdk.init(
            dsn="http://key@127.0.0.1:1/1", transport=transport, default_integrations=False, integrations=integrations,
            auto_enabling_integrations=False,
        )  # fmt: skip
        try:
            use(example("Sentry", "Sentry"))
            task.enqueue()
            work()
        finally:
            sentry_sdk.get_global_scope().set_client(None)
    events = [event for event in transport.events if "exception" in event or "logentry" in event]
    assert [event["exception"]["values"][0]["type"] for event in events] == ["ValueError"]


class Kept(Transport):
    """Sentry transport that keeps its events and sends nothing."""

    def __init__(self, options):
        super().__init__(options)
        self.events = []

    def capture_envelope(self, envelope):
        self.events += [item.payload.json for item in envelope.items if item.payload.json]


def test_sentry_gets_failures_with_job_and_trace_but_no_requested_retries(use):
    transport = Kept({})
    with sentry_sdk.isolation_scope():
        sentry_sdk.init(
            dsn="http://key@127.0.0.1:1/1", transport=transport, traces_sample_rate=1.0, default_integrations=False,
            auto_enabling_integrations=False,
        )  # fmt: skip
        try:
            use(example("Sentry", "Sentry"))
            with sentry_sdk.start_transaction(name="request") as request:
                result = tasks.fails.enqueue()
                tasks.asks_for_retry.enqueue()
            work()
            work()
        finally:
            sentry_sdk.get_global_scope().set_client(None)  # `init()` would install the default integrations
    errors = [event for event in transport.events if "exception" in event]
    [error] = errors
    assert error["exception"]["values"][0]["type"] == "ValueError"
    assert error["tags"]["jid"] == result.id
    assert error["contexts"]["trace"]["trace_id"] == request.trace_id
    runs = [
        event for event in transport.events if event.get("contexts", {}).get("trace", {}).get("op") == "queue.process"
    ]
    assert runs
