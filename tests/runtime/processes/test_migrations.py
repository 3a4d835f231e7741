"""`runfaktory` waits for migrations: it logs one line, continues when they are applied, and ends on a signal."""

import signal

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from django_faktory.runtime.await_migrations import await_migrations
from django_faktory.store.dialects.postgresql import functions
from tests.programs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.once]

MIGRATIONS = sorted(path.stem for path in (ROOT / "django_faktory" / "migrations").glob("[0-9]*.py"))
ARGUMENTS = ("127.0.0.1:0", "--server-only", "--no-reload")


@pytest.fixture
def unmigrated(transactional_db):
    """Remove the tables of this package, and return a function that creates them; they exist again at the end."""
    call_command("migrate", "django_faktory", "zero", verbosity=0)
    yield lambda: call_command("migrate", verbosity=0)
    call_command("migrate", verbosity=0)


def test_runfaktory_starts_when_the_migrations_are_applied(unmigrated, runfaktory, address):
    program = runfaktory(*ARGUMENTS)
    [line] = program.wait_for_log("waiting up to 300 s for manage.py migrate")
    assert f"'default' lacks {len(MIGRATIONS)} migrations: django_faktory.{MIGRATIONS[0]}" in line
    unmigrated()
    connection.close()
    assert address(program)
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert len(program.wait_for_log("waiting up to")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_runfaktory_ends_on_a_signal_while_it_waits_for_migrations(unmigrated, runfaktory, number):
    program = runfaktory(*ARGUMENTS)
    program.wait_for_log("waiting up to")
    program.signal(number)
    assert program.code() == 0


def test_runfaktory_reports_missing_migrations_after_the_wait(unmigrated, runfaktory):
    program = runfaktory(*ARGUMENTS, "--migrations-wait", "1")
    assert program.code() == 1
    program.wait_for_log(f"lacks {len(MIGRATIONS)} migrations of django_faktory; run manage.py migrate")


def test_missing_migrations_of_other_apps_delay_but_do_not_prevent_the_start(transactional_db, monkeypatch):
    call_command("migrate", "shop", "zero", verbosity=0)
    lines = []
    try:
        await_migrations("default", wait_s=0.5, write_line=lines.append)
        await_migrations("default", wait_s=0, write_line=lines.append)
    finally:
        call_command("migrate", verbosity=0)
    assert ["waiting up to" in lines[0], "starting without them" in lines[1], len(lines)] == [True, True, 2]
    assert "shop." in lines[0]


def test_a_fully_migrated_database_causes_no_wait(transactional_db):
    await_migrations("default", wait_s=300, write_line=pytest.fail)


@pytest.mark.each_database
@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL has functions")
def test_missing_functions_are_waited_for_like_migrations(transactional_db):
    """`migrate` creates them after its last migration."""
    function, lines = functions.read()["faktory_push_1"], []
    with connection.cursor() as cursor:
        cursor.execute(f"DROP FUNCTION {function.signature}")
    try:
        with pytest.raises(CommandError, match=r"'default' lacks 1 functions of django_faktory; run manage.py migrate"):
            await_migrations("default", wait_s=0.5, write_line=lines.append)
    finally:
        call_command("migrate", verbosity=0)
    assert "lacks 1 functions: django_faktory.faktory_push_1; waiting up to" in lines[0]


@pytest.mark.parametrize("value", ["-1", "soon", "1.5"])
def test_an_invalid_migrations_wait_is_rejected(transactional_db, value):
    with pytest.raises(CommandError, match="--migrations-wait: expected whole seconds"):
        call_command("runfaktory", "--no-reload", "--migrations-wait", value)
