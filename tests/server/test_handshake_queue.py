"""The server checks one password at a time, and serves established connections between two checks."""

import asyncio
import itertools
import json
from hashlib import sha256

import pytest

from django_faktory.server.handshake_queue import HandshakeQueue
from tests.server.raw import RawClient

pytestmark = pytest.mark.once_if_quick

ROUNDS = 20_000


@pytest.mark.core
def test_other_work_is_served_between_two_password_checks():
    async def scene():
        loop, happened, done = asyncio.get_running_loop(), [], asyncio.Event()
        handshake_queue = HandshakeQueue(loop)

        def check():
            digest = b""
            for _ in range(ROUNDS):
                digest = sha256(digest).digest()
            happened.append("check")
            if happened.count("check") == 10:
                done.set()

        def serve():
            happened.append("served")
            if not done.is_set():
                loop.call_soon(serve)

        loop.call_soon(serve)
        for _ in range(10):
            handshake_queue.ask(check)
        await done.wait()
        return happened

    happened = asyncio.run(scene())
    checks = [place for place, what in enumerate(happened) if what == "check"]
    assert len(checks) == 10
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(checks))


@pytest.mark.core
def test_a_check_that_raises_does_not_block_later_checks():
    async def scene():
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda *_: None)
        handshake_queue = HandshakeQueue(loop)
        loop.call_soon(handshake_queue.ask, lambda: 1 / 0)
        loop.call_soon(handshake_queue.ask, done.set)
        await asyncio.wait_for(done.wait(), 10)

    asyncio.run(scene())


def hello(client, password):
    asked = json.loads(client.reply()[4:])
    digest = (password + asked["s"]).encode()
    for _ in range(asked["i"]):
        digest = sha256(digest).digest()
    return f'HELLO {{"v":2,"pwdhash":"{digest.hex()}"}}\r\nINFO\r\n'


def test_clients_that_log_in_together_are_accepted_with_their_next_commands(serve, settings):
    """The HELLO arrives in two pieces, because each piece may wait in the queue separately."""
    settings.FAKTORY = {"HELLO_TIMEOUT": 60}  # on a busy machine thirty checks take longer than the default of 5 s
    server = serve(password="s3cret")
    clients = [RawClient(server.address) for _ in range(30)]
    lines = [hello(client, "s3cret") for client in clients]
    for client, line in zip(clients, lines, strict=True):
        client.send(line[:25], end="")
    for client, line in zip(clients, lines, strict=True):
        client.send(line[25:], end="")
    for client in clients:
        assert client.reply() == b"+OK"
        assert json.loads(client.reply())["server"]
        client.close()


def test_clients_that_disconnect_in_the_queue_do_not_block_new_ones(serve):
    server = serve(password="s3cret")
    gone = [RawClient(server.address) for _ in range(30)]
    for client in gone:
        client.send(hello(client, "wrong"))
        client.close()
    # Wrong guesses may have blocked this address for a moment; the server then reports an error and does not stay
    # silent.
    client = RawClient(server.address)
    assert client.reply().startswith((b"+HI", b"-ERR too many wrong passwords"))
    client.close()
