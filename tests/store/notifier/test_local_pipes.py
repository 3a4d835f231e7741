"""Hints between the processes of one node, over inherited pipes."""

import os
import threading

import pytest

from django_faktory.store import notifier
from django_faktory.store.notifier import LocalPipes, publisher
from tests.waiting import wait_until


@pytest.fixture
def local_pipes():
    found = LocalPipes(2)
    yield found
    found.close()


def test_a_ring_wakes_each_listener_once(local_pipes):
    ears = [local_pipes.listener(place) for place in range(2)]
    local_pipes.wake({"default"})
    local_pipes.wake({"default"})
    assert [ear.wait(5) for ear in ears] == [True, True]
    assert [ear.wait(0) for ear in ears] == [False, False]


def test_rings_of_a_child_process_and_its_replacement_are_received(local_pipes):
    for _ in range(2):
        child = os.fork()
        if child == 0:
            local_pipes.wake()
            os._exit(0)
        os.waitpid(child, 0)
        assert local_pipes.listener(1).wait(5)


def test_ringing_does_not_block_when_no_listener_reads(local_pipes):
    for _ in range(100_000):
        local_pipes.wake()
    assert local_pipes.listener(0).wait(5)


def test_a_closed_listener_receives_no_ring_and_does_not_wait(local_pipes):
    listener, heard = local_pipes.listener(0), []
    waiter = threading.Thread(target=lambda: heard.append(listener.wait(60)))
    waiter.start()
    wait_until(waiter.is_alive)
    listener.close()
    listener.close()
    waiter.join(20)
    assert heard == [False]
    local_pipes.wake()
    assert not listener.wait(60)


@pytest.mark.django_db(transaction=True)
def test_an_announcement_rings_local_listeners_on_every_database(local_pipes, monkeypatch):
    monkeypatch.setattr(publisher, "_local_receivers", [])
    notifier.add_local_receiver(local_pipes.wake)
    listener = local_pipes.listener(0)
    notifier.announce("default", {"mail"})
    assert listener.wait(5)
