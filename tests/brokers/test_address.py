"""Addresses of Faktory servers and how to log in: URLs, passwords, TLS."""

import socket
import ssl
from pathlib import Path
from urllib.parse import quote

import pytest

from django_faktory.brokers import client as connections
from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.payloads import FetchRequest, WorkerIdentity, new_job
from django_faktory.core.protocol.connection import ClientConnection
from django_faktory.core.protocol.resp import NULL, OK, bulk
from django_faktory.errors import AuthenticationFailed, BrokerUnavailable, InvalidPayload
from tests.brokers.scripted import CLOSE, GREETING, Script, scripted, session
from tests.waiting import wait_until

pytestmark = pytest.mark.core

CERTIFICATE = Path(__file__).parent / "localhost.pem"  # with its key; valid for a hundred years, for tests only


def job():
    return new_job(jid="job-0001", jobtype="t", args=[])


PUSH = f"PUSH {job().text}\r\n".encode()

# --- URLs ---


@pytest.mark.parametrize(
    ("url", "where", "password", "is_tls"),
    [
        ("tcp://localhost", "localhost:7419", "", False),
        ("tcp://localhost:7420", "localhost:7420", "", False),
        ("tcp://:pa%40ss@host:7419", "host:7419", "pa@ss", False),
        ("tcp://user:pw@host/", "host:7419", "pw", False),
        ("tcp+tls://host", "host:7419", "", True),
        ("tcp://[::1]:7420", "::1:7420", "", False),
    ],
)
def test_valid_urls_are_parsed_into_their_parts(url, where, password, is_tls):
    address = connections.parse_url(url)
    assert (str(address), address.password, address.is_tls) == (where, password, is_tls)


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "scheme"),
        ("localhost:7419", "scheme 'localhost'"),
        ("http://:secret@localhost", "scheme 'http'"),
        ("tcp://", "host name"),
        ("tcp://:secret@:7419", "host name"),
        ("tcp://[::1:7419", "host name"),
        ("tcp://:secret@localhost:x", "port"),
        ("tcp://localhost:0", "port"),
        ("tcp://localhost:70000", "port"),
        ("tcp://:secret@localhost?ca=/a/file", "tcp"),
    ],
)
def test_an_invalid_url_error_names_the_part_but_not_the_password(url, part):
    with pytest.raises(InvalidPayload, match=f"Faktory URL: expected .*{part}") as caught:
        RemoteBroker(url)
    assert "secret" not in str(caught.value)


# --- passwords ---

ASKED = b'+HI {"v":2,"s":"123456789abc","i":1735}\r\n'


@pytest.mark.parametrize("user", [":s%C3%A9cret@", "anybody:s%C3%A9cret@"])
def test_hello_contains_the_hash_of_the_url_password(user):
    pwdhash = ClientConnection(identity=WorkerIdentity(), password="sécret")
    pwdhash.receive(ASKED)
    with scripted(session((PUSH, OK), greeting=ASKED, hello=pwdhash.hello())) as server:
        broker = RemoteBroker(server.url(user))
        assert broker.push([job()]) == [None]
        broker.close()


def test_a_wrong_password_raises_authentication_failed_without_a_retry():
    """W2: the error names the password, and there is no second attempt."""
    near = ClientConnection(identity=WorkerIdentity(), password="wrong")
    near.receive(ASKED)
    sessions = session(greeting=ASKED, hello=near.hello(), welcome=b"-ERR Invalid password\r\n")
    with scripted(sessions) as server, pytest.raises(AuthenticationFailed, match="Invalid password"):
        RemoteBroker(server.url(":wrong@")).push([job()])


def test_a_temporarily_blocked_address_raises_broker_unavailable():
    near = ClientConnection(identity=WorkerIdentity(), password="right")
    near.receive(ASKED)
    refusal = b"-ERR too many wrong passwords from this address; try again in 3 seconds\r\n"
    sessions = session(greeting=ASKED, hello=near.hello(), welcome=refusal)
    with scripted(sessions) as server, pytest.raises(BrokerUnavailable, match="try again in 3 seconds"):
        RemoteBroker(server.url(":right@")).push([job()])


def test_a_password_refused_after_a_successful_login_raises_broker_unavailable():
    """A worker keeps its reports and sends them again; a password that was wrong from the start is reported as such."""
    refusing = session(welcome=b"-ERR Invalid password\r\n")
    with scripted(session((PUSH, OK), (PUSH, CLOSE)), refusing, session((PUSH, OK))) as server:
        broker = RemoteBroker(server.url())
        broker.push([job()])
        with pytest.raises(BrokerUnavailable, match="Invalid password"):
            broker.push([job()])
        assert broker.push([job()]) == [None]
        broker.close()


def test_reprs_and_errors_of_the_broker_omit_the_password():
    broker = RemoteBroker("tcp://:secret@localhost:1")
    with pytest.raises(BrokerUnavailable) as caught:
        broker.push([job()])
    assert "secret" not in f"{broker!r} {broker.address!r} {broker.address} {caught.value}"


# --- TLS ---


@pytest.fixture
def tls():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_url_with_the_tls_scheme_uses_tls(tls, host, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    large = bulk(f'{{"jid":"job-0001","args":["{"x" * 200_000}"]}}')
    with scripted(session((PUSH, OK), (b"FETCH default\r\n", large), (b"END\r\n", OK)), tls=tls) as server:
        broker = RemoteBroker(server.url(host=host))
        assert broker.push([job()]) == [None]
        [[got]] = broker.fetch([FetchRequest(queues=("default",))])
        assert len(got.text) > 200_000
        broker.bye([""])


def test_a_broken_tls_connection_is_replaced_by_a_new_one(tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    fetch = (b"FETCH default\r\n", NULL)
    with scripted(session(fetch, (b"", CLOSE)), session(fetch), tls=tls) as server:
        broker = RemoteBroker(server.url())
        assert broker.fetch([FetchRequest(queues=("default",))]) == [[]]
        wait_until(lambda: not broker._local.connection.is_usable)
        assert broker.fetch([FetchRequest(queues=("default",))]) == [[]]
        broker.close()


def test_the_url_may_name_a_ca_file(tls):
    with scripted(session((PUSH, OK)), tls=tls) as server:
        broker = RemoteBroker(f"{server.url()}?ca={quote(str(CERTIFICATE), safe='')}")
        assert broker.push([job()]) == [None]
        broker.close()


def test_a_missing_ca_file_is_reported_by_its_path():
    """The error is temporary: the file may be created at any moment."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = RemoteBroker(f"tcp+tls://127.0.0.1:{silent.getsockname()[1]}?ca=/no/such/file")
        with pytest.raises(BrokerUnavailable, match="/no/such/file"):
            broker.push([job()])


def test_a_certificate_of_an_unknown_ca_is_refused(tls):
    server = Script([[]], tls)
    with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
        RemoteBroker(server.url()).push([job()])
    with pytest.raises(AssertionError, match=r"(?i)unknown.ca|alert"):
        server.end()


def test_a_tls_connection_to_a_plain_server_raises_broker_unavailable():
    server = Script([[(b"", GREETING)]])
    with pytest.raises(BrokerUnavailable, match="SSL"):
        RemoteBroker(server.url().replace("tcp:", "tcp+tls:")).push([job()])
    with pytest.raises(AssertionError, match="more than expected"):  # the first bytes of the TLS handshake
        server.end()
