"""The OpenAPI document is complete, and neither valid nor invalid requests are answered with a 5xx."""

import re
from contextlib import contextmanager
from copy import deepcopy

import hypothesis
import pytest
import schemathesis
from django.core import signals
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from django.test import override_settings
from django.urls import include, re_path, resolve
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck, Phase
from jsonschema import Draft202012Validator
from rest_framework.views import APIView

from django_faktory.models import Batch
from tests.contrib.api.sessions import WithoutToken
from tests.contrib.api.test_access import rows  # noqa: F401  (a fixture)
from tests.examples import examples
from tests.factories import JobFactory
from tests.security.matrix import routes

pytestmark = [pytest.mark.once, pytest.mark.django_db]

OPERATIONS = routes.operations()
IDS = [one.name for one in OPERATIONS]
EXAMPLES = examples(8)
"""Generated requests of each operation; half of them violate the document."""


generated = []


@pytest.fixture
def document(as_root):
    """Return the document as a client gets it, generated once for all tests."""
    if not generated:
        generated.append(as_root("GET", "schema/", format="json").data)
    return generated[0]


def test_the_document_is_valid_openapi_and_is_generated_without_warnings(as_root):
    GENERATOR_STATS.reset()
    validate_schema(as_root("GET", "schema/", format="json").data)
    assert not GENERATOR_STATS


def schemas_in(value):
    """Yield each schema of a document, nested ones too."""
    if isinstance(value, dict):
        if isinstance(value.get("schema"), dict):
            yield value["schema"]
        for one in value.values():
            yield from schemas_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from schemas_in(one)


def test_schemas_are_valid_openapi_3_1_without_nullable(document):
    assert document["openapi"].startswith("3.1")
    found = [*document["components"]["schemas"].values(), *schemas_in(document["paths"])]
    for schema in found:
        Draft202012Validator.check_schema(schema)
    assert len(found) > 100
    assert [schema for schema in found if '"nullable"' in repr(schema).replace("'", '"')] == []


def url_of(document, template):
    """Return the address that a generated client makes of a path."""
    [server] = document["servers"]
    return server["url"].rstrip("/") + template


def test_each_documented_path_resolves_to_a_view(document):
    for template, operations in document["paths"].items():
        match = resolve(re.sub(r"\{\w+\}", "7", url_of(document, template)))
        assert match.app_name == "faktory-api", template
        known = getattr(match.func, "actions", None)
        assert known is None or set(operations) <= set(known), template


def test_each_operation_has_the_path_parameters_of_its_path(document):
    """A client generator drops an operation that differs."""
    different = [
        f"{method} {path}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if sorted(one["name"] for one in operation.get("parameters", []) if one["in"] == "path")
        != sorted(re.findall(r"\{(\w+)\}", path))
    ]
    assert different == []


urlpatterns = [re_path(r"^deep/(?P<tenant>\w+)/jobs/", include("django_faktory.contrib.api.urls"))]


def test_the_server_url_is_the_path_at_which_the_api_is_mounted(as_root, client):
    with override_settings(ROOT_URLCONF=__name__):
        document = client.get("/deep/one/jobs/schema/?format=json", SCRIPT_NAME="/site").json()
    assert document["servers"] == [{"url": "/site/deep/one/jobs"}]


def closed(schemas):
    """Return a copy of the schemas that allows no unnamed member."""
    found = deepcopy(schemas)
    for schema in found.values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return found


def operation_of(document, method, address):
    """Return the responses that the document has for a request."""
    for template, operations in sorted(document["paths"].items(), key=lambda item: item[0].count("{")):
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(url_of(document, template)))
        if re.fullmatch(pattern, address) and method.lower() in operations:
            return operations[method.lower()]["responses"]
    raise AssertionError(f"{method} {address} is not in the document")


def check_answer(document, method, address, answer):
    """Validate an answer against the document. Raises ValidationError, KeyError for a status that is not in it."""
    responses = operation_of(document, method, address)
    if answer.status >= 400:
        content = responses["default"]["content"]["application/problem+json"]
    elif "content" not in responses[str(answer.status)]:
        assert answer.data is None
        return
    else:
        content = responses[str(answer.status)]["content"]["application/json"]
    components = {"schemas": closed(document["components"]["schemas"])}
    Draft202012Validator(content["schema"] | {"components": components}).validate(answer.data)


def send(ask, request, **options):
    return ask(request.method, request.path.removeprefix("/api/"), request.sent.get("data"), **options)


@pytest.mark.parametrize("request_", OPERATIONS, ids=IDS)
@pytest.mark.usefixtures("rows")
def test_responses_match_the_document(api, root, user, document, request_):
    """Check the answers to a superuser, to a user with only the permission of the operation, and to one without any."""
    for by, is_in in ((user(), False), (user(*request_.needs), True), (root, True)):
        with transaction.atomic():
            answer = send(api, request_, by=by)
            transaction.set_rollback(True)
        assert (answer.status < 300) is is_in
        check_answer(document, request_.method, request_.path, answer)


@pytest.mark.usefixtures("rows")
def test_responses_with_every_kind_of_value_match_the_document(as_root, document):
    for text in ("null", '"text"', "1.5", '{"a": [null]}'):
        jid = JobFactory(succeeded=True, result=text).jid
        check_answer(document, "GET", f"/api/jobs/{jid}/", as_root("GET", f"jobs/{jid}/"))
    Batch.objects.create(bid="b-child", parent_bid="b-1", description="child")
    for address in ("cron/", "cron/nightly/", "batches/", "batches/b-1/children/", "batches/b-1/tree/", "statistics/"):
        check_answer(document, "GET", f"/api/{address}", as_root("GET", address))
    page = as_root("GET", "jobs/", page_size=1)
    assert page.data["next"]
    check_answer(document, "GET", "/api/jobs/", page)


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
            content = operation["responses"]["default"]["content"]
            assert list(content) == ["application/problem+json"], (method, path)


@contextmanager
def connection_stays():
    """Keep the connection at the end of a request, as Django's own test client does, because the test's transaction
    uses it.
    """
    ends = (signals.request_started, signals.request_finished)
    for signal in ends:
        signal.disconnect(close_old_connections)
    yield
    for signal in ends:
        signal.connect(close_old_connections)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tag", ["jobs", "queues", "workers", "batches", "cron", "limits", "locks", "statistics", "alarms"]
)
@pytest.mark.usefixtures("rows")
def test_no_request_is_answered_with_a_5xx(document, settings, monkeypatch, client, root, tag):
    """Schemathesis generates valid and invalid requests."""
    settings.ALLOWED_HOSTS = ["*"]
    settings.FAKTORY = {"API_READS": "", "API_WRITES": ""}
    client.force_login(root)
    monkeypatch.setattr(APIView, "authentication_classes", [WithoutToken])
    document = deepcopy(document)
    for methods in document["paths"].values():
        for operation in methods.values():
            del operation["security"]  # schemathesis would generate a session of its own
    schema = schemathesis.openapi.from_dict(document | {"servers": [{"url": "http://testserver/api"}]})
    schema.app = get_wsgi_application()
    cookies = {settings.SESSION_COOKIE_NAME: client.cookies[settings.SESSION_COOKIE_NAME].value}
    operations = [found.ok() for found in schema.get_all_operations()]
    mine = [one for one in operations if one.path.startswith(f"/{tag}/")]
    assert mine
    seen = set()
    for operation in mine:
        seen |= asked(operation, schemathesis.GenerationMode.POSITIVE, cookies)
        if can_be_invalid(operation):
            seen |= asked(operation, schemathesis.GenerationMode.NEGATIVE, cookies)
    assert seen & {200, 201}, "some requests must be accepted"
    assert not seen & {401, 403}


def can_be_invalid(operation):
    """Return False if each request is valid: it has no body, and no parameter but any text in its path."""
    found = operation.definition.raw
    text = {"type": "string", "pattern": "^[^/]+$"}
    return "requestBody" in found or any(one["schema"] != text for one in found.get("parameters", []))


def asked(operation, mode, cookies):
    """Send the requests that schemathesis generates; return the status codes of the answers."""
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
        if answer.status_code >= 400 and answer.status_code != 404:  # 404 of an unknown path comes from the project
            assert answer.headers["content-type"] == ["application/problem+json"], answer.headers
        seen.add(answer.status_code)

    with connection_stays():
        ask()
    return seen


def test_the_document_has_an_operation_for_each_route_and_method(document):
    assert sum(map(len, document["paths"].values())) == len(OPERATIONS)
