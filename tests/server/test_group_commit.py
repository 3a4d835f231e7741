"""`CommitQueue` in isolation: grouping, failures of single commands, and draining. Rules: W29, W30."""

import asyncio
import threading
import time

import pytest

from django_faktory.errors import BrokerUnavailable, JobNotFound
from django_faktory.server.group_commit import MAX_SET_WEIGHT, CommitQueue

pytestmark = pytest.mark.core


class Counter:
    """Test double that executes sets: records the size of each set, and can be made to wait."""

    def __init__(self):
        self.sets, self.resets = [], 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.began = threading.Event()

    def __call__(self, items):
        self.began.set()
        assert self.may_go.wait(60)
        self.sets.append(len(items))
        for error in (item for item in items if isinstance(item, Exception)):
            raise error
        return [item * 2 for item in items]

    def reset(self):
        self.resets += 1


def run_items(items, counter, *, at_once=True, answer=None, **options):
    """Submit all items and return the answers in order. Without `at_once`, the first item runs in a set of its own."""

    async def run():
        loop, answers = asyncio.get_running_loop(), []
        commit_queue = CommitQueue("test", counter, reset=counter.reset, loop=loop, **options)
        first, rest = ([], items) if at_once else (items[:1], items[1:])
        if not at_once:
            counter.may_go.clear()
        for item in first:
            commit_queue.submit(item, answer or answers.append)
        if first:
            await asyncio.to_thread(counter.began.wait, 10)
        for item in rest:
            commit_queue.submit(item, answer or answers.append)
        counter.may_go.set()
        await commit_queue.wait_idle()
        await asyncio.to_thread(commit_queue.close)
        return answers

    return asyncio.run(run())


def test_items_submitted_together_run_in_one_set_and_are_answered_in_order():
    """W29: commands submitted together run in one set."""
    counter = Counter()
    assert run_items([1, 2, 3], counter) == [2, 4, 6]
    assert counter.sets == [3]


def test_items_submitted_before_a_set_join_it():
    """Refills of the prefetch buffer cost no exchange of their own."""
    counter, queues, joined = Counter(), [], []

    def before_set():
        if not joined:
            queues[0].submit(10, joined.append)

    async def run():
        queues.append(CommitQueue("test", counter, reset=counter.reset, loop=asyncio.get_running_loop()))
        queues[0].before_set = before_set
        answers = []
        queues[0].submit(1, answers.append)
        await queues[0].wait_idle()
        await asyncio.to_thread(queues[0].close)
        return answers

    assert asyncio.run(run()) == [2]
    assert joined == [20]
    assert counter.sets == [2]


def test_a_second_thread_does_not_wait_for_the_first():
    counter = Counter()

    async def run():
        commit_queue = CommitQueue("test", counter, width=2, reset=counter.reset, loop=asyncio.get_running_loop())
        counter.may_go.clear()
        for item in (1, 2):
            counter.began.clear()
            commit_queue.submit(item, lambda _: None)
            assert await asyncio.to_thread(counter.began.wait, 10)
        counter.may_go.set()
        await commit_queue.wait_idle()
        await asyncio.to_thread(commit_queue.close)

    asyncio.run(run())
    assert counter.sets == [1, 1]


def test_a_set_is_limited_in_number_and_total_weight():
    counter = Counter()
    run_items([1] * (MAX_SET_WEIGHT + 1), counter)
    run_items([300, 100, 100, 1, 900, 1], counter, weigh=lambda item: item)
    assert counter.sets == [MAX_SET_WEIGHT, 1, 3, 1, 1, 1]


def test_a_pause_after_a_set_delays_the_next_set_but_no_answer():
    counter, pauses, answered_at = Counter(), [], []

    def pause_s(items, ran_s):
        pauses.append((items, ran_s))
        return 0.2 if items == [1] else 0.0

    def answer(_):
        answered_at.append(time.monotonic())

    run_items([1, 2, 3], counter, weigh=lambda _: MAX_SET_WEIGHT, answer=answer, pause_s=pause_s)
    assert [items for items, _ in pauses] == [[1], [2], [3]]
    assert all(ran_s > 0 for _, ran_s in pauses)
    assert counter.sets == [1, 1, 1]
    assert answered_at[1] - answered_at[0] >= 0.2


def test_a_command_that_raises_is_logged_and_fails_alone(caplog):
    counter = Counter()
    answers = run_items([1, RuntimeError("poison"), 3], counter)
    assert (answers[0], str(answers[1]), answers[2]) == (2, "internal error", 6)
    assert counter.sets == [3, 1, 2, 1, 1], "halves"
    assert "command failed" in caplog.text


def test_a_known_error_is_returned_to_its_own_command():
    answers = run_items([JobNotFound("abcdefgh"), 1], Counter())
    assert [str(answers[0]), answers[1]] == ["Job not found abcdefgh", 2]


def test_an_unavailable_database_fails_the_whole_set_and_closes_the_connection():
    """W30: a lost database fails all commands of the set, and closes the connection."""
    counter = Counter()
    answers = run_items([1, BrokerUnavailable("no route to host"), 3], counter)
    assert [(type(one), str(one)) for one in answers] == [(BrokerUnavailable, "database unavailable")] * 3
    assert counter.sets == [3]
    assert counter.resets == 2, "one reset after the error, and one at the end"


def test_a_reply_callback_that_raises_does_not_block_other_replies(caplog):
    answered = []

    def answer(one):
        if one == 4:
            raise ValueError("the client has disconnected")
        answered.append(one)

    run_items([1, 2, 3], Counter(), answer=answer)
    assert answered == [2, 6]
    assert "answer failed" in caplog.text


def test_an_idle_queue_is_drained_and_closes_at_once():
    counter = Counter()
    assert run_items([], counter) == []
    assert (counter.sets, counter.resets) == ([], 1)


def test_all_submitted_items_are_answered_before_the_queue_closes():
    """W28: the commit queue drains before it closes."""
    assert run_items(list(range(1200)), Counter()) == [n * 2 for n in range(1200)]


class Connection:
    """Test double for a connection of the event loop, and for what executes sets on it."""

    def __init__(self, error=None):
        self.error, self.closed, self.sets = error, 0, []

    def start(self, loop):
        self.loop = loop

    def is_usable(self):
        return not self.closed

    def close(self):
        self.closed += 1

    async def execute(self, connection, items, in_thread):
        assert connection is self
        self.sets.append(len(items))
        if self.error == "needs a thread":
            return None
        if self.error == "remaining work":
            name = await in_thread(lambda: threading.current_thread().name)
            return [name] * len(items)
        if self.error:
            raise self.error
        return [item * 100 for item in items]


@pytest.mark.parametrize(("error", "expected", "closed"), [
    (None, [2, 200, 300, 500], 1),
    ("needs a thread", [2, 4, 6, 10], 1),
    ("remaining work", [2, "faktory-test-0", "faktory-test-0", "faktory-test-0"], 1),
    (BrokerUnavailable("no route to host"), [2, *["database unavailable"] * 3], 1),
    (RuntimeError("a mistake of ours"), [2, *["database unavailable"] * 2, 10], 1),
], ids=["well", "thread", "remaining", "lost", "mistake"])  # fmt: skip
def test_sets_are_executed_on_a_connection_of_the_event_loop(error, expected, closed):
    """ADR 0005: the first set passes the thread, whose connection the loop takes; an error of ours stops nothing."""
    connection, counter, taken = Connection(error), Counter(), []

    def connect():
        taken.append(connection)
        return connection if len(taken) == 1 else None

    async def run():
        answers = []
        loop = asyncio.get_running_loop()
        commit_queue = CommitQueue(
            "test", counter, connect=connect, on_loop=connection.execute, reset=counter.reset, loop=loop
        )
        for items in ([1], [2, 3], [5]):
            for item in items:
                commit_queue.submit(item, answers.append)
            await commit_queue.wait_idle()
        commit_queue.close_connections()
        await asyncio.to_thread(commit_queue.close)
        return answers

    answers = [str(answer) if isinstance(answer, Exception) else answer for answer in asyncio.run(run())]
    assert answers[: len(expected)] == expected
    assert connection.closed == closed
    assert connection.sets[0] == 2


def test_an_error_in_remaining_work_closes_the_connection_of_the_thread():
    connection, counter = Connection(), Counter()

    def fail():
        raise BrokerUnavailable("no route to host")

    async def on_loop(_connection, items, in_thread):
        return await in_thread(fail)

    async def run():
        answers = []
        commit_queue = CommitQueue(
            "test",
            counter,
            connect=lambda: connection,
            on_loop=on_loop,
            reset=counter.reset,
            loop=asyncio.get_running_loop(),
        )
        for item in (1, 2):
            commit_queue.submit(item, answers.append)
            await commit_queue.wait_idle()
        await asyncio.to_thread(commit_queue.close)
        return answers

    assert [str(answer) for answer in asyncio.run(run())] == ["2", "database unavailable"]
    assert counter.resets == 2


def test_one_thread_serves_several_sets_in_turn():
    counter = Counter()

    async def run():
        loop, answers = asyncio.get_running_loop(), []
        commit_queue = CommitQueue("test", counter, width=2, threads=1, reset=counter.reset, loop=loop)
        counter.may_go.clear()
        commit_queue.submit(1, answers.append)
        assert await asyncio.to_thread(counter.began.wait, 10)
        commit_queue.submit(2, answers.append)
        await asyncio.sleep(0)
        counter.may_go.set()
        await commit_queue.wait_idle()
        await asyncio.to_thread(commit_queue.close)
        return answers

    assert asyncio.run(run()) == [2, 4]
    assert counter.sets == [1, 1]
