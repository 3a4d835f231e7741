"""System checks of routers, and of rows in a database that nothing reads."""

import pytest
from django.core.checks import run_checks

from django_faktory.models import Limit
from tests.factories import JobFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(databases=["default", "other"])]


class ToDefault:
    """Send writes to `default`."""

    def db_for_write(self, model, **hints):
        return "default"


class KeepOut:
    """Create no tables of the app in `other`."""

    def allow_migrate(self, db, app_label, **hints):
        return None if db == "default" else app_label != "django_faktory"


class ToOther:
    """Agree with `FAKTORY["DATABASE"]` of these tests."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "django_faktory" else None


def messages(**options):
    found = [one for one in run_checks(**options) if one.id.startswith("django_faktory.")]
    return [f"{one.id.partition('.')[2]}: {one.msg} | {one.hint}" for one in found]


@pytest.fixture
def jobs_in_other(settings):
    settings.FAKTORY = {"DATABASE": "other"}


def test_a_router_that_writes_jobs_to_another_database_is_an_error(jobs_in_other, settings):
    settings.DATABASE_ROUTERS = ["tests.checks.test_databases.ToDefault"]
    [message] = messages()
    assert message == (
        "E019: DATABASE_ROUTERS: expected 'other', as in FAKTORY['DATABASE'], for writes of jobs, got 'default' | "
        "For django_faktory, return 'other' in db_for_write and True in allow_migrate, or change FAKTORY['DATABASE']."
    )


def test_a_router_that_keeps_the_tables_out_is_a_warning(jobs_in_other, settings):
    settings.DATABASE_ROUTERS = ["tests.checks.test_databases.KeepOut"]
    [message] = messages()
    assert message.startswith("W007: DATABASE_ROUTERS: allow_migrate is False for 'other'")


def test_routers_that_agree_pass_and_may_read_from_replicas(jobs_in_other, settings):
    settings.DATABASE_ROUTERS = ["tests.checks.test_databases.ToOther", "tests.checks.test_databases.ToDefault"]
    assert messages() == []


def test_rows_in_a_database_that_nothing_reads_are_a_warning(jobs_in_other):
    assert messages(databases=["default", "other"]) == []
    JobFactory._meta.model.objects.using("default").bulk_create([JobFactory.build()])
    Limit.objects.using("default").create(scope="task", name="noop", concurrency=1)
    Limit.objects.create(scope="task", name="noop", concurrency=1)
    [message] = messages(databases=["default", "other"])
    assert message.startswith(
        "W008: DATABASES['default'] has jobs, limits that nothing reads: FAKTORY['DATABASE'] is 'other'"
    )
    assert messages(databases=["other"]) == []
    assert messages() == []
