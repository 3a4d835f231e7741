"""Who sees and does what: each route of the admin and the API, asked by users with each permission.

Markers are planted in all texts; `matrix.rows` says which permissions show each. A request must show no marker to a
user without them, and write nothing unless the user has all that the route needs.
"""

import pytest
from django.test import override_settings

from tests.security.matrix import rows
from tests.security.matrix.asking import BACKEND, NONE, OTHER, Asker, Permissions
from tests.security.matrix.routes import (
    NOBODY,
    admin_requests,
    api_requests,
    codenames,
)

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.once,
]


@pytest.fixture
def asker():
    rows.plant()
    with override_settings(AUTHENTICATION_BACKENDS=[BACKEND], FAKTORY={"API_READS": "", "API_ACTS": ""}):
        yield Asker()


@pytest.fixture
def everything(db):
    return codenames()


def sets_for(asker, request, everything):
    """Yield the sets of permissions that can make a difference to a request, the permissions it needs, and all but one.

    Starts with no permission. Only a permission that the request asks for then can change the answer of a user with a
    single one.
    """
    yield NONE
    asker.ask(request)
    asked = set(Permissions.asked)
    if asked & OTHER:
        yield OTHER
        asker.ask(request, OTHER)
        asked |= Permissions.asked
    yield from (frozenset({one}) for one in sorted(asked - OTHER))
    if request.needs != NOBODY:
        yield request.needs
        yield from (everything - {one} for one in request.needs)
    yield everything


def failures(asker, request, everything):
    """Return what is wrong with the answers to a request, in words."""
    nobody = asker.ask(request, client=asker.nobody)
    if nobody.is_in or nobody.writes or nobody.shown_to(NONE):
        yield f"{request.name}: an anonymous user gets {nobody.status}"
    seen = set()
    for granted in sets_for(asker, request, everything):
        if granted in seen:
            continue
        seen.add(granted)
        may = request.needs <= granted
        answer = asker.ask(request, granted, compare=request.is_act and may)
        who = "all" if granted == everything else ", ".join(sorted(granted)[:3]) or "no permission"
        if len(granted) == len(everything) - 1:
            who = f"all but {everything - granted}"
        if shown := answer.shown_to(granted):
            yield f"{request.name}: {who} is shown {shown}"
        if answer.is_in != may and request.needs != NOBODY:
            yield f"{request.name}: {who} gets {answer.status}"
        if answer.writes and not (may and (request.is_act or request.method == "POST")):
            yield f"{request.name}: {who} writes {answer.writes[0]}"
        if may and request.is_act and not answer.is_changed:
            yield f"{request.name}: {who} changes no row"


def test_the_api_shows_and_changes_what_permissions_say(asker, everything):
    assert [one for request in api_requests() for one in failures(asker, request, everything)] == []


def test_the_admin_shows_and_changes_what_permissions_say(asker, everything):
    assert [one for request in admin_requests() for one in failures(asker, request, everything)] == []
