"""A client of raw bytes: sends what it is told, reads one reply at a time."""

import json
import socket
from pathlib import Path

import pytest

CERTIFICATE = Path(__file__).parent.parent / "brokers" / "localhost.pem"
"""With its key; good for a hundred years, for tests only."""

over_both = pytest.mark.parametrize("transport", ["tcp", "tls"], indirect=True)
"""For tests whose claim must hold over TLS as well."""


class RawClient:
    """One socket to a server; every read has a deadline. Over TLS where `transport` has set `context`."""

    context = None

    def __init__(self, address, *, timeout_s=20):
        self.socket = socket.create_connection(address, timeout=timeout_s)
        if self.context:
            self.socket = self.context.wrap_socket(self.socket, server_hostname="localhost")
        self.stream = self.socket.makefile("rb")

    @classmethod
    def identified(cls, address, *, timeout_s=20, **hello):
        """Connect and say HELLO."""
        client = cls(address, timeout_s=timeout_s)
        try:
            assert client.reply().startswith(b"+HI ")
            assert client.ask(f"HELLO {json.dumps({'v': 2} | hello)}") == b"+OK"
        except BaseException:
            client.close()
            raise
        return client

    def send(self, line, end="\r\n"):
        """Send one line."""
        raw = line if isinstance(line, bytes) else line.encode()
        self.socket.sendall(raw + end.encode())

    def reply(self):
        """One reply: `+…` or `-…` as it came, the text of a bulk, None for null; b"" where the server closed."""
        head = self.stream.readline()
        if not head.startswith(b"$"):
            return head[:-2]
        length = int(head[1:])
        return None if length < 0 else self.stream.read(length + 2)[:-2]

    def ask(self, line):
        """Send a line, read its reply."""
        self.send(line)
        return self.reply()

    def is_closed(self):
        """Whether the server closed; waits for it up to the deadline."""
        return self.stream.read(1) == b""

    def close(self):
        """Close without a word."""
        self.stream.close()
        self.socket.close()


def push(**fields):
    """A PUSH line."""
    return "PUSH " + json.dumps({"jobtype": "noop", "args": []} | fields)


def worker(wid="wid-1", **fields):
    """A consumer's HELLO fields."""
    return {"wid": wid, "hostname": "localhost", "pid": 1, "labels": []} | fields
