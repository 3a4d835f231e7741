"""The contract of listeners: a second look after each hint, and waiting without hints."""

import fcntl
import os
import resource
import threading
import time

import pytest

from django_faktory.store.notifier.base import DEBOUNCE_S, SECOND_LOOK_S, Listener, PollingListener, wait_readable

pytestmark = pytest.mark.core

LONG_S = 30


def test_descriptors_above_1023_can_be_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1100)
    assert wait_readable([high], LONG_S) == [high]
    for descriptor in (read_end, write_end, high):
        os.close(descriptor)


class Bell(Listener):
    """A listener with hints that the test sets manually."""

    def __init__(self):
        super().__init__()
        self.rung = threading.Event()

    def close(self):
        self.rung.set()

    def _wait_for_notification(self, timeout_s):
        heard = self.rung.wait(timeout_s)
        self.rung.clear()
        return heard


@pytest.fixture
def bell():
    return Bell()


def test_a_wait_without_a_hint_returns_false(bell):
    assert bell.wait(0.01) is False


def test_a_hint_is_followed_by_one_second_look(bell):
    bell.rung.set()
    assert bell.wait(LONG_S) is True
    assert bell.wait(LONG_S) is True
    assert bell.wait(0.01) is False


def test_the_second_look_is_later_than_the_debounce_time(bell):
    began_at = time.monotonic()
    bell.rung.set()
    bell.wait(LONG_S)
    bell.wait(LONG_S)
    assert time.monotonic() - began_at >= SECOND_LOOK_S * 0.9 > DEBOUNCE_S


def test_a_shorter_wait_does_not_consume_the_second_look(bell):
    bell.rung.set()
    bell.wait(LONG_S)
    assert bell.wait(0) is False
    assert bell.wait(LONG_S) is True


def test_a_hint_during_the_second_look_has_its_own_second_look(bell):
    bell.rung.set()
    bell.wait(LONG_S)
    bell.rung.set()
    assert [bell.wait(LONG_S), bell.wait(LONG_S), bell.wait(0.01)] == [True, True, False]


def test_polls_are_less_frequent_when_every_hint_is_received(bell):
    assert (bell.poll_s(1.0), PollingListener().poll_s(1.0)) == (1.0, 1.0)
    bell.receives_all = True
    assert bell.poll_s(1.0) == 5.0


def test_a_polling_listener_waits_the_whole_timeout():
    began_at = time.monotonic()
    assert PollingListener().wait(0.02) is False
    assert time.monotonic() - began_at >= 0.018


def test_closing_ends_a_wait_in_another_thread():
    listener = PollingListener()
    waiting = threading.Thread(target=listener.wait, args=[LONG_S])
    waiting.start()
    listener.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert listener.wait(LONG_S) is False
