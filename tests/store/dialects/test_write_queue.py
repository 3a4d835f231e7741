"""On SQLite, the writers of one process get the lock in the order in which they ask."""

import threading

import pytest
from django.db import connection, connections, transaction

from django_faktory.core.histograms import Series
from django_faktory.models import Limit, Limiter
from django_faktory.store import queues
from django_faktory.store.dialects import write_queue as module
from django_faktory.store.dialects.write_queue import WriteQueue, queue_writers, write_queue
from django_faktory.store.jobs import failures, pushes
from django_faktory.store.limits import limiters
from django_faktory.store.statistics import histograms
from django_faktory.store.store import Store
from django_faktory.store.transactions import run
from tests.factories import T0, QueueFactory, WorkerFactory, payload
from tests.waiting import wait_until


@pytest.fixture
def queue(monkeypatch):
    """The write queue of this process for its database, as a server has it."""
    monkeypatch.setattr(module, "_queues", None)
    queue_writers()
    return write_queue(str(connection.settings_dict["NAME"]))


def test_threads_get_the_queue_in_the_order_in_which_they_ask():
    queue, order, threads = WriteQueue(), [], []

    def write(number):
        with queue:
            order.append(number)

    with queue:
        for number in range(10):
            threads.append(threading.Thread(target=write, args=[number]))
            threads[-1].start()
            wait_until(lambda number=number: len(queue._waiting) == number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(10))


def test_a_failed_writer_releases_the_queue_to_the_next():
    queue, order = WriteQueue(), []

    def write():
        with queue:
            order.append("next")

    # Another thread: the queue admits the thread that has it again in any case.
    thread = threading.Thread(target=write, daemon=True)

    def fail():
        thread.start()
        wait_until(lambda: queue._waiting)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), queue:
        fail()
    thread.join(60)
    assert order == ["next"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
def test_an_on_commit_hook_writes_in_the_turn_of_its_transaction(queue):
    order = []

    def write(_):
        transaction.on_commit(lambda: run("default", lambda _: order.append("hook")))
        order.append("transaction")

    run("default", write)
    assert order == ["transaction", "hook"]
    assert queue._owner is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
def test_consecutive_transactions_of_a_thread_do_not_starve_other_writers(queue):
    order, is_writing = [], threading.Event()

    def write(_):
        order.append("again")
        if len(order) == 1:
            is_writing.set()
            wait_until(lambda: queue._waiting)

    def write_three_times():
        for _ in range(3):
            run("default", write)
        connections.close_all()

    thread = threading.Thread(target=write_three_times)
    thread.start()
    is_writing.wait(60)
    run("default", lambda _: order.append("other"))
    thread.join()
    assert order == ["again", "other", "again", "again"]


WRITES = {
    "a push": lambda: pushes.push(Store(), [payload()]),
    "a push of a unique job": lambda: pushes.push(Store(), [payload(custom={"unique_for": 60})]),
    "the list of queues": lambda: queues.add(["new", "old"], using="default"),
    "a purge of minutes": lambda: histograms.purge(using="default", kept_for_s=60),
    "idle limiters": lambda: limiters.delete_idle(using="default"),
    "a lost worker": lambda: failures.reclaim_lost(Store(), ["w1"]),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_outside_a_transaction_holds_the_queue(name, queue):
    QueueFactory(name="old", used_at=T0)
    WorkerFactory(wid="w1")
    histograms.add({("mail", "task"): Series()}, using="default", now=T0)
    limit = Limit.objects.create(scope="key", name="mail", concurrency=1)
    Limiter.objects.create(limit=limit, scope="key", name="mail:1", concurrency=1, filled_at=T0)
    owners = []

    def note(execute, sql, *rest):
        if sql.split()[0] in ("INSERT", "UPDATE", "DELETE"):
            owners.append(queue._owner)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        WRITES[name]()
    assert set(owners) == {threading.get_ident()}


def test_processes_other_than_servers_have_no_queue():
    assert write_queue("any") is module.NO_QUEUE
