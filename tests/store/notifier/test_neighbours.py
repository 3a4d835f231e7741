"""Hints between the processes of one node, over inherited pipes."""

import os
import threading

import pytest

from django_faktory.store import notifier
from django_faktory.store.notifier import LocalPipes, publisher
from tests.waiting import wait_until


@pytest.fixture
def neighbours():
    found = LocalPipes(2)
    yield found
    found.close()


def test_a_ring_is_heard_by_each_once(neighbours):
    ears = [neighbours.listener(place) for place in range(2)]
    neighbours.ring({"default"})
    neighbours.ring({"default"})
    assert [ear.wait(5) for ear in ears] == [True, True]
    assert [ear.wait(0) for ear in ears] == [False, False]


def test_a_child_process_is_heard_and_so_is_one_that_takes_its_place(neighbours):
    for _ in range(2):
        child = os.fork()
        if child == 0:
            neighbours.ring()
            os._exit(0)
        os.waitpid(child, 0)
        assert neighbours.listener(1).wait(5)


def test_nobody_who_listens_does_not_hold_up_who_rings(neighbours):
    for _ in range(100_000):
        neighbours.ring()
    assert neighbours.listener(0).wait(5)


def test_a_closed_listener_hears_nothing_and_waits_for_nothing(neighbours):
    listener, heard = neighbours.listener(0), []
    waiter = threading.Thread(target=lambda: heard.append(listener.wait(60)))
    waiter.start()
    wait_until(waiter.is_alive)
    listener.close()
    listener.close()
    waiter.join(10)
    assert heard == [False]
    neighbours.ring()
    assert not listener.wait(60)


@pytest.mark.django_db(transaction=True)
def test_an_announcement_rings_after_the_commit_on_every_database(neighbours, monkeypatch):
    monkeypatch.setattr(publisher, "_also", [])
    notifier.add_local_receiver(neighbours.ring)
    listener = neighbours.listener(0)
    notifier.announce("default", {"mail"})
    assert listener.wait(5)
