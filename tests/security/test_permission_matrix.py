"""Request each route of the admin and the API as users with each set of permissions.

Markers are planted in all texts; `matrix.rows` lists the permissions that show each. An answer must have no marker
that the user may not see, and a request must write nothing unless the user has all permissions that the route needs.
"""

from dataclasses import replace
from urllib.parse import urlencode

import pytest
from django.test import override_settings

from tests.security.matrix import rows
from tests.security.matrix.asking import BACKEND, NONE, OTHER, Asker, Permissions
from tests.security.matrix.routes import (
    MODELS,
    NO_USER,
    RESOURCES,
    Request,
    admin_requests,
    admin_requests_of,
    api_requests,
    api_requests_of,
    codenames,
    filters_of,
    list_of,
    lists,
)

pytestmark = [pytest.mark.django_db, pytest.mark.once]


@pytest.fixture
def asker():
    rows.plant()
    with override_settings(
        AUTHENTICATION_BACKENDS=[BACKEND],
        SESSION_ENGINE="django.contrib.sessions.backends.cache",  # 2,800 requests: a tenth of the time
        FAKTORY={"API_READS": "", "API_WRITES": ""},
    ):
        yield Asker()


@pytest.fixture
def everything(db):
    return codenames()


def called(granted, everything):
    """Return a name for a set of permissions."""
    without = sorted(everything - granted)
    if len(without) < 2:
        return f"a user with all but {without}"
    return f"a user with {sorted(granted)}"


def asked_by_all(asker, request, everything):
    """Return the answer for each set of permissions: none, each single one, those the route needs, all but one, all.

    Only those single permissions are used that the request checks when the user has none: no other changes the answer.
    """
    answers = {}

    def ask(*sets):
        """Ask with each new set; return the permissions that the last of them checked."""
        for granted in sets:
            if granted not in answers:
                compare = request.is_act and request.needs <= granted
                answers[granted] = asker.ask(request, granted, compare=compare)
        return set(Permissions.asked)

    asked = ask(NONE)
    if request.is_variant:
        ask(request.needs, everything)
        return answers
    if asked & OTHER:
        asked |= ask(OTHER)
    ask(*(frozenset({one}) for one in sorted(asked - OTHER)))
    if request.needs != NO_USER:
        ask(request.needs, *(everything - {one} for one in request.needs))
    ask(everything)
    return answers


def strangers(asker, request, everything):
    """Yield a message for each access by an anonymous user, or by a user without staff status to the admin."""
    clients = {"an anonymous user": (asker.anonymous, NONE)}
    if request.path.startswith("/admin/"):
        clients["a user without staff status"] = (asker.other, everything)
    for name, (client, granted) in clients.items():
        answer = asker.ask(request, granted, client=client)
        if answer.is_in or answer.writes or answer.shown_to(NONE):
            yield f"{request.name}: {name} gets {answer.status}"


def wrong_with(request, granted, answer):
    """Yield a message for each rule that an answer breaks."""
    may = request.needs <= granted
    if shown := answer.shown_to(granted):
        yield f"is shown {shown}"
    if answer.is_in != may and (may or request.must_be_refused):
        yield f"gets {answer.status}"
    if answer.writes and not (may and (request.is_act or request.method == "POST")):
        yield f"writes {answer.writes[0]}"
    if may and request.is_act and not answer.is_changed:
        yield "changes no row"
    if may and request.is_act and not answer.is_logged:
        yield "is not logged"


def check(asker, requests, everything):
    """Send each request with each set of permissions, and fail with the list of all broken rules."""
    wrong = []
    for request in requests:
        wrong += strangers(asker, request, everything)
        for granted, answer in asked_by_all(asker, request, everything).items():
            label = called(granted, everything)
            wrong += [f"{request.name}: {label} {words}" for words in wrong_with(request, granted, answer)]
    assert not wrong, "\n".join(wrong)


def not_seen(asker, requests, everything):
    """Return the markers that no answer shows to a user with the permissions that show them and those of the route."""
    seen = {one: asker.ask(one, everything).markers for one in requests if not one.is_variant}
    missing = []
    for marker, sets in rows.MARKERS.items():
        pages = [request for request, markers in seen.items() if marker in markers]
        missing += [
            (marker, needed)
            for needed in sets[:1]
            if not any(marker in asker.ask(page, needed | page.needs).markers for page in pages)
        ]
    return missing


@pytest.mark.parametrize("resource", RESOURCES)
def test_the_api_shows_and_changes_only_what_permissions_allow(asker, everything, resource):
    check(asker, api_requests_of(resource), everything)


@pytest.mark.parametrize("model", MODELS)
def test_the_admin_shows_and_changes_only_what_permissions_allow(asker, everything, model):
    check(asker, admin_requests_of(model), everything)


def test_index_pages_show_only_what_permissions_allow(asker, everything):
    assert {"api root", "api schema", "admin index"} <= {one.name for one in others()}
    check(asker, others(), everything)


def others():
    parts = [*map(api_requests_of, RESOURCES), *map(admin_requests_of, MODELS)]
    names = {one.name for part in parts for one in part}
    return [one for one in [*api_requests(), *admin_requests()] if one.name not in names]


@pytest.mark.slow
def test_each_marker_is_shown_to_users_with_its_permissions(asker, everything):
    """Prove that the checks for markers can fail."""
    assert not_seen(asker, admin_requests(), everything) == []
    only_in_the_admin = {
        "seen-job-progress",
        "seen-job-lock",
        "seen-callback-args",
        "seen-callback-task",
    }
    only_in_the_admin |= {marker for marker in rows.MARKERS if "outbox" in marker}
    assert {marker for marker, _ in not_seen(asker, api_requests(), everything)} == only_in_the_admin


def test_admin_filters_show_only_what_permissions_allow(asker, everything):
    requests = [one for model in lists() for one in filters_of(asker.ask(list_of(model), everything).context, model)]
    assert len(requests) > 5
    check(asker, requests, everything)


def test_get_requests_with_the_words_of_an_action_change_nothing(asker, everything):
    for request in [*admin_requests(), *api_requests()]:
        if request.is_act and not request.is_variant:
            words = {"confirmed": "yes", "post": "yes"} | request.form
            path = f"{request.path}{'&' if '?' in request.path else '?'}{urlencode(words, doseq=True)}"
            for method in ("GET", "HEAD"):
                answer = asker.ask(replace(request, method=method, path=path, sent={}), everything, compare=True)
                assert answer.status in (200, 302, 400, 403, 405), (request.name, method)
                assert not answer.writes, (request.name, method)
                assert not answer.is_changed, (request.name, method)


def test_permissions_that_a_request_does_not_check_do_not_change_its_answer(asker, everything):
    """Check an assumption of `asked_by_all`."""
    request = Request("jobs", "GET", "/api/jobs/", frozenset({"view_job"}))
    asker.ask(request)
    assert Permissions.asked == {"view_job"}
    others = everything - {"view_job"}
    assert {asker.ask(request, {one}).status for one in others} == {403}
