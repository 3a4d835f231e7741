"""The server reads connections that send long lines a few at a time. Rule: W7."""

import asyncio

import pytest

from django_faktory.server.intake import CONNECTIONS_A_STEP, REST_S, Intake
from django_faktory.server.long_commands import CommandScheduler
from tests.server.raw import push
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick

LONG = 4 * 1024 * 1024
PIECE = 1024 * 1024


@pytest.mark.core
def test_each_loop_step_reads_a_limited_number_of_connections_in_order():
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
    assert all(after - before <= CONNECTIONS_A_STEP for before, after in zip([0, *steps], steps, strict=False))


@pytest.mark.core
def test_resting_connections_are_resumed_in_turn_a_few_at_a_time():
    resumed, steps = [], []

    async def run():
        rest_queue = Intake(asyncio.get_running_loop(), pause_s=REST_S)

        def rest(number):
            rest_queue.wait(lambda: (resumed.append(number), rest(number)))

        for number in range(10):
            rest(number)
        while len(resumed) < 20:
            await asyncio.sleep(0)
            steps.append(len(resumed))

    asyncio.run(run())
    assert resumed[:20] == [*range(10), *range(10)]
    assert all(after - before <= CONNECTIONS_A_STEP for before, after in zip([0, *steps], steps, strict=False))


@pytest.mark.core
def test_a_full_intake_reads_no_connection_but_still_frees_memory():
    done, is_full = [], [True]

    async def run():
        freed, read = asyncio.Event(), asyncio.Event()
        intake = Intake(asyncio.get_running_loop(), is_full=lambda: is_full[0])
        intake.wait(lambda: (done.append("read"), read.set()))
        intake.free(lambda: (done.append("freed"), freed.set()))
        await freed.wait()
        assert done == ["freed"]
        is_full[0] = False
        await read.wait()

    asyncio.run(run())
    assert done == ["freed", "read"]


@pytest.mark.core
def test_waiting_lines_are_counted_until_they_run_or_their_client_disconnects():
    """Sixty clients with a complete line of 16 MiB each once took 1 GB of memory."""
    freed = []

    class Loop:
        def call_soon(self, call):
            """Do nothing: these lines are never read."""

    def steps():
        yield

    one = CommandScheduler(Loop(), commands=lambda: 0, later=freed.append, budget_bytes=5000)
    places = [one.take(steps(), 5000, lambda _: None) for _ in range(4)]
    assert one.waiting_bytes == 15_000
    places[0].leave()
    assert one.waiting_bytes == 10_000
    places[2].give_up()
    assert one.waiting_bytes == 5000
    assert freed == [places[2].steps.close]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("line", [push(jid="abcdefgh", args=["x" * LONG]), "INFO " + "x" * LONG], ids=["PUSH", "INFO"])
def test_a_long_line_is_not_read_further_before_its_turn(server, connect, monkeypatch, line):
    client, waiting = connect(), []
    monkeypatch.setattr(server.intake, "wait", waiting.append)
    [connection] = server._connections
    client.send(line[:PIECE], end="")
    wait_until(lambda: waiting)
    assert connection._is_reading_paused
    assert connection._protocol.buffered_bytes < PIECE
    monkeypatch.undo()
    server.loop.call_soon_threadsafe(waiting.pop())
    client.send(line[PIECE:])
    assert client.reply() == (
        b"+OK" if line.startswith("PUSH") else f"-ERR INFO: line: expected at most 1024 bytes, got {len(line)}".encode()
    )
