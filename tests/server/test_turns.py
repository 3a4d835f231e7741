"""Connections that take much of the event loop's time get their turns. Rule: W7."""

import asyncio
from itertools import pairwise

import pytest

from django_faktory.errors import InvalidPayload
from django_faktory.server.turns import Turns

pytestmark = pytest.mark.core


class Loop:
    """A clock, and the call that is scheduled."""

    def __init__(self):
        self.now, self.delays, self.call = 0.0, [], None

    def time(self):
        return self.now

    def call_later(self, delay, call):
        self.delays.append(delay)
        self.call = call

    def run(self, count):
        for _ in range(count):
            call, self.call = self.call, None
            call()


@pytest.mark.parametrize(("others", "rests"), [(0, [0.0] * 9), (1, [0.03] * 9)])
def test_a_piece_is_followed_by_a_rest_of_its_duration_if_others_send_commands(others, rests):
    loop, commands = Loop(), 0

    def steps():
        while True:
            loop.now += 0.03
            yield

    Turns(loop, lambda: commands).run(steps(), 1, lambda _: None)
    for _ in range(10):
        loop.run(1)
        commands += others
    assert loop.delays[2:] == pytest.approx(rests)


def test_each_iteration_of_the_loop_runs_one_piece_in_order_of_arrival():
    resumed, counts = [], []

    async def run():
        turns = Turns(asyncio.get_running_loop(), lambda: 0)

        def rest(number):
            turns.wait(lambda: (resumed.append(number), rest(number)))

        for number in range(10):
            rest(number)
        while len(resumed) < 20:
            await asyncio.sleep(0)
            counts.append(len(resumed))

    asyncio.run(run())
    assert resumed[:20] == [*range(10), *range(10)]
    assert all(after - before <= 1 for before, after in pairwise([0, *counts]))


def test_the_end_of_steps_is_reported_and_an_unknown_error_is_not_revealed():
    loop, done = Loop(), []
    turns = Turns(loop, lambda: 0)

    def steps(error=None):
        yield
        if error:
            raise error
        return "command"

    closed = steps()
    for one in (steps(), steps(InvalidPayload("no")), steps(ValueError("secret")), closed):
        turns.run(one, 0, done.append)
    closed.close()
    loop.run(7)
    assert loop.call is None
    assert [str(result) for result in done] == ["None", "command", "no", "internal error"]


def test_lines_beyond_the_budget_wait_in_order_until_earlier_ones_are_answered():
    loop, done = Loop(), []
    turns = Turns(loop, lambda: 0, budget_bytes=10)

    def line(number):
        return number
        yield

    for number, size in enumerate([4, 20, 3, 6, 9]):
        turns.run(line(number), size, done.append)
    loop.run(1)
    assert (done, loop.call) == ([0], None)
    turns.release(4)
    loop.run(1)
    assert (done, loop.call) == ([0, 1], None), "a line beyond the budget runs alone"
    turns.release(20)
    loop.run(2)
    assert (done, loop.call) == ([0, 1, 2, 3], None)
    turns.release(3)
    assert loop.call is None
    turns.release(6)
    loop.run(1)
    assert done == [0, 1, 2, 3, 4]
