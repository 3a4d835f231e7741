"""A test client that sends raw bytes and reads one reply at a time."""

import json
import socket
from pathlib import Path

import pytest

CERTIFICATE = Path(__file__).parent.parent / "brokers" / "localhost.pem"
"""Certificate with its key, valid for a hundred years, for tests only."""

over_both = pytest.mark.parametrize("transport", ["tcp", "tls"], indirect=True)
"""Run a test twice: over plain TCP and over TLS."""


class RawClient:
    """One socket to a server. Every read has a deadline. Uses TLS if the `transport` fixture has set `context`."""

    context = None

    def __init__(self, address, *, timeout_s=60):
        self.socket = socket.create_connection(address, timeout=timeout_s)
        if self.context:
            self.socket = self.context.wrap_socket(self.socket, server_hostname="localhost")
        self.stream = self.socket.makefile("rb")

    @classmethod
    def identified(cls, address, *, timeout_s=60, **hello):
        """Connect and send HELLO; raise AssertionError if the server refuses it."""
        client = cls(address, timeout_s=timeout_s)
        try:
            assert client.reply().startswith(b"+HI ")
            assert client.ask(f"HELLO {json.dumps({'v': 2} | hello)}") == b"+OK"
        except BaseException:
            client.close()
            raise
        return client

    def send(self, line, end="\r\n"):
        """Send `line`, followed by `end`."""
        raw = line if isinstance(line, bytes) else line.encode()
        self.socket.sendall(raw + end.encode())

    def reply(self):
        """Read one reply: a `+…` or `-…` line unchanged, the text of a bulk string, or None for a null.

        Returns b"" if the server closed the connection.
        """
        head = self.stream.readline()
        if not head.startswith(b"$"):
            return head[:-2]
        length = int(head[1:])
        return None if length < 0 else self.stream.read(length + 2)[:-2]

    def ask(self, line):
        """Send a line and return its reply."""
        self.send(line)
        return self.reply()

    def is_closed(self):
        """Return True if the server closed the connection; waits up to the read deadline."""
        return self.stream.read(1) == b""

    def close(self):
        """Close the socket without sending END."""
        self.stream.close()
        self.socket.close()


def push(**fields):
    """Return a PUSH line for a valid job, with `fields` added."""
    return "PUSH " + json.dumps({"jobtype": "noop", "args": []} | fields)


def worker(wid="wid-1", **fields):
    """Return the HELLO fields of a consumer."""
    return {"wid": wid, "hostname": "localhost", "pid": 1, "labels": []} | fields
