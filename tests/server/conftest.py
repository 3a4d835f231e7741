"""Fixtures that run a real server on a free loopback port, with the test database as its store."""

import threading

import pytest

from django_faktory.brokers import tls
from django_faktory.brokers.orm import OrmBroker
from django_faktory.server.server import Server
from django_faktory.server.tuning import Tuning
from tests.server.raw import CERTIFICATE, RawClient


@pytest.fixture(autouse=True)
def transport(request, monkeypatch):
    """Return the transport of the test's servers and clients: "tcp", or "tls" where `over_both` selects it."""
    name = getattr(request, "param", "tcp")
    if name == "tls":
        monkeypatch.setattr(RawClient, "context", tls.client_context(str(CERTIFICATE)))
    return name


@pytest.fixture
def serve(transactional_db, request):
    """Return a function that starts a server; all servers are stopped and joined at the end of the test.

    Their times and sizes are the keyword arguments of the test's `tuning` marks.
    """
    running = []
    marks = reversed(list(request.node.iter_markers("tuning")))  # the innermost mark last: it decides
    tuning = Tuning(**{name: value for mark in marks for name, value in mark.kwargs.items()})

    def start(broker=None, **options):
        if RawClient.context:
            options.setdefault("tls", tls.server_context(str(CERTIFICATE)))
        server = Server(broker or OrmBroker("default"), port=0, tuning=tuning, **options)
        thread = threading.Thread(target=server.run, name="server")
        thread.start()
        assert server.started.wait(60)
        running.append((server, thread))
        return server

    yield start
    for server, _ in running:
        server.stop()
    for _, thread in running:
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def server(serve):
    """Return one server that runs with the default options."""
    return serve()


@pytest.fixture
def connect(server):
    """Return a function that opens identified clients; all are closed at the end of the test."""
    clients = []

    def open_client(**hello):
        clients.append(RawClient.identified(server.address, **hello))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()
