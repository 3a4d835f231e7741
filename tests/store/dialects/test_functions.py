"""PostgreSQL's stored functions: `migrate` installs those of this version, whatever it finds."""

import threading

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from django_faktory import apps
from django_faktory.errors import FunctionsMissing
from django_faktory.store.dialects.postgresql import calls, functions

pytestmark = pytest.mark.django_db

PUSH = "faktory_push_1"
NOTHING = ["[]", [], [], [], False, None]


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL")
    functions.forget()
    yield
    functions.forget()


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else []


def drop():
    execute(f"DROP FUNCTION {functions.read()[PUSH].signature}")


def change():
    execute(functions.read()[PUSH].text.replace("BEGIN\n", "BEGIN -- changed\n", 1))


def add_parameter():
    execute(f"CREATE FUNCTION {PUSH} (jobs json, more int DEFAULT 0) RETURNS int LANGUAGE sql AS 'SELECT 1'")


def change_result():
    drop()
    parameters = ", ".join(functions.read()[PUSH].types)
    execute(f"CREATE FUNCTION {PUSH} ({parameters}) RETURNS int LANGUAGE sql AS 'SELECT 1'")


def replace_by_procedure():
    drop()
    execute(f"CREATE PROCEDURE {PUSH} (what int) LANGUAGE sql AS 'SELECT 1'")


@pytest.mark.parametrize("spoil", [drop, change, add_parameter, change_result, replace_by_procedure])
def test_migrate_installs_what_is_missing_or_differs(spoil):
    spoil()
    assert functions.find_outdated(connection) == [PUSH]
    call_command("migrate", verbosity=0)
    assert functions.find_outdated(connection) == []
    assert calls.call(connection, PUSH, NOTHING) == []


def test_a_second_migrate_changes_nothing():
    find = f"SELECT oid, xmin::text FROM pg_proc WHERE proname = '{PUSH}'"
    before = execute(find)
    call_command("migrate", verbosity=0)
    assert execute(find) == before


def test_the_printed_sql_installs_them(capsys):
    drop()
    call_command("faktory", "functions", "--sql")
    execute(capsys.readouterr().out)
    assert functions.find_outdated(connection) == []


def test_a_lost_comment_changes_nothing():
    """A dump may be restored without comments."""
    execute(f"COMMENT ON FUNCTION {functions.read()[PUSH].signature} IS NULL")
    assert functions.find_outdated(connection) == []


@pytest.mark.parametrize("spoil", [drop, change])
def test_the_first_call_of_a_process_reports_what_to_do(spoil):
    spoil()
    with pytest.raises(FunctionsMissing, match=rf"'default' lacks the function {PUSH} .* manage.py migrate"):
        calls.call(connection, PUSH, NOTHING)


def test_a_later_call_reports_what_to_do():
    calls.call(connection, PUSH, NOTHING)
    drop()
    with pytest.raises(FunctionsMissing, match=PUSH), transaction.atomic():
        calls.call(connection, PUSH, NOTHING)


def test_the_comparison_is_not_a_query_of_the_project(django_assert_num_queries):
    with django_assert_num_queries(1):
        calls.call(connection, PUSH, NOTHING)


def test_a_database_without_the_tables_gets_no_function():
    execute("CREATE SCHEMA elsewhere; SET LOCAL search_path TO elsewhere")
    assert functions.install(connection) == []


def test_they_are_created_in_the_schema_of_the_tables():
    """Tenants have the tables in a schema each, and others of the same names may be on the path too."""
    drop()
    execute('CREATE SCHEMA "of a tenant"; SET LOCAL search_path TO "of a tenant", public')
    assert functions.install(connection) == [PUSH]
    execute('CREATE TABLE "of a tenant".django_faktory_job (LIKE public.django_faktory_job)')
    assert functions.install(connection) == [PUSH]
    assert functions.install(connection) == []
    find = f"SELECT pronamespace::regnamespace::text FROM pg_proc WHERE proname = '{PUSH}' ORDER BY 1"
    assert execute(find) == [('"of a tenant"',), ("public",)]


def test_a_role_without_the_right_to_create_gets_one_line():
    drop()
    execute("CREATE ROLE faktory_lesser; GRANT SELECT ON ALL TABLES IN SCHEMA public TO faktory_lesser")
    execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC; SET LOCAL ROLE faktory_lesser")
    with pytest.raises(CommandError, match=r"permission denied for schema public; .* CREATE") as caught:
        apps._install_functions("default")
    assert "\n" not in str(caught.value)


@pytest.mark.django_db(transaction=True)
def test_two_migrate_at_the_same_time():
    """Without a mutex one of them fails with "tuple concurrently updated"."""
    errors = []

    def migrate(barrier):
        own = connections["default"]
        try:
            barrier.wait()
            functions.install(own)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        finally:
            own.close()

    for _ in range(3):
        change()
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=migrate, args=[barrier]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert functions.find_outdated(connection) == []
