"""Fixtures for the HTTP API: Django's test client with JSON requests and responses."""

import json
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache

from tests.factories import staff_user


@pytest.fixture(autouse=True)
def empty_cache():
    """Clear the cache, which stores the throttles' counts."""
    cache.clear()


@pytest.fixture
def user(db):
    """Return a function that makes a user with the permissions of these codenames."""

    def make(*codenames, **fields):
        made = staff_user(*codenames)
        User.objects.filter(pk=made.pk).update(**{"is_staff": False} | fields)
        return User.objects.get(pk=made.pk)

    return make


@pytest.fixture
def api(client):
    """Return a function that calls the API; `by` logs that user in for this and later calls."""

    def ask(method, path, body=None, *, by=None, **params):
        if by is not None:
            client.force_login(by)
        options = {} if body is None else {"data": body if isinstance(body, str) else json.dumps(body)}
        if params:
            options["query_params"] = params
        answer = client.generic(method, f"/api/{path}", content_type="application/json", **options)
        is_json = "json" in answer.headers.get("Content-Type", "")
        data = answer.json() if is_json and answer.content else None
        return SimpleNamespace(status=answer.status_code, data=data, headers=answer.headers, text=answer.content)

    return ask


@pytest.fixture
def root(db):
    """Return a superuser, with all permissions."""
    return User.objects.create(username="root", is_superuser=True)


@pytest.fixture
def as_root(api, root, client):
    """Return the `api` function with the superuser logged in."""
    client.force_login(root)
    return api
