"""A migration locks tables in use for a moment at a time, and does not change the sequences of row numbers."""

import pytest
from django.apps import apps
from django.db import NotSupportedError, OperationalError, connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState
from django.test.utils import CaptureQueriesContext

from django_faktory.migrations._in_use import ReplaceIndex, TablesInUse
from django_faktory.models import Job
from tests.deploys.rollout import busy_transaction
from tests.deploys.versions import MIGRATIONS
from tests.settings import KIND


def added(model="Job"):
    return migrations.AddField(model, "added", models.IntegerField(default=0, db_default=0))


def columns():
    with connection.cursor() as cursor:
        return {column.name for column in connection.introspection.get_table_description(cursor, "django_faktory_job")}


def apply(operation, **options):
    """Apply an operation as `migrate` does; return the statements if they are only collected."""
    before = ProjectState.from_apps(apps)
    after = before.clone()
    operation.state_forwards("django_faktory", after)
    with connection.schema_editor(**options) as editor:
        operation.database_forwards("django_faktory", editor, before, after)
    return editor.collected_sql if options else []


@pytest.mark.skipif(KIND == "sqlite", reason="left out: there all of a migration is one transaction that writes")
@pytest.mark.django_db(transaction=True)
def test_a_migration_that_cannot_lock_in_time_fails_without_changes():
    with busy_transaction(connection.settings_dict["NAME"]), pytest.raises(OperationalError):
        apply(TablesInUse([added()], wait_s=0))
    assert "added" not in columns()


def test_lock_tokens_continue_across_migrations(rollout, next_version):
    this, following = next_version
    rollout.migrate(this)
    before = [rollout.store.next_token() for _ in range(3)][-1]
    rollout.migrate(following)
    assert rollout.store.next_token() == before + 1
    rollout.migrate(following, "django_faktory", MIGRATIONS[-1])
    assert rollout.store.next_token() == before + 2


@pytest.mark.django_db(transaction=True)
def test_sqlmigrate_does_not_wait_for_table_locks():
    with busy_transaction(connection.settings_dict["NAME"]):
        sql = "\n".join(apply(TablesInUse([added("Queue")]), collect_sql=True))
    assert "django_faktory_queue" in sql
    assert "LOCK TABLE" not in sql


@pytest.mark.core
def test_tables_in_use_can_be_deconstructed_and_recreated():
    _, args, kwargs = TablesInUse([added()]).deconstruct()
    [found] = TablesInUse(*args, **kwargs).database_operations
    assert (found.model_name, found.name) == ("Job", "added")


def is_considerate(operations):
    """Return True if a migration only replaces indexes, or if it changes existing tables with care.

    With care means: at most one `TablesInUse` operation, which comes first, and otherwise only new tables.
    """
    if all(isinstance(one, ReplaceIndex) for one in operations):
        return True
    first, rest = operations[:1], operations[1:]
    return all(isinstance(one, TablesInUse | migrations.CreateModel) for one in first) and all(
        isinstance(one, migrations.CreateModel) for one in rest
    )


@pytest.mark.core
def test_each_later_migration_protects_tables_in_use():
    found = MigrationLoader(None).disk_migrations
    ours = [migration for (app, _), migration in found.items() if app == "django_faktory" and not migration.initial]
    assert [migration for migration in ours if not is_considerate(migration.operations)] == []


def expiring(**condition):
    return models.Index(fields=["expires_at"], name="faktory_expiring", condition=models.Q(**condition))


def definition(name):
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE indexname = %s", [name])
        return [text for (text,) in cursor.fetchall()]


def replace(index, *, atomic=False):
    before = ProjectState.from_apps(apps)
    with connection.schema_editor(atomic=atomic) as editor:
        ReplaceIndex("Job", index, index).database_forwards("django_faktory", editor, before, before)


@pytest.mark.skipif(KIND != "postgresql", reason="others build an index in place, or have no condition in it")
@pytest.mark.django_db(transaction=True)
def test_an_index_is_replaced_concurrently_even_after_a_failed_attempt():
    current = next(index for index in Job._meta.indexes if index.name == "faktory_expiring")
    [before] = definition("faktory_expiring")
    try:
        with connection.cursor() as cursor:
            cursor.execute("CREATE INDEX faktory_expiring_new ON django_faktory_job (id)")  # left by a broken attempt
        with CaptureQueriesContext(connection) as caught:
            replace(expiring(state="retries"))
        changes = [query["sql"] for query in caught if query["sql"].startswith(("CREATE", "DROP"))]
        assert len(changes) == 3
        assert all("CONCURRENTLY" in sql for sql in changes)
        [after] = definition("faktory_expiring")
        assert "'retries'" in after
        assert definition("faktory_expiring_new") == []
    finally:
        replace(current)
    assert definition("faktory_expiring") == [before]


@pytest.mark.skipif(KIND != "postgresql", reason="only there it must not be in a transaction")
@pytest.mark.django_db(transaction=True)
def test_an_index_is_not_replaced_in_a_transaction():
    with pytest.raises(NotSupportedError, match="atomic = False"):
        replace(expiring(state="retries"), atomic=True)


@pytest.mark.core
def test_a_migration_that_does_not_protect_tables_is_detected():
    new = migrations.CreateModel("New", [])
    assert is_considerate([TablesInUse([added()]), new, new])
    assert is_considerate([new])
    assert not is_considerate([added()])
    assert not is_considerate([new, added()])
    assert not is_considerate([new, TablesInUse([added()])])
