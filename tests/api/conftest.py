"""The API as its clients see it: by Django's test client, JSON in and out."""

import json
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import Permission, User
from django.core.cache import cache


@pytest.fixture(autouse=True)
def nobody_has_asked_yet():
    """Throttles count in the cache."""
    cache.clear()


@pytest.fixture
def user(db):
    """Make a user with permissions, by codename."""

    def make(*codenames, **fields):
        made = User.objects.create(username=f"user{User.objects.count()}", **fields)
        found = Permission.objects.filter(content_type__app_label="django_faktory", codename__in=codenames)
        assert {one.codename for one in found} == set(codenames)
        made.user_permissions.set(found)
        return made

    return make


@pytest.fixture
def api(client):
    """Ask the API; `by`: as this user from then on."""

    def ask(method, path, body=None, *, by=None, **params):
        if by is not None:
            client.force_login(by)
        options = {} if body is None else {"data": body if isinstance(body, str) else json.dumps(body)}
        if params:
            options["query_params"] = params
        answer = client.generic(method, f"/api/{path}", content_type="application/json", **options)
        is_json = "json" in answer.headers.get("Content-Type", "")
        told = answer.json() if is_json and answer.content else None
        return SimpleNamespace(status=answer.status_code, said=told, headers=answer.headers, text=answer.content)

    return ask


@pytest.fixture
def root(db):
    """Who may do everything."""
    return User.objects.create(username="root", is_superuser=True)


@pytest.fixture
def as_root(api, root, client):
    """Ask as the superuser."""
    client.force_login(root)
    return api
