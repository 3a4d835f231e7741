"""Backends that prepare their session in each cursor: every statement of the store uses such a cursor."""

import pytest
from django.db import connection, connections
from django.db.utils import load_backend

from django_faktory.checks import settings
from django_faktory.store.dialects import cursor_hooks
from django_faktory.store.dialects.postgresql import pipeline
from django_faktory.store.dialects.postgresql.loop_connection import PostgresqlLoopConnection
from django_faktory.store.dialects.postgresql.prepared import (
    USES_BEFORE,
    Command,
    execute_and_commit,
    execute_on,
)
from tests.bouncer import needs_session

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]

USES = 2 * USES_BEFORE + 3


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about PostgreSQL")


@pytest.fixture
def with_backend():
    """Return a function that replaces this thread's connection by one of a subclass of its backend."""
    before = connections["default"]

    def replace(**methods):
        base = type(before)
        backend = type("DatabaseWrapper", (base,), {"__module__": "shop.rows.base", **methods})
        connections["default"] = backend(
            {**before.settings_dict, "OPTIONS": {**before.settings_dict["OPTIONS"]}}, "default"
        )
        return connections["default"]

    yield replace
    connections["default"].close()
    connections["default"] = before


def sets_tenant(name):
    """Return a method that calls Django's, and sets a variable of the session to the connection's tenant."""

    def method(self, *args, **kwargs):
        made = getattr(super(type(self), self), name)(*args, **kwargs)
        raw = self.connection.cursor()
        raw.execute("SELECT set_config('app.tenant', %s, FALSE)", [self.tenant])
        raw.close()
        return made

    return method


@pytest.mark.parametrize("name", ["cursor", "_cursor", "create_cursor"])
def test_each_statement_sees_the_session_state_set_by_the_cursor_hook(with_backend, name):
    asks = Command("asks", ["text"], "SELECT current_setting('app.tenant'), $1")
    rows = with_backend(**{name: sets_tenant(name)})
    assert cursor_hooks.own_methods(rows) == [name]
    for number in range(USES):
        rows.tenant = f"tenant-{number}"
        assert execute_on(rows, [(asks, ["a"]), (asks, ["b"])]) == [[(rows.tenant, "a")], [(rows.tenant, "b")]]
        assert PostgresqlLoopConnection.take(rows) is None
        assert execute_and_commit(rows, [(asks, ["a"])]) is None


@pytest.mark.parametrize("name", ["cursor", "_cursor", "create_cursor"])
def test_no_statement_is_prepared_for_a_backend_with_cursor_hooks(with_backend, name):
    rows = with_backend(**{name: sets_tenant(name)})
    rows.tenant = "a"
    asks = Command("asks", ["int"], "SELECT $1")
    for _ in range(USES):
        execute_on(rows, [(asks, [1])])
    with rows.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'asks%'")
        assert cursor.fetchall() == []


def test_a_backend_that_only_overrides_get_new_connection_keeps_the_direct_path(with_backend):
    seen = []

    def get_new_connection(self, params):
        seen.append("connected")
        return super(type(self), self).get_new_connection(params)

    rows = with_backend(get_new_connection=get_new_connection)
    asks = Command("asks", ["int"], "SELECT $1")
    for _ in range(USES):
        execute_on(rows, [(asks, [1])])
    assert seen == ["connected"]
    assert pipeline.can_pipeline(rows)
    with rows.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM pg_prepared_statements WHERE name LIKE 'asks%'")
        assert cursor.fetchall() == [(1,)]


def test_a_cursor_method_patched_on_a_connection_is_called(with_backend):
    rows, calls = with_backend(), []
    asks = Command("asks", ["int"], "SELECT $1")
    for _ in range(USES):  # prepared after these uses
        execute_on(rows, [(asks, [1])])
    original = rows.cursor

    def cursor():
        calls.append("cursor")
        return original()

    rows.cursor = cursor
    for _ in range(USES):
        assert execute_on(rows, [(asks, [1])]) == [[(1,)]]
    assert len(calls) == USES


@pytest.mark.parametrize("path", ["django.db.backends.postgresql", "django.db.backends.sqlite3"])
def test_django_backends_have_no_cursor_hooks(path):
    assert cursor_hooks._overridden(load_backend(path).DatabaseWrapper) == ()
    assert not cursor_hooks.has_own_cursor(connections["default"])


def test_the_system_check_names_the_overridden_cursor_methods(with_backend):
    with_backend(_cursor=sets_tenant("_cursor"))
    [message] = settings.check_connections()
    assert message.id == "django_faktory.I001"
    assert "has its own _cursor" in message.msg
    assert not message.is_serious()


def test_a_cursor_method_restored_by_a_test_case_keeps_the_direct_path(with_backend):
    rows = with_backend()
    rows.cursor = rows.cursor  # as Django's TestCase does for aliases that it blocked
    assert not cursor_hooks.has_own_cursor(rows)
    assert cursor_hooks.own_methods(rows) == []
