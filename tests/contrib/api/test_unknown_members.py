"""No route of the API ignores a member of the body or a parameter that it does not know."""

import json
import re

import pytest

from tests.contrib.api.test_access import rows  # noqa: F401  (a fixture)
from tests.contrib.api.test_openapi import IDS, OPERATIONS, document  # noqa: F401  (a fixture)
from tests.project.tasks import add
from tests.security.matrix.asking import stored

pytestmark = [pytest.mark.once, pytest.mark.django_db, pytest.mark.usefixtures("rows")]

MISSPELLED = ["dryrun", "dry-run", "dryRun", "limt", "max", "sate", "Query", "filter", "jids", "\x1b[31m", "é" * 999]


@pytest.fixture(autouse=True)
def _no_throttle(settings):
    settings.FAKTORY = {"API_READS": "", "API_WRITES": ""}


def misspell(name):
    """Return names that differ from a known one as a typing error does."""
    return [name[:-1], name[1:], f"{name}s", f" {name}", name.upper(), name[1] + name[0] + name[2:], f"{name}__in"]


def members_of(document, path, method):  # noqa: F811  (a fixture)
    """Return the names of the parameters and of the members of the body that the document has for a request."""
    for template, operations in sorted(document["paths"].items(), key=lambda item: item[0].count("{")):
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), f"/{path}"):
            operation = operations[method.lower()]
            parameters = {one["name"] for one in operation.get("parameters", []) if one["in"] == "query"}
            if "requestBody" not in operation:
                return parameters, set()
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            return parameters, set(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])
    raise AssertionError(f"{method} {path} is not in the document")


def check_refusal(answer, name):
    """Check that the answer is a problem that names the member and is one line."""
    assert (answer.status, answer.headers["Content-Type"]) == (400, "application/problem+json"), (name, answer.data)
    [field] = answer.data["errors"]
    assert field["field"] == ascii(name)[1:-1][:60]
    assert field["detail"].startswith("unknown ")
    assert answer.data["detail"].isprintable()


@pytest.mark.parametrize("request_", OPERATIONS, ids=IDS)
def test_a_request_with_an_unknown_member_changes_nothing_and_names_it(as_root, document, request_):  # noqa: F811
    """Each operation of the OpenAPI document, with misspelled names of its own members and of others."""
    method, path, body = request_.method, request_.path.removeprefix("/api/"), request_.sent.get("data")
    parameters, members = members_of(document, path, method)
    before, count = stored(), 0
    for name in {*MISSPELLED, *(wrong for known in parameters | members for wrong in misspell(known))}:
        if name not in parameters:
            check_refusal(as_root(method, path, body, **{name: "1"}), name)
        if name not in members:
            check_refusal(as_root(method, path, json.loads(body or "{}") | {name: 1}), name)
        count += 1
    assert count >= len(MISSPELLED)
    assert stored() == before


def test_each_method_of_each_address_refuses_an_unknown_member(as_root):
    """Also the addresses that the document leaves out, and methods that the address does not have."""
    before = stored()
    for path in sorted({"", "schema/", *(one.path.removeprefix("/api/") for one in OPERATIONS)}):
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"):
            for body, params in (({"dryrun": 1}, {}), (None, {"dryrun": "1"})):
                assert as_root(method, path, body, **params).status in (400, 405), (method, path)
    assert stored() == before


@pytest.mark.parametrize(
    ("method", "path", "body", "params", "detail"),
    [
        (
            "POST",
            "jobs/bulk/discard/",
            {"query": "dead", "dryrun": True},
            {},
            "dryrun: unknown member; did you mean dry_run?",
        ),
        (
            "POST",
            "jobs/bulk/prune/",
            {"query": "dead", "max": 1},
            {},
            "max: unknown member; expected reason, query, limit, like, per_minute, after, dry_run",
        ),
        ("POST", "jobs/bulk/prune/", {"query": "dead"}, {"dry_run": "1"}, "dry_run: unknown parameter; expected none"),
        ("GET", "jobs/", None, {"sate": "dead"}, "sate: unknown parameter; did you mean state?"),
        ("GET", "jobs/", {"state": "dead"}, {}, "state: unknown member of the body; expected none"),
        ("GET", "jobs/", None, {"state": ["dead", "retries"]}, "state: expected once; separate several values with co"),
        ("GET", "schema/", None, {"formt": "json"}, "formt: unknown parameter; expected lang"),
    ],
)
def test_the_error_suggests_the_member_that_was_meant(as_root, method, path, body, params, detail):
    answer = as_root(method, path, body, **params)
    assert (answer.status, answer.data["detail"][: len(detail)]) == (400, detail)


def test_the_error_of_an_unknown_task_suggests_a_known_one(as_root):
    answer = as_root("POST", "jobs/", {"task": add.jobtype.replace("add", "ad"), "args": [1, 2]})
    assert (answer.status, answer.data["type"]) == (400, "urn:django-faktory:problem:unknown-task")
    assert f"did you mean {add.jobtype}?" in answer.data["detail"]


def test_parameters_of_browsable_pages_and_documented_ones_are_accepted(as_root, document):  # noqa: F811
    """A form of a browsable page sends each filter, empty ones too."""
    for one in OPERATIONS:
        method, path = one.method, one.path.removeprefix("/api/")
        if method == "GET":
            parameters, _ = members_of(document, path, method)
            names = {*parameters, "format"} - {"cursor", "page_size"}
            answer = as_root(
                method, path, **dict.fromkeys(names, ""), **({"page_size": 5} if "cursor" in parameters else {})
            )
            assert answer.status == 200, (path, answer.data)
