"""Connections of an event loop: what they send, and what becomes of lost ones; PostgreSQL with psycopg 3 (ADR 0005)."""

import asyncio
import os
import select
import socket
import struct

import pytest
import uvloop
from django.db import DataError, OperationalError, ProgrammingError, connection

from django_faktory.store.dialects.postgresql import pipeline
from django_faktory.store.dialects.postgresql.loop_connection import PostgresqlLoopConnection
from django_faktory.store.dialects.postgresql.prepared import Command
from tests.bouncer import needs_session

pytestmark = [pytest.mark.django_db(transaction=True), needs_session("prepared statements need a session")]

ECHO = Command("echo", ["text"], "SELECT $1 AS value")
PREPARED = Command("prepared", ["text"], "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE $1")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request):
    if connection.vendor != "postgresql" or not pipeline.has_psycopg3():
        pytest.skip("about PostgreSQL")
    loop = request.param()
    yield loop
    loop.close()
    Command.works = True


@pytest.fixture
def taken(loop):
    own = connection.copy()
    own.ensure_connection()
    taken = PostgresqlLoopConnection.take(own)
    taken.start(loop)
    yield taken
    taken.close()


@pytest.fixture
def run(loop, taken):
    """Return a function that executes calls on the connection and returns their rows."""
    return lambda *calls: loop.run_until_complete(asyncio.wait_for(taken.execute(calls), 10))


def test_commands_are_prepared_in_the_message_that_first_uses_them(run):
    assert run((ECHO, ["a"]), (ECHO, ["b"])) == [[("a",)], [("b",)]]
    assert run((ECHO, ["c"])) == [[("c",)]]
    assert run((PREPARED, ["echo%"])) == [[(1,)]]


def test_nothing_is_prepared_behind_a_pooler(run, monkeypatch):
    monkeypatch.setattr(Command, "works", False)
    assert run((ECHO, ["a"])) == [[("a",)]]
    assert run((PREPARED, ["%"])) == [[(0,)]]


def test_after_lost_prepared_statements_none_is_prepared(run, taken):
    run((ECHO, ["a"]))
    with taken.connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    with pytest.raises(ProgrammingError, match="does not exist"):
        run((ECHO, ["a"]))
    assert taken.is_usable()
    assert run((ECHO, ["a"])) == [[("a",)]]
    assert not Command.works


@pytest.mark.parametrize(("command", "value", "error"), [
    (ECHO, "a\x00b", DataError),
    (ECHO, "a\ud800", UnicodeEncodeError),
    (Command("bad", ["text"], "SELECT 1 / length($1)"), "", DataError),
    (Command("unknown", ["text"], "SELECT no_such_function($1)"), "a", ProgrammingError),
], ids=["nul", "surrogate", "statement", "prepare"])  # fmt: skip
def test_an_error_of_a_value_or_statement_leaves_the_connection_usable(run, taken, command, value, error):
    for _ in range(2):
        with pytest.raises(error):
            run((ECHO, ["a"]), (command, [value]))
        assert taken.is_usable()
    assert run((ECHO, ["again"])) == [[("again",)]]


def test_an_answer_that_the_event_loop_does_not_report_is_found(loop, taken):
    """A missed event would block a commit queue, and so all clients of the server."""
    taken._read_anyway_s = 0.02
    loop.remove_reader(taken.connection.connection.pgconn.socket)
    assert loop.run_until_complete(asyncio.wait_for(taken.execute([(ECHO, ["a"])]), 10)) == [[("a",)]]


def test_a_notice_between_two_sets_leaves_the_connection_open(run, taken):
    other = connection.copy()
    with taken.connection.cursor() as cursor:
        cursor.execute("LISTEN faktory_test")
    with other.cursor() as cursor:
        cursor.execute("NOTIFY faktory_test")
    other.close()
    assert select.select([taken.connection.connection.fileno()], [], [], 10)[0]
    assert taken.is_usable()
    assert run((ECHO, ["a"])) == [[("a",)]]


def connected():
    """Return two ends of a TCP connection; the first one does not block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setblocking(False)
    return near, far


def reset(far):
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()


def test_a_reset_after_a_partial_answer_is_reported_at_once(loop):
    """libuv reports a reset once, and never again: the part read before it must not count as the whole answer."""
    own = connection.copy()
    own.ensure_connection()
    taken = PostgresqlLoopConnection(own)
    near, far = connected()
    os.dup2(near.fileno(), own.connection.pgconn.socket)
    taken._read_anyway_s = 600
    taken.start(loop)

    async def lose():
        sent = loop.create_task(taken.execute([(ECHO, ["?"])]))
        await asyncio.sleep(0)
        far.send(b"2\x00\x00")  # the first three bytes of a message
        reset(far)
        await asyncio.wait_for(sent, 10)

    with pytest.raises(OperationalError):
        loop.run_until_complete(lose())
    assert not taken.is_usable()
    near.close()


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_reset_after_a_complete_answer_is_found_before_the_next_set(taken, is_reset):
    """libuv reports the end once, with the answer: the next set on this connection would wait without end."""
    socket_fd = taken.connection.connection.pgconn.socket
    real = os.dup(socket_fd)
    execution = taken.execute([(ECHO, ["?"])])
    execution.send(None)
    with socket.socket(fileno=real) as postgresql:
        assert select.select([postgresql], [], [], 10)[0]
        answer = postgresql.recv(65_536)
    near, far = connected()
    os.dup2(near.fileno(), socket_fd)
    far.send(answer)
    if is_reset:
        reset(far)
    taken._on_input()
    with pytest.raises(StopIteration) as ended:
        execution.send(None)
    assert ended.value.value == [[("?",)]]
    assert taken.is_usable() is not is_reset
    near.close()
    far.close()
