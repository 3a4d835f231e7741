"""A Faktory client with one connection, for benchmarks that time each command."""

import json
import socket


class Client:
    """One connection that sends a command, then reads its reply. Without a wid it can push but not fetch."""

    def __init__(self, port, **hello):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = self.socket.makefile("rb")
        self.greeting = self.stream.readline()
        if not self.greeting.startswith(b"+HI"):
            raise RuntimeError(f"expected +HI, got {self.greeting!r}")
        self.ask(f"HELLO {json.dumps({'v': 2} | hello)}")

    @classmethod
    def worker(cls, port, wid):
        """Open a connection that can fetch."""
        return cls(port, wid=wid, hostname="bench", pid=1, labels=[])

    def ask(self, line):
        """Send a command and return its reply: bytes, or None for a null reply.

        Raises RuntimeError with the text of an error reply.
        """
        self.socket.sendall(line.encode() + b"\r\n")
        head = self.stream.readline().rstrip()
        if head.startswith(b"-") or not head:
            raise RuntimeError(head.decode() or "the server closed the connection")
        if not head.startswith(b"$"):
            return head
        return None if head == b"$-1" else self.stream.read(int(head[1:]) + 2)[:-2]

    def close(self):
        self.stream.close()
        self.socket.close()
