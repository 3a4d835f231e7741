"""Test that the password cannot be bypassed, weakened or guessed at full speed. Rules: W2."""

import json
import logging
from urllib.parse import quote

import pytest
from django.test import override_settings

from django_faktory.brokers import remote_broker
from django_faktory.core.payloads import WorkerIdentity
from django_faktory.core.protocol.connection import MIN_ITERATIONS, ClientConnection, ServerConnection, hash_password
from django_faktory.errors import BrokerUnavailable, ProtocolError
from django_faktory.models import Job
from tests.server.raw import CERTIFICATE, RawClient, over_both, push

pytestmark = pytest.mark.once

PASSWORD = "correct horse battery staple"


@pytest.fixture
def knock(serve):
    """Connect and read the first line; all clients are closed at the end."""
    clients = []

    def connect(server):
        clients.append(RawClient(server.address))
        return clients[-1], clients[-1].reply()

    yield connect
    for client in clients:
        client.close()


def hello(greeting, password=PASSWORD, **other):
    asked = json.loads(greeting.removeprefix(b"+HI "))
    return "HELLO " + json.dumps({"v": 2, "pwdhash": hash_password(password, asked["s"], asked["i"])} | other)


@over_both
@pytest.mark.parametrize(
    "line",
    [
        'HELLO {"v":2}',
        'HELLO {"v":2,"pwdhash":""}',
        'HELLO {"v":2,"pwdhash":null}',
        f'HELLO {{"v":2,"pwdhash":"{PASSWORD}"}}',
        'HELLO {"v":1}',
        'HELLO {"v":2,"i":1,"s":"","pwdhash":""}',
        push(jid="uninvited"),
        "INFO",
        "FLUSH",
        "",
    ],
)
def test_a_server_with_a_password_rejects_clients_without_it(serve, knock, line):
    server = serve(password=PASSWORD)
    client, _ = knock(server)
    client.send("\r\n".join([line, push(jid="uninvited")]))
    assert client.reply().startswith(b"-ERR ")
    assert client.is_closed()
    assert not Job.objects.exists()


def test_a_password_hash_of_another_connection_is_rejected(serve, knock):
    server = serve(password=PASSWORD)
    _, first = knock(server)
    client, _ = knock(server)
    assert client.ask(hello(first)) == b"-ERR Invalid password"


def test_a_server_with_weak_hash_parameters_cannot_be_created():
    for salt, iterations in (("5a17", 0), ("5a17", MIN_ITERATIONS - 1), ("", 5000)):
        with pytest.raises(ValueError, match="needs a salt"):
            ServerConnection(password=PASSWORD, salt=salt, iterations=iterations, max_command_bytes=4096)


@pytest.mark.parametrize("iterations", ["", ',"i":1', f',"i":{MIN_ITERATIONS - 1}'])
def test_a_client_refuses_to_send_a_hash_with_too_few_iterations(iterations):
    client = ClientConnection(identity=WorkerIdentity(), password=PASSWORD)
    client.receive(f'+HI {{"v":2,"s":"123456789abc"{iterations}}}\r\n'.encode())
    with pytest.raises(ProtocolError, match=f"expected {MIN_ITERATIONS} to"):
        client.hello()


@over_both
def test_too_many_wrong_passwords_block_the_address_with_a_retry_time(serve, knock, caplog):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 2}):
        server = serve(password=PASSWORD)
    with caplog.at_level(logging.WARNING, "django_faktory.server"):
        for _ in range(2):
            client, greeting = knock(server)
            assert client.ask(hello(greeting, "wrong")) == b"-ERR Invalid password"
    client, refusal = knock(server)
    assert refusal.startswith(b"-ERR too many wrong passwords from this address; try again in ")
    assert client.is_closed()
    assert [record.getMessage() for record in caplog.records] == ["wrong password address=127.0.0.1"] * 2


def test_connections_opened_before_the_block_get_no_further_tries(serve, knock):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 1}):
        server = serve(password=PASSWORD)
    waiting, greeting = knock(server)
    guessing, other = knock(server)
    assert guessing.ask(hello(other, "wrong")) == b"-ERR Invalid password"
    assert waiting.ask(hello(greeting)).startswith(b"-ERR too many wrong passwords")
    assert waiting.is_closed()


def test_an_authenticated_client_stays_connected_while_its_address_is_blocked(serve, knock):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 1}):
        server = serve(password=PASSWORD)
    good, greeting = knock(server)
    assert good.ask(hello(greeting)) == b"+OK"
    bad, other = knock(server)
    bad.ask(hello(other, "wrong"))
    assert good.ask(push(jid="still-welcome")) == b"+OK"


@over_both
def test_our_client_reports_a_blocked_address_as_broker_unavailable(serve, knock, transport):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 1}):
        server = serve(password=PASSWORD)
    bad, other = knock(server)
    bad.ask(hello(other, "wrong"))
    scheme, ca = ("tcp+tls", f"?ca={CERTIFICATE}") if transport == "tls" else ("tcp", "")
    url = f"{scheme}://:{quote(PASSWORD)}@localhost:{server.address[1]}{ca}"
    broker = remote_broker(url)
    with pytest.raises(BrokerUnavailable, match="too many wrong passwords"):
        broker.latency(["default"])
    broker.close()


def test_a_server_without_a_password_blocks_no_client(serve, knock):
    with override_settings(FAKTORY={"PASSWORD_TRIES": 1}):
        server = serve()
    for _ in range(3):
        client, greeting = knock(server)
        assert greeting == b'+HI {"v":2}'
        assert client.ask('HELLO {"v":2,"pwdhash":"wrong"}') == b"+OK"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("MUTATE", 'MUTATE {"cmd":"clear","target":"dead"}'),
        ("QUEUE PAUSE", "QUEUE PAUSE default"),
        ("QUEUE RESUME", "QUEUE RESUME default"),
        ("QUEUE REMOVE", "QUEUE REMOVE *"),
    ],
)
def test_only_disabled_commands_are_refused(serve, command, line):
    with override_settings(FAKTORY={"REFUSED_COMMANDS": [command]}):
        client = RawClient.identified(serve().address)
        assert client.ask(line).startswith(f"-ERR {command} is disabled; ".encode())
        assert client.ask(push(jid="kept-all-right")) == b"+OK"
    assert client.ask(line) == b"+OK"
    client.close()
