"""TLS on the server's port: versions, failed and endless handshakes, close_notify. Rules: W3, W8, W14."""

import socket
import ssl

import pytest
from django.test import override_settings

from django_faktory.brokers import tls
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.payloads import FetchRequest, WorkerIdentity
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Job
from tests.factories import payload
from tests.server.raw import CERTIFICATE, RawClient, push
from tests.waiting import wait_until

pytestmark = pytest.mark.once

GREETING = b'+HI {"v":2}\r\n'


@pytest.fixture
def context():
    """Return the TLS context of a client that verifies the server."""
    return tls.client_context(str(CERTIFICATE))


@pytest.fixture
def secure(serve):
    """A server with TLS; the clients of this module use TLS only explicitly."""
    return serve(tls=tls.server_context(str(CERTIFICATE)))


@pytest.fixture
def dial():
    """Return a function that opens plain sockets; all are closed at the end of the test."""
    opened = []

    def open_socket(server):
        opened.append(socket.create_connection(server.address, timeout=60))
        return opened[-1]

    yield open_socket
    for one in opened:
        one.close()


class InMemory:
    """A TLS client in memory; the test transfers its records to and from a plain socket."""

    def __init__(self, context, plain):
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def until(self, act):
        """Transfer records in both directions until `act` succeeds.

        Raises ConnectionError if the server closes without close_notify.
        """
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                self.send()
            data = self.plain.recv(65536)
            if not data:
                raise ConnectionError("cut")
            self.incoming.write(data)

    def send(self):
        self.plain.sendall(self.outgoing.read())

    def write(self, data):
        self.tls.write(data)
        self.send()

    def read(self):
        return self.until(lambda: self.tls.read(65536))


@pytest.fixture
def client(secure, dial, context):
    """Return a client after the TLS handshake and HELLO."""
    one = InMemory(context, dial(secure))
    one.until(one.tls.do_handshake)
    one.send()
    assert one.read() == GREETING
    one.write(b'HELLO {"v":2,"wid":"w1"}\r\n')
    assert one.read() == b"+OK\r\n"
    return one


def has_no_connections(server):
    return not server.connection_count and not server._acceptor.handshakes


def still_serves(server, context):
    with context.wrap_socket(socket.create_connection(server.address), server_hostname="localhost") as good:
        return good.recv(100) == GREETING


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_accepted(secure, dial, context, version):
    context.minimum_version = context.maximum_version = version
    with context.wrap_socket(dial(secure), server_hostname="localhost") as client:
        assert client.recv(100) == GREETING


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_older_tls_versions_are_refused_without_affecting_the_server(secure, dial, context):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(CERTIFICATE)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        old.wrap_socket(dial(secure), server_hostname="localhost")
    wait_until(lambda: has_no_connections(secure))
    assert still_serves(secure, context)


@pytest.mark.parametrize("words", [b'HELLO {"v":2}\r\n', b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100])
def test_plain_text_on_the_tls_port_is_rejected_without_affecting_the_server(secure, dial, context, words):
    plain = dial(secure)
    plain.sendall(words)
    assert b"HI" not in plain.recv(1000)
    wait_until(lambda: has_no_connections(secure))
    assert still_serves(secure, context)


def test_tls_on_the_plain_port_fails_without_affecting_the_server(server, dial, context):
    with pytest.raises(ssl.SSLError, match=r"(?i)wrong.version|record"):
        context.wrap_socket(dial(server), server_hostname="localhost")
    wait_until(lambda: has_no_connections(server))
    good = RawClient.identified(server.address)
    assert good.ask("INFO")
    good.close()


@pytest.mark.parametrize("sent", [0, 1, 100])
def test_an_unfinished_tls_handshake_is_closed_after_the_deadline(serve, dial, context, sent):
    """W3: with no bytes of the ClientHello, and with a part of it."""
    with override_settings(FAKTORY={"HELLO_TIMEOUT": 0.1}):
        server = serve(tls=tls.server_context(str(CERTIFICATE)))
    silent = dial(server)
    begun = InMemory(context, silent)
    with pytest.raises(ssl.SSLWantReadError):
        begun.tls.do_handshake()
    silent.sendall(begun.outgoing.read()[:sent])
    assert silent.recv(100) == b""
    wait_until(lambda: has_no_connections(server))


def test_a_client_without_hello_after_the_handshake_is_closed_after_the_deadline(serve, dial, context):
    """W3: HELLO_TIMEOUT also applies after the handshake."""
    with override_settings(FAKTORY={"HELLO_TIMEOUT": 0.2}):
        server = serve(tls=tls.server_context(str(CERTIFICATE)))
    with context.wrap_socket(dial(server), server_hostname="localhost") as client:
        stream = client.makefile("rb")
        assert stream.readline() == GREETING
        assert stream.readline() == b"-ERR expected HELLO within 0.2 seconds\r\n"
        assert stream.read() == b""
        stream.close()


@pytest.mark.tuning(spare_handshakes=3)
def test_unfinished_handshakes_are_limited_and_use_no_connection_slot(serve, dial, context):
    """W8: unfinished handshakes have a limit of their own, beyond MAX_CONNECTIONS."""
    with override_settings(FAKTORY={"MAX_CONNECTIONS": 2}):
        server = serve(tls=tls.server_context(str(CERTIFICATE)))
    silent = [dial(server) for _ in range(4)]  # more than MAX_CONNECTIONS
    wait_until(lambda: server._acceptor.handshakes == 4)
    assert still_serves(server, context)
    wait_until(lambda: not server.connection_count)
    silent.append(dial(server))
    wait_until(lambda: server._acceptor.handshakes == 5)  # MAX_CONNECTIONS + spare_handshakes
    assert dial(server).recv(100) == b""
    assert server._acceptor.handshakes == 5


def test_a_stop_does_not_wait_for_unfinished_handshakes(secure, dial):
    silent = dial(secure)
    wait_until(lambda: secure._acceptor.handshakes)
    secure.stop()
    wait_until(secure.loop.is_closed, 2)
    assert silent.recv(100) == b""


def test_close_notify_ends_the_connection_after_the_accepted_command(client, secure):
    """Asyncio's TLS cannot stay half open: the command is executed, and nobody gets its reply."""
    client.tls.write(f"{push(jid='abcdefgh')}\r\n".encode())
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.unwrap()  # queues close_notify; the server's is not here yet
    client.send()
    with pytest.raises(ssl.SSLZeroReturnError):  # the server's own close_notify
        client.read()
    wait_until(lambda: has_no_connections(secure))
    wait_until(Job.objects.filter(jid="abcdefgh").exists)


def test_close_notify_ends_a_waiting_fetch_without_a_job(client, secure):
    """W14: close_notify ends a waiting FETCH."""
    client.write(b"FETCH default\r\n")
    wait_until(lambda: len(secure.fetch_queue._waiting) == 1)
    with pytest.raises(ssl.SSLWantReadError):
        client.tls.unwrap()  # queues close_notify; the server's is not here yet
    client.send()
    wait_until(lambda: has_no_connections(secure) and not secure.fetch_queue._waiting)


@pytest.mark.tuning(slow_reader_s=0.2)
def test_the_server_sends_close_notify_and_closes_although_the_client_sends_none(client):
    client.write(b"END\r\n")
    assert client.read() == b"+OK\r\n"
    assert client.read() == b""
    assert client.plain.recv(100) == b""


def test_the_error_of_a_refused_hello_arrives_despite_unread_bytes(secure, dial, context):
    """W2: bytes that the server did not read must not discard the error line."""
    rude = InMemory(context, dial(secure))
    rude.until(rude.tls.do_handshake)
    rude.write(b"NOPE\r\n" + b"x" * 50_000)
    received = b""
    while data := rude.read():
        received += data
    assert received.startswith(GREETING + b"-ERR expected HELLO")


def test_remote_broker_pushes_and_fetches_over_tls(secure):
    _, port = secure.address
    broker = RemoteBroker(f"tcp+tls://localhost:{port}?ca={CERTIFICATE}", identity=WorkerIdentity(wid="w1"))
    assert broker.push([payload("secured")]) == [None]
    [[job]] = broker.fetch([FetchRequest(queues=("default",), wid="w1")])
    assert job.jid == "job-secured"
    broker.bye(["w1"])
    wait_until(lambda: has_no_connections(secure))


def test_remote_broker_rejects_an_unknown_ca_and_a_wrong_host_name(secure):
    _, port = secure.address
    for url in (f"tcp+tls://localhost:{port}", f"tcp+tls://127.0.0.2:{port}?ca={CERTIFICATE}"):
        broker = RemoteBroker(url)
        with pytest.raises(BrokerUnavailable):
            broker.push([payload()])
    assert not Job.objects.exists()
