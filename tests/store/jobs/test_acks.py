"""A set of acks with two transactions, the second of which fails: each ack gets its own answer, and counts once."""

from contextlib import closing
from functools import partial

import pytest
from django.db import connection

from django_faktory.core.payloads import Ack, FetchRequest
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Batch, Delta, Job
from django_faktory.store.jobs import acknowledgements, claims, pushes
from django_faktory.store.statistics import counts
from django_faktory.store.store import Store
from tests.bouncer import needs_session
from tests.deploys.rollout import another_connection
from tests.settings import KIND
from tests.store.batches.test_batches import commit, job, new, push

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(KIND != "postgresql", reason="needs a lock of one row and a short wait for it"),
    needs_session("it sets the lock timeout of its session"),
]


@pytest.fixture
def locked_batch():
    """A batch with three members, its row locked by another transaction; the lock timeout of this session is 50 ms."""
    bid = new()
    push(bid, 3)
    commit(bid)
    other = another_connection(connection.settings_dict["NAME"])
    with closing(other), connection.cursor() as cursor, other.cursor() as others:
        cursor.execute("SET lock_timeout = '50ms'")
        others.execute("BEGIN")
        others.execute(f"SELECT 1 FROM {Batch._meta.db_table} WHERE bid = %s FOR UPDATE", [bid])
        yield lambda: others.execute("ROLLBACK")
    connection.close()  # ends the session, and with it its lock_timeout


def working(count):
    """Push this many jobs outside of any batch, and fetch them together with the members."""
    pushes.push(Store(), [job() for _ in range(count)])
    [found] = claims.fetch(Store(), [FetchRequest(queues=("default",), wid="w", count=100)])
    return [Ack(jid=one.jid, wid="w", attempt=one.attempt) for one in found]


def counters():
    totals = counts.read(using="default").totals
    return totals["processed"], totals["late"]


def test_only_acks_of_batch_members_fail_when_the_batch_row_is_locked(locked_batch):
    ended = []
    store = Store()
    store.record_ended = ended.extend
    acks = working(9)
    answers = acknowledgements.ack(store, acks)
    again = [one for one, answer in zip(acks, answers, strict=True) if isinstance(answer, BrokerUnavailable)]
    assert (answers.count(True), len(again), len(ended)) == (9, 3, 9)
    assert Job.objects.count() == 3

    locked_batch()
    assert acknowledgements.ack(store, again) == [True] * 3
    assert len(ended) == 12
    assert counters() == (12, 0)


def test_committed_chunks_of_acks_are_answered_when_a_later_chunk_fails(locked_batch):
    ack = partial(acknowledgements.ack, Store(), chunk_size=4)
    acks = sorted(working(9), key=lambda one: one.jid)
    plain = [one for one in acks if Job.objects.get(jid=one.jid).bid is None]
    with closing(another_connection(connection.settings_dict["NAME"])) as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"LOCK TABLE {Delta._meta.db_table}")
        with pytest.raises(BrokerUnavailable):
            ack(plain)
        cursor.execute("ROLLBACK")
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT 1 FROM {Job._meta.db_table} WHERE jid = %s FOR UPDATE", [plain[5].jid])
        with connection.cursor() as ours:
            ours.execute("SET lock_timeout = '50ms'")  # the error has replaced the connection
        answers = ack(plain)
        cursor.execute("ROLLBACK")
    assert answers[:4] == [True] * 4
    assert all(isinstance(answer, BrokerUnavailable) for answer in answers[4:])
    locked_batch()
    assert ack(plain[4:]) == [True] * 5
    assert counters() == (9, 0)
