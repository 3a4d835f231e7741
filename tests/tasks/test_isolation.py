"""Enqueueing in transactions with an isolation level other than READ COMMITTED: jobs commit or roll back with them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_faktory import NotUnique, task
from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.models import Job
from django_faktory.store.jobs import claims, exchanges
from django_faktory.store.store import Store
from django_faktory.testing import drain
from tests.deploys.rollout import another_connection
from tests.factories import payload
from tests.project.models import Mark
from tests.project.tasks import add
from tests.settings import KIND

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="about PostgreSQL"),
    pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"]),
]


@task(unique_for=600)
def once(value): ...


@task(lock=True)
def alone(value): ...


def begin(level):
    with connection.cursor() as cursor:
        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")


def test_plain_unique_and_locked_jobs_are_stored_at_each_isolation_level(level):
    for turn in range(5):  # statements are prepared only after some uses
        with transaction.atomic():
            begin(level)
            add.enqueue(turn, 1)
            once.enqueue(turn)
            alone.enqueue(turn)
            with pytest.raises(NotUnique):
                once.enqueue(turn)
        assert Job.objects.count() == 3 * (turn + 1)
    assert {ran.state for ran in drain()} == {"succeeded"}


def test_a_serialization_failure_rolls_the_job_back_and_a_rerun_stores_it(level):
    mark = Mark.objects.create(text="a")

    def change(*, meets_another):
        with transaction.atomic():
            begin(level)
            assert Mark.objects.filter(pk=mark.pk).exists()  # takes the snapshot
            add.enqueue(1, 2)
            if meets_another:
                with closing(another_connection(connection.settings_dict["NAME"])) as other, other.cursor() as cursor:
                    cursor.execute(f"UPDATE {Mark._meta.db_table} SET text = 'b'")
            Mark.objects.filter(pk=mark.pk).update(text="c")

    with pytest.raises(OperationalError, match="could not serialize access"):
        change(meets_another=True)
    assert not Job.objects.exists()
    change(meets_another=False)
    assert Job.objects.count() == 1


def fetch(wid="w1"):
    [found] = OrmBroker("default").fetch([FetchRequest(queues=("default",), wid=wid)])
    connections.close_all()
    return [job.jid for job in found]


def test_a_claim_behind_another_claim_fails_and_succeeds_in_a_new_transaction(level):
    jobs = [payload(), payload()]
    OrmBroker("default").push(jobs)
    with transaction.atomic():
        begin(level)
        assert Job.objects.count() == 2  # takes the snapshot
        with ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(fetch, "w2").result() == [jobs[0].jid]
        with pytest.raises(OperationalError, match="could not serialize access"):
            claims.fetch(Store(), [FetchRequest(queues=("default",), wid="w1")])
        transaction.set_rollback(True)
    assert Job.objects.get(state="working").wid == "w2"
    assert fetch() == [jobs[1].jid]


@pytest.mark.parametrize("has_end", [False, True])
def test_a_claim_leaves_the_settings_of_the_transaction(level, has_end):
    OrmBroker("default").push([payload(), payload()])
    [[held]] = OrmBroker("default").fetch([FetchRequest(queues=("default",), wid="w1")])
    show = "SELECT current_setting('synchronous_commit'), current_setting('enable_seqscan')"
    with transaction.atomic(), connection.cursor() as cursor:
        begin(level)
        cursor.execute("SET LOCAL synchronous_commit TO remote_write; SET LOCAL enable_seqscan TO on")
        acks = [Ack(jid=held.jid, wid="w1")] if has_end else []
        reply = exchanges.exchange(Store(), [], acks, [FetchRequest(queues=("default",), wid="w1")])
        assert (reply.acked, len(reply.fetched[0])) == ([True] * has_end, 1)
        cursor.execute(show)
        assert cursor.fetchall() == [("remote_write", "on")]
