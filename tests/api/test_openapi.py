"""The OpenAPI document is whole, and what it allows, and what it does not, is never answered with a 5xx."""

from contextlib import contextmanager

import hypothesis
import pytest
import schemathesis
from django.core import signals
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck, Phase
from rest_framework.views import APIView

from tests.api.sessions import WithoutToken
from tests.api.test_access import ENDPOINTS, rows  # noqa: F401  (a fixture)
from tests.examples import examples

pytestmark = pytest.mark.django_db

EXAMPLES = examples(8)
"""Of each operation, half of them against the document."""


@pytest.fixture
def document(as_root):
    """As a client gets it."""
    return as_root("GET", "schema/", format="json").said


def test_the_document_is_openapi_and_nothing_in_it_was_guessed(document):
    GENERATOR_STATS.reset()
    validate_schema(document)
    assert not GENERATOR_STATS


def test_each_operation_and_each_field_is_described(document):
    operations = [
        (f"{method} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert [name for name, one in operations if not one.get("summary")] == []
    parameters = [(name, one) for name, operation in operations for one in operation.get("parameters", [])]
    assert [
        (name, one["name"]) for name, one in parameters if not one.get("description") and one["in"] == "query"
    ] == []
    fields = [
        (name, field)
        for name, schema in document["components"]["schemas"].items()
        for field, one in schema.get("properties", {}).items()
        if not name.startswith("Paginated") and not one.get("description")
    ]
    assert fields == []


def test_errors_are_described_as_problems(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            told = operation["responses"]["default"]["content"]
            assert list(told) == ["application/problem+json"], (method, path)


@contextmanager
def connection_stays():
    """As Django's own client has it: the end of a request is not that of the test's transaction."""
    ends = (signals.request_started, signals.request_finished)
    for signal in ends:
        signal.disconnect(close_old_connections)
    yield
    for signal in ends:
        signal.connect(close_old_connections)


@pytest.mark.parametrize("tag", ["jobs", "queues", "workers", "batches", "cron", "limits", "locks", "statistics"])
@pytest.mark.usefixtures("rows")
def test_no_request_is_answered_with_a_5xx(document, settings, monkeypatch, client, root, tag):
    """Requests that the document allows and that it does not, made by schemathesis."""
    settings.ALLOWED_HOSTS = ["*"]
    settings.FAKTORY = {"API_READS": "", "API_ACTS": ""}
    client.force_login(root)
    monkeypatch.setattr(APIView, "authentication_classes", [WithoutToken])
    for methods in document["paths"].values():
        for operation in methods.values():
            del operation["security"]  # it would make up a session of its own
    schema = schemathesis.openapi.from_dict(document | {"servers": [{"url": "http://testserver/api"}]})
    schema.app = get_wsgi_application()
    cookies = {settings.SESSION_COOKIE_NAME: client.cookies[settings.SESSION_COOKIE_NAME].value}
    operations = [found.ok() for found in schema.get_all_operations()]
    mine = [one for one in operations if one.path.startswith(f"/{tag}/")]
    assert mine
    seen = set()
    for operation in mine:
        for mode in schemathesis.GenerationMode:
            seen |= asked(operation, mode, cookies)
    assert seen & {200, 201}, "some of it must get through"
    assert not seen & {401, 403}


def asked(operation, mode, cookies):
    """Ask what schemathesis makes up; returns the codes of the answers."""
    seen = set()

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=max(1, EXAMPLES // 2),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case):
        answer = case.call(cookies=cookies)
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400 and answer.status_code != 404:  # a path that is none is the project's
            assert answer.headers["content-type"] == ["application/problem+json"], answer.headers
        seen.add(answer.status_code)

    try:
        with connection_stays():
            ask()
    except hypothesis.errors.Unsatisfiable:  # nothing can be wrong in a request without parameters
        assert mode is schemathesis.GenerationMode.NEGATIVE
    return seen


def test_the_matrix_names_each_of_them(document):
    assert sum(map(len, document["paths"].values())) == len(ENDPOINTS)
