"""Pages and metrics are read while another connection writes: on SQLite no read waits for the write lock."""

import sqlite3
from contextlib import closing

import pytest
from django.db import connection
from django.test import Client, RequestFactory

from django_faktory.brokers.orm import OrmBroker
from django_faktory.contrib.metrics import views
from django_faktory.operations import queue_sizes, statistics
from django_faktory.runtime import health, statsd
from django_faktory.store import queues, shared_reads, workers
from tests.factories import JobFactory, QueueFactory, WorkerFactory
from tests.settings import KIND

pytestmark = [
    pytest.mark.once_if_quick,
    pytest.mark.skipif(KIND != "sqlite", reason="other databases have no such lock"),
    pytest.mark.django_db(transaction=True),
]

USING = "default"
PAGES = [
    *(f"/admin/django_faktory/{page}/" for page in ("overview", "queue", "job", "workerprocess", "batch", "joblock")),
    "/admin/django_faktory/queue/mail/change/",
    *(f"/api/{path}/" for path in ("jobs", "queues", "workers", "batches", "cron", "limits", "locks", "statistics")),
]


@pytest.fixture
def stored():
    for number in range(3):
        QueueFactory(name=f"q{number}")
    QueueFactory(name="mail")
    JobFactory.create_batch(3, queue="mail")
    JobFactory(dead=True)
    WorkerFactory(wid="w1")


@pytest.fixture
def is_written(stored):
    """Hold the write lock in another connection."""
    with closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None, timeout=0)) as other:
        connection.close()
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE django_faktory_queue SET paused_at = NULL")
        yield
        other.execute("ROLLBACK")
    connection.close()  # a test has set its busy timeout


READS = {
    "INFO": lambda: OrmBroker(USING).info(),
    "latency": lambda: OrmBroker(USING).latency(["mail", "q0"]),
    "waiting": lambda: queue_sizes.read(["mail", "q0"], using=USING),
    "names": lambda: queues.known_names(using=USING),
    "metrics": lambda: views.metrics(RequestFactory().get("/")).content,
    "probes": lambda: health.check_ready(using=USING),
    "statsd": lambda: list(statsd.format_sizes(statistics.read(using=USING))),
    "workers": lambda: workers.count_jobs_of(["w1"], using=USING),
}


@pytest.mark.parametrize("name", READS)
def test_numbers_are_read_while_another_connection_writes(name, is_written):
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 0")  # a read that needs the lock fails at once
    shared_reads.forget()
    assert READS[name]() is not False


@pytest.fixture
def root(stored, django_user_model):
    client = Client()
    client.force_login(django_user_model.objects.create_superuser("root", password="x"))
    for page in PAGES:  # run the queries and writes that Django makes only once
        assert client.get(page).status_code == 200, page
    return client


def test_pages_are_read_while_another_connection_writes(root, is_written):
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 0")
    for page in PAGES:
        shared_reads.forget()
        assert root.get(page).status_code == 200, page
