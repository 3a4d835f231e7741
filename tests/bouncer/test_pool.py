"""With Django's connection pool: the package keeps no connection that other threads wait for."""

import pytest
from django.db import connection

from django_faktory.models import Job
from django_faktory.store import notifier
from django_faktory.store.notifier import postgresql
from tests import services
from tests.project.tasks import add
from tests.settings import KIND, VIA
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="about PostgreSQL"),
    pytest.mark.skipif(bool(services.django_pool().missing), reason="left out: psycopg_pool is not installed"),
]


def test_a_listener_keeps_no_connection_of_the_pool(change_connection, closing_later):
    change_connection(OPTIONS={"pool": {"min_size": 1, "max_size": 1, "timeout": 2}})
    listener = closing_later(notifier.listen("default"))
    # Through a PgBouncer it receives nothing; it has tried for long enough when its thread ends.
    wait_until(lambda: listener.receives_all if VIA != "bouncer" else not listener._thread.is_alive())
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_listening_channels()")
        # Nodes that other tests killed may have left the channel of a trial, which is silent, in PgBouncer's session.
        assert (postgresql.CHANNEL,) not in cursor.fetchall()
    assert connection.pool.get_stats()["pool_size"] == 1


def test_a_node_with_more_threads_than_pool_connections_does_not_starve(runfaktory):
    node = runfaktory(
        *("127.0.0.1:0", "--processes", "1", "--concurrency", "4"),
        environment={"FAKTORY_TEST_VIA": "pool", "FAKTORY_TEST_POOL": "1"},
    )
    add.enqueue_many([(1, 2)] * 40)
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists(), what="all are done")
    for trouble in ("couldn't get a connection", "database unavailable", "Traceback"):
        assert trouble not in node.text
