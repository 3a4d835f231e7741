"""PostgreSQL's stored functions: `migrate` installs those of this version, whatever it finds."""

import threading
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from django_faktory import __version__, apps
from django_faktory.core.payloads import new_job
from django_faktory.errors import FunctionsMissing
from django_faktory.models import Job
from django_faktory.store.dialects.postgresql import calls, functions
from django_faktory.store.dialects.postgresql.prepared import execute_on
from django_faktory.store.dialects.postgresql.push import push_call

pytestmark = pytest.mark.django_db

PUSH = "faktory_push_1"
NOTHING = ["[]", None, [], None, None, None, False, None]


@pytest.fixture(autouse=True)
def on_postgresql():
    if connection.vendor != "postgresql":
        pytest.skip("about PostgreSQL")
    functions.forget()
    calls.function.cache_clear()  # what is prepared is not compared again
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


def install_version(number):
    """Install another text of another version."""
    text = functions.read()[PUSH].text.replace("BEGIN\n", "BEGIN -- changed\n", 1)
    execute(text.replace(f"-- {__version__} ", f"-- {number} ", 1))


def install_older():
    install_version("0.9.10")


def change_option():
    text = Path(functions.__file__).with_name("push.sql").read_text(encoding="utf-8")
    [changed] = functions.parse(text.replace("LANGUAGE plpgsql\n", "LANGUAGE plpgsql SET jit = on\n", 1))
    execute(changed.text)


def add_parameter():
    execute(f"CREATE FUNCTION {PUSH} (jobs json, more int DEFAULT 0) RETURNS int LANGUAGE sql AS 'SELECT 1'")


def change_result():
    drop()
    parameters = ", ".join(functions.read()[PUSH].types)
    execute(f"CREATE FUNCTION {PUSH} ({parameters}) RETURNS int LANGUAGE sql AS 'SELECT 1'")


def replace_by_procedure():
    drop()
    execute(f"CREATE PROCEDURE {PUSH} (what int) LANGUAGE sql AS 'SELECT 1'")


@pytest.mark.parametrize(
    "spoil", [drop, change, install_older, change_option, add_parameter, change_result, replace_by_procedure]
)
def test_migrate_installs_what_is_missing_or_differs(spoil):
    spoil()
    assert functions.find_outdated(connection) == [PUSH]
    call_command("migrate", verbosity=0)
    assert functions.find_outdated(connection) == []
    assert calls.call(connection, PUSH, NOTHING) == []


def test_migrate_leaves_what_a_newer_release_has_installed():
    """A node of the older release may start, or migrate again, beside nodes of the newer one."""
    install_version("10.0.0")
    execute("CREATE FUNCTION faktory_push_2 () RETURNS int LANGUAGE sql AS 'SELECT 2'")
    call_command("migrate", verbosity=0)
    assert execute(f"SELECT prosrc LIKE '%BEGIN -- changed%' FROM pg_proc WHERE proname = '{PUSH}'") == [(True,)]
    assert execute("SELECT faktory_push_2()") == [(2,)]
    assert calls.call(connection, PUSH, NOTHING) == []


def test_a_second_migrate_changes_nothing():
    find = f"SELECT oid, xmin::text FROM pg_proc WHERE proname = '{PUSH}'"
    before = execute(find)
    call_command("migrate", verbosity=0)
    assert execute(find) == before


def test_migrate_installs_them_where_tables_are_made_without_migrations(settings):
    """With `MIGRATE: False`, `pytest --nomigrations` does the same."""
    drop()
    settings.MIGRATION_MODULES = {"django_faktory": None}
    call_command("migrate", "--run-syncdb", verbosity=0)
    assert functions.find_outdated(connection) == []


@pytest.mark.django_db(databases=["default", "other"])
def test_migrate_installs_them_in_each_database():
    with connections["other"].cursor() as cursor:
        cursor.execute(f"DROP FUNCTION {functions.read()[PUSH].signature}")
    call_command("migrate", verbosity=0)
    assert functions.find_outdated(connections["other"]) == [PUSH]
    call_command("migrate", database="other", verbosity=0)
    assert functions.find_outdated(connections["other"]) == []


def test_a_push_leaves_the_settings_of_the_transaction():
    execute("SET LOCAL synchronous_commit TO remote_write; SET LOCAL enable_seqscan TO on")
    values = ['[{"jid": "a", "jobtype": "t", "text": "{}"}]', "[{}]", [1], ["a"], ["key"], ["lock"], True, None]
    assert calls.call(connection, PUSH, values) == []
    assert execute("SELECT current_setting('synchronous_commit'), current_setting('enable_seqscan')") == [
        ("remote_write", "on")
    ]


def test_the_defaults_of_a_pushed_job_are_those_of_the_payload():
    """Its JSON has no members with a default."""
    job = new_job(jid="a", jobtype="t", args=[])
    other = new_job(jid="b", jobtype="t", args=[])
    with_option = new_job(jid="c", jobtype="t", args=[], custom={"expires_in": 60})
    for jobs in ([(0, job), (1, other)], [(0, with_option)]):
        execute_on(connection, [push_call(jobs, None, may_exist=True)])
    columns = ("queue", "sort_priority", "retry", "reserve_for", "backtrace", "result_ttl")
    default = (job.queue, -job.priority, job.retry, job.reserve_for, job.backtrace, job.result_ttl)
    assert {*Job.objects.values_list(*columns)} == {default}


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
    apps._complete_tables("default")
    assert execute("SELECT 1 FROM pg_proc WHERE pronamespace = 'elsewhere'::regnamespace") == []


def test_they_are_created_in_the_schema_of_the_tables():
    """Tenants have the tables in a schema each, and others of the same names may be on the path too."""
    drop()
    execute('CREATE SCHEMA "of a tenant"; SET LOCAL search_path TO "of a tenant", public')
    assert functions.install(connection) == [PUSH]
    execute('CREATE TABLE "of a tenant".django_faktory_job (LIKE public.django_faktory_job)')
    assert functions.install(connection) == [*functions.read()]
    assert functions.install(connection) == []
    find = f"SELECT pronamespace::regnamespace::text FROM pg_proc WHERE proname = '{PUSH}' ORDER BY 1"
    assert execute(find) == [('"of a tenant"',), ("public",)]


def test_a_role_without_the_right_to_create_gets_one_line():
    drop()
    execute("CREATE ROLE faktory_lesser; GRANT SELECT ON ALL TABLES IN SCHEMA public TO faktory_lesser")
    execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC; SET LOCAL ROLE faktory_lesser")
    with pytest.raises(CommandError, match=r"permission denied for schema public; .* CREATE") as caught:
        apps._complete_tables("default")
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
