"""Each connection counts in its own row, and maintenance folds these rows without losing a count."""

import threading

import pytest
from django.db import connection, connections, transaction
from django.db.models import Sum

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.payloads import Ack
from django_faktory.models import Counter, Job
from django_faktory.store.dialects import dialect_of
from django_faktory.store.dialects.base import FOLDED, counter_slot
from django_faktory.store.dialects.values import Tally
from django_faktory.store.statistics import counter_rows
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)


def count(number=1):
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        dialect.count(cursor, dialect.now(cursor), Tally(processed=number))


def total():
    return Counter.objects.aggregate(Sum("processed"))["processed__sum"] or 0


def in_thread(work):
    found = []

    def body():
        try:
            found.append(work())
        finally:
            connections.close_all()

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    return found[0]


def test_two_connections_never_share_a_counter_row():
    slots = {in_thread(lambda: counter_slot(connections["default"])) for _ in range(20)}
    assert len(slots) == 20
    assert min(slots) > 15, "the slots of the last release"


def test_folding_leaves_one_row_for_each_day_and_the_same_sum():
    for _ in range(3):
        in_thread(lambda: count(5))
    count(2)
    assert Counter.objects.count() == 4
    assert counter_rows.fold(using="default") == 4
    assert list(Counter.objects.values_list("slot", "processed")) == [(FOLDED, 17)]
    assert counter_rows.fold(using="default") == 0
    count(1)
    assert total() == 18


@pytest.mark.skipif(connection.vendor == "sqlite", reason="one writer at a time")
def test_folding_skips_a_row_locked_by_a_counting_transaction():
    with transaction.atomic():
        count(3)
        in_thread(lambda: count(4))
        assert in_thread(lambda: counter_rows.fold(using="default")) == 1
    assert total() == 7
    assert counter_rows.fold(using="default") == 1
    assert total() == 7


@pytest.mark.slow
def test_no_count_is_lost_while_rows_are_folded():
    jobs = [JobFactory.many(20, working=True, wid=f"w{number}") for number in range(4)]
    for some in jobs:
        Job.objects.bulk_create(some)
    stop = threading.Event()

    def folds():
        while not stop.is_set():
            counter_rows.fold(using="default")

    def ends(number):
        broker = OrmBroker("default")
        for job in jobs[number]:
            broker.ack([Ack(jid=job.jid, wid=f"w{number}")])

    def guarded(work):
        try:
            work()
        finally:
            connections.close_all()

    folding = [threading.Thread(target=guarded, args=[folds]) for _ in range(2)]
    ending = [threading.Thread(target=guarded, args=[lambda number=number: ends(number)]) for number in range(4)]
    for thread in folding + ending:
        thread.start()
    for thread in ending:
        thread.join(60)
    stop.set()
    for thread in folding:
        thread.join(60)
    assert total() == 80
