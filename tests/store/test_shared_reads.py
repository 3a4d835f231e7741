"""Reads that several callers of a process share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_faktory.store import shared_reads
from django_faktory.store.shared_reads import SharedRead
from tests.clocks import Clock
from tests.waiting import wait_until

pytestmark = pytest.mark.core


class Reads:
    """Counts reads, each of which takes `takes_s`."""

    def __init__(self, clock, takes_s):
        self.clock, self.takes_s, self.count = clock, takes_s, 0

    def __call__(self):
        self.count += 1
        self.clock.now += self.takes_s
        return self.count


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(step_s=1e-6)  # no two readings are equal
    monkeypatch.setattr(shared_reads, "time", clock)
    return clock


def test_a_result_is_reused_for_a_second(clock):
    one, reads = SharedRead(), Reads(clock, 0.002)
    assert [one.get(reads) for _ in range(5)] == [1] * 5
    clock.now += shared_reads.KEPT_S
    assert one.get(reads) == 2


def test_a_result_is_reused_for_ten_times_as_long_as_its_read_takes(clock):
    one, reads = SharedRead(), Reads(clock, 3.0)
    assert one.get(reads) == 1
    clock.now += 26.5  # counted from the end of the read
    assert one.get(reads) == 1
    clock.now += 1.0
    assert one.get(reads) == 2


def test_frequent_polling_spends_about_a_tenth_of_the_time_reading(clock):
    for takes_s in (0.001, 0.3, 2.0):
        one, reads, began_at = SharedRead(), Reads(clock, takes_s), clock.now
        while clock.now < began_at + 1000 * takes_s:
            one.get(reads)
            clock.now += takes_s / 10
        assert reads.count * takes_s < 0.12 * (clock.now - began_at)


def test_concurrent_callers_share_one_read():
    one, count, may_end = SharedRead(), [], threading.Event()

    def read():
        count.append(1)
        assert may_end.wait(60)
        return "read"

    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(one.get, read)
        wait_until(lambda: count)
        others = [threads.submit(one.get, read) for _ in range(7)]
        wait_until(lambda: len(one._condition._waiters) == 7)
        may_end.set()
        assert [future.result(30) for future in [first, *others]] == ["read"] * 8
    assert len(count) == 1


def test_an_error_is_raised_to_all_waiting_callers_and_not_cached():
    one, count, may_end = SharedRead(), [], threading.Event()

    def read():
        count.append(1)
        if len(count) > 1:
            return "read"
        assert may_end.wait(60)
        raise ValueError("no database")

    def ask():
        asked.append(1)
        return one.get(read)

    asked = []
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.get, read)
        wait_until(lambda: count)
        second = threads.submit(ask)
        wait_until(lambda: asked and one._condition._waiters)
        may_end.set()
        for future in (first, second):
            with pytest.raises(ValueError, match="no database"):
                future.result(30)
    assert one.get(read) == "read"


def test_an_interrupted_read_does_not_block_later_reads():
    one = SharedRead()

    def read():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.get(read)
    assert one.get(lambda: "read") == "read"


def test_the_number_of_cached_results_is_bounded():
    for number in range(3 * shared_reads.MAX_READS):
        assert shared_reads.shared(number, lambda number=number: number, using="default") == number
    assert len(shared_reads._reads) <= shared_reads.MAX_READS
    shared_reads.forget()
    assert shared_reads._reads == {}
