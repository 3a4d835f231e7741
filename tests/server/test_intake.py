"""Connections that send long lines are read in turns. Rule: W7."""

import asyncio

import pytest

from django_faktory.server.intake import READS_A_STEP, Intake
from tests.server.raw import push
from tests.waiting import wait_until

LONG = 4 * 1024 * 1024
PIECE = 1024 * 1024


@pytest.mark.core
def test_a_few_connections_are_read_in_each_step_of_the_loop_in_the_order_they_came():
    read, steps = [], []

    async def run():
        intake = Intake(asyncio.get_running_loop())
        for number in range(10):
            intake.wait(lambda number=number: read.append(number))
        while len(read) < 10:
            await asyncio.sleep(0)
            steps.append(len(read))

    asyncio.run(run())
    assert read == list(range(10))
    assert all(after - before <= READS_A_STEP for before, after in zip([0, *steps], steps, strict=False))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("line", [push(jid="abcdefgh", args=["x" * LONG]), "INFO " + "x" * LONG], ids=["PUSH", "INFO"])
def test_no_more_of_a_long_line_is_read_before_its_turn(server, connect, monkeypatch, line):
    client, waiting = connect(), []
    monkeypatch.setattr(server.intake, "wait", waiting.append)
    [connection] = server._connections
    client.send(line[:PIECE], end="")
    wait_until(lambda: waiting)
    assert connection._reads_no_more
    assert connection._protocol.buffered_bytes < PIECE
    monkeypatch.undo()
    server.loop.call_soon_threadsafe(waiting.pop())
    client.send(line[PIECE:])
    assert client.reply() == (
        b"+OK" if line.startswith("PUSH") else b"-ERR INFO: expected at most 262144 characters behind it, got more"
    )
