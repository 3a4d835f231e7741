"""On SQLite the writers of one process take turns in the order in which they ask."""

import threading

import pytest
from django.db import connection, connections, transaction

from django_faktory.store.dialects import write_queue as module
from django_faktory.store.dialects.write_queue import WriteQueue, queue_writers, write_queue
from django_faktory.store.transactions import run
from tests.waiting import wait_until


@pytest.fixture
def queue(monkeypatch):
    """The queue of this process for its database, as a server has it."""
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


def test_an_error_of_a_writer_lets_the_next_one_in():
    queue = WriteQueue()
    with pytest.raises(ZeroDivisionError), queue:
        raise ZeroDivisionError
    assert queue._owner is None  # this thread would get a queue that it still has


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
def test_a_hook_after_a_commit_writes_in_the_turn_of_its_transaction(queue):
    order = []

    def write(_):
        transaction.on_commit(lambda: run("default", lambda _: order.append("hook")))
        order.append("transaction")

    run("default", write)
    assert order == ["transaction", "hook"]
    assert queue._owner is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite")
def test_a_thread_with_one_transaction_after_another_keeps_no_other_writer_waiting(queue):
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
    is_writing.wait(10)
    run("default", lambda _: order.append("other"))
    thread.join()
    assert order == ["again", "other", "again", "again"]


def test_processes_that_are_no_server_have_no_queue():
    assert write_queue("any") is module.NO_QUEUE
