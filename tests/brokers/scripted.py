"""A server on loopback that expects and sends exact bytes: any other, missing or additional input fails the test."""

import socket
import struct
import threading
from contextlib import contextmanager

from django_faktory.brokers.remote import RemoteBroker

TIMEOUT_S = 10
GREETING = b'+HI {"v":2}\r\n'
HELLO = b'HELLO {"v":2}\r\n'
CLOSE = object()
"""Used in place of a reply: close the connection."""

RESET = object()
"""Used in place of a reply: reset the connection, as if the machine had disappeared."""


def session(*exchanges, greeting=GREETING, hello=HELLO, welcome=b"+OK\r\n"):
    """Return one connection as (expected, reply) pairs, handshake first. A reply of None sends nothing."""
    return [(b"", greeting), (hello, welcome), *exchanges]


class Script:
    """A scripted server: one session for each connection, in the order in which connections are accepted."""

    def __init__(self, sessions, tls=None):
        self.heard = []
        self.troubles = []
        self._sessions = list(sessions)
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self.port = self._listener.getsockname()[1]
        self._threads = []
        self._is_over = threading.Event()
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def url(self, user="", host="127.0.0.1"):
        return f"tcp{'+tls' if self._tls else ''}://{user}{host}:{self.port}"

    def end(self):
        """Wait until every session has been played to its end, and check that no step failed."""
        self._accepting.join(TIMEOUT_S)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        self._listener.close()
        assert not self.troubles, self.troubles
        assert not self._sessions, f"connections that never came: {len(self._sessions)}"

    def _accept(self):
        while self._sessions:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self.troubles.append(f"accept: {error!r}")
                return
            thread = threading.Thread(target=self._play, args=(connection, self._sessions.pop(0)))
            self._threads.append(thread)
            thread.start()
        self._listener.close()  # one connection too many is refused

    def _play(self, connection, exchanges):
        connection.settimeout(TIMEOUT_S)
        try:
            with self._tls.wrap_socket(connection, server_side=True) if self._tls else connection as peer:
                for expected, reply in exchanges:
                    if not self._exchange(peer, expected, reply):
                        return
                if rest := peer.recv(4096):
                    self.troubles.append(f"more than expected: {rest!r}")
        except OSError as error:
            self.troubles.append(f"{exchanges}: {error!r}")

    def _exchange(self, peer, expected, reply):
        heard = b""
        while len(heard) < len(expected) and (data := peer.recv(min(65536, len(expected) - len(heard)))):
            heard += data
        self.heard.append(heard)
        if heard != expected:
            self.troubles.append(f"expected {expected[:300]!r}, heard {heard[:300]!r}")
            return False
        if reply is RESET:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if reply is RESET or reply is CLOSE:
            return False
        if reply is not None:
            peer.sendall(reply)
        return True


@contextmanager
def scripted(*sessions, tls=None):
    server = Script(sessions, tls)
    yield server
    server.end()


class Talk:
    """A scripted server and a broker connected to it; leaving closes the broker, then checks the script."""

    def __init__(self, *sessions, **options):
        self._script = scripted(*sessions)
        self._options = options

    def __enter__(self):
        self.server = self._script.__enter__()
        self.broker = RemoteBroker(self.server.url(), **self._options)
        return self.broker

    def __exit__(self, *raised):
        self.broker.close()
        return self._script.__exit__(*raised)
