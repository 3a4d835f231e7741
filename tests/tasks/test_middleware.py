"""FAKTORY["MIDDLEWARE"]: wrappers of each enqueue and each run, and the context that jobs carry."""

import asyncio

import pytest
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils import timezone, translation

from django_faktory.checks.settings import check_settings
from django_faktory.core.json import jsontext
from django_faktory.core.payloads import Ack
from django_faktory.errors import FaktoryError
from django_faktory.models import Job
from django_faktory.tasks import tracing
from tests.project import middleware, tasks
from tests.project.models import Mark
from tests.tasks.work import work

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

OURS = "tests.project.middleware."
CONTEXT = [f"django_faktory.tasks.middleware.{name}" for name in ("Language", "TimeZone", "Trace")]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def use(settings):
    """Return a function that configures middleware; `seen` starts empty."""
    middleware.seen.clear()

    def switch_on(*paths):
        settings.FAKTORY = {"MIDDLEWARE": [path if "." in path else OURS + path for path in paths]}

    return switch_on


def custom():
    return jsontext.decode(Job.objects.get().payload).get("custom", {})


def test_a_job_carries_no_context_without_middleware():
    tasks.noop.enqueue()
    assert custom() == {"result_ttl": 86_400}


def test_the_first_middleware_is_outermost_and_its_data_is_stored(use):
    use("Outer", "Inner")
    tasks.add.enqueue(1, 2)
    assert work().result == "3"
    assert middleware.seen == [
        "outer enqueues 1",
        "inner enqueues 1",
        "inner enqueued",
        "outer enqueued",
        "outer runs add [1, 2]",
        "inner runs add [1, 2]",
        "inner ran",
        "outer ran",
    ]
    assert custom()["outer"] == "add"


def test_enqueue_many_calls_the_middleware_once(use):
    use("Outer")
    tasks.add.enqueue_many([(1, 2), (3, 4)])
    assert middleware.seen == ["outer enqueues 2", "outer enqueued"]


def test_middleware_sees_the_task_error_and_propagates_it(use):
    use("Outer", "Inner")
    tasks.fails.enqueue()
    assert work().errtype == "builtins.ValueError"
    assert middleware.seen[-2:] == ["inner sees no luck", "outer sees no luck"]


def test_middleware_also_wraps_async_tasks(use):
    use("Outer", "Async")
    tasks.async_add.enqueue(1, 2)
    assert work().result == "3"
    assert middleware.seen[-4:] == ["outer runs async_add [1, 2]", "async begins", "async ends", "outer ran"]


def test_middleware_that_wraps_only_async_runs_leaves_others_alone(use):
    use("Async")
    tasks.add.enqueue(1, 2)
    assert work().result == "3"
    assert middleware.seen == []


def test_middleware_runs_inside_the_transaction_of_an_atomic_task(use):
    use("Refuses")
    Job.objects.all().delete()
    use()
    tasks.writes_mark_atomically.enqueue("a")
    use("Refuses")
    assert work().errtype == "builtins.PermissionError"
    assert not Mark.objects.exists()


def test_a_middleware_error_fails_the_enqueue(use):
    use("Refuses")
    with pytest.raises(PermissionError, match="not now"):
        tasks.noop.enqueue()
    assert not Job.objects.exists()


def test_a_middleware_error_fails_the_attempt(use):
    tasks.noop.enqueue()
    use("Refuses")
    assert work().message == "not here"
    assert Job.objects.get().state == "retries"


def test_middleware_cannot_swallow_an_enqueue_error(use):
    use("Swallows", "Refuses")
    with pytest.raises(FaktoryError, match="suppressed the error of an enqueue"):
        tasks.noop.enqueue()


@pytest.mark.parametrize("task", [tasks.fails, tasks.async_fails])
def test_middleware_can_turn_a_task_error_into_success(use, task):
    use("Swallows")
    task.enqueue()
    assert work().result == "null"


def test_data_written_by_middleware_must_be_json(use):
    use("WritesNonsense")
    with pytest.raises(TypeError):
        tasks.noop.enqueue()
    assert not Job.objects.exists()


@pytest.mark.parametrize("paths", [["no.such.Module"], [OURS + "NoMiddleware"], "Outer", [5]])
def test_an_invalid_middleware_setting_is_a_check_error(settings, paths):
    settings.FAKTORY = {"MIDDLEWARE": paths}
    [found] = check_settings()
    assert found.id == "django_faktory.E002"
    assert "FAKTORY['MIDDLEWARE']: expected a list of dotted paths" in found.msg


# --- context


@pytest.mark.parametrize("task", [tasks.returns_its_context, tasks.returns_its_context_async])
def test_a_task_runs_in_the_context_it_was_enqueued_in(use, task):
    use(*CONTEXT)
    context = {"request_id": "r-1", "traceparent": TRACEPARENT}
    with translation.override("de"), timezone.override("Asia/Tokyo"), tracing.use_context(context):
        task.enqueue()
    before = (translation.get_language(), timezone.get_current_timezone_name(), tracing.current_context())
    assert jsontext.decode(work().result) == ["de", "Asia/Tokyo", "r-1", TRACEPARENT]
    assert (translation.get_language(), timezone.get_current_timezone_name(), tracing.current_context()) == before
    assert custom() | {"locale": "de", "timezone": "Asia/Tokyo", **context} == custom()


def test_no_language_and_a_time_zone_without_a_name_are_not_carried(use):
    use(*CONTEXT)
    with translation.override(None), timezone.override(timezone.get_fixed_timezone(120)):
        tasks.noop.enqueue()
    assert custom() == {"result_ttl": 86_400}


def test_a_job_enqueued_by_a_job_inherits_the_request_id(use):
    use(*CONTEXT)
    with tracing.use_context({"request_id": "r-1"}):
        tasks.enqueues_another.enqueue()
    work()
    assert jsontext.decode(work().result)[2] == "r-1"


@pytest.mark.parametrize(
    "context",
    [
        {"locale": 5, "timezone": 5, "request_id": 5},
        {"timezone": "No/Where", "traceparent": "x"},
        {"timezone": "../x"},
        None,
    ],
)
def test_an_invalid_context_is_ignored(use, context):
    tasks.returns_its_context.enqueue()
    job = Job.objects.get()
    known = jsontext.decode(job.payload)
    Job.objects.update(payload=jsontext.encode({**known, "custom": context}))
    use(*CONTEXT)
    report = work()
    assert isinstance(report, Ack)
    assert jsontext.decode(report.result) == [
        translation.get_language(), timezone.get_current_timezone_name(), "", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({"X-Request-ID": "r-1", "traceparent": TRACEPARENT}, {"request_id": "r-1", "traceparent": TRACEPARENT}),
        ({"X-Request-ID": "has spaces", "traceparent": "nonsense"}, {"request_id": "made"}),
        ({}, {"request_id": "made"}),
    ],
)
def test_the_http_middleware_records_request_id_and_traceparent(headers, known):
    def view(request):
        found = tracing.current_context()
        made = found["request_id"] != "r-1" and len(found["request_id"]) == 32
        return HttpResponse(jsontext.encode(found | ({"request_id": "made"} if made else {})))

    async def async_view(request):
        return view(request)

    response = tracing.request_context(view)(RequestFactory().get("/", headers=headers))
    assert jsontext.decode(response.content.decode()) == known
    response = asyncio.run(tracing.request_context(async_view)(AsyncRequestFactory().get("/", headers=headers)))
    assert jsontext.decode(response.content.decode()) == known
    assert tracing.current_context() == {}
