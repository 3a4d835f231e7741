"""Test which database managers, rows and relations use: the setting decides, unless the caller names another one."""

from contextlib import contextmanager

import pytest
from django.apps import apps
from django.db import connections

from django_faktory.models import Job, OutboxEntry, Queue, WorkerProcess
from django_faktory.models.cron import CronEntry, CronRun
from django_faktory.store import workers
from tests.factories import T0

pytestmark = pytest.mark.django_db(databases=["default", "other"])

MODELS = [one for one in apps.get_app_config("django_faktory").get_models() if one is not OutboxEntry]
ENTRY = {"name": "nightly", "schedule": "0 2 * * *", "zone": "UTC", "jobtype": "noop"}


class Replica:
    """Read everything from `other`."""

    def db_for_read(self, model, **hints):
        return "other"


@pytest.fixture(params=["no router", "a router"])
def jobs_in_other(request, settings):
    """Store jobs in `other`, whatever a router says."""
    settings.FAKTORY = {"DATABASE": "other"}
    if request.param == "a router":
        settings.DATABASE_ROUTERS = ["tests.models.test_database.Wrong"]


class Wrong:
    """Send everything to `default`."""

    def db_for_read(self, model, **hints):
        return "default"

    db_for_write = db_for_read


@contextmanager
def untouched(alias):
    def refuse(execute, sql, *rest):
        raise AssertionError(f"{alias}: {sql}")

    with connections[alias].execute_wrapper(refuse):
        yield


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_manager_reads_the_database_of_the_setting(jobs_in_other, model):
    assert {manager.db for manager in (model.objects, model._default_manager, model._base_manager)} == {"other"}
    with untouched("default"):
        assert not model.objects.exists()


def test_the_outbox_is_read_where_transactions_enqueue(settings):
    settings.FAKTORY = {"DATABASE": "other"}
    assert OutboxEntry.objects.db == "default"
    settings.FAKTORY = {"OUTBOX": ["other"]}
    assert OutboxEntry.objects.db == "other"


def test_rows_relations_and_reloads_stay_in_the_database_of_the_setting(jobs_in_other):
    with untouched("default"):
        CronEntry(**ENTRY).save()
        entry = CronEntry.objects.get()
        CronRun.objects.create(entry_id=entry.pk, tick=T0, outcome="enqueued")
        assert entry.runs.get() == CronRun.objects.get()
        assert CronRun.objects.get().entry == entry
        entry.refresh_from_db()
        entry.delete()
        assert not CronRun.objects.exists()
        assert Queue.objects.create(name="mail")._state.db == "other"


def test_a_named_database_wins_over_the_setting():
    entry = CronEntry.objects.using("other").create(**ENTRY)
    with untouched("default"):
        entry.save()
        entry.refresh_from_db()
        assert not entry.runs.exists()
        assert Job.objects.db_manager("other").count() == 0
        assert not WorkerProcess.objects.using("other").filter(workers.living(60)).exists()
        entry.delete()
        assert not CronEntry.objects.using("other").exists()


def test_a_router_that_reads_from_a_replica_is_not_asked(settings):
    settings.DATABASE_ROUTERS = ["tests.models.test_database.Replica"]
    with untouched("other"):
        entry = CronEntry.objects.create(**ENTRY)
        assert CronEntry.objects.get()._state.db == "default"
        assert not entry.runs.exists()
        entry.refresh_from_db()
