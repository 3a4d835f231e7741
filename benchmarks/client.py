"""A Faktory client of one connection, for benchmarks that time each command."""

import json
import socket


class Client:
    """One connection: a command, then its reply."""

    def __init__(self, port, **hello):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = self.socket.makefile("rb")
        assert self.stream.readline().startswith(b"+HI")
        assert self.ask(f"HELLO {json.dumps({'v': 2} | hello)}") == b"+OK"

    def ask(self, line):
        self.socket.sendall(line.encode() + b"\r\n")
        head = self.stream.readline().rstrip()
        if head.startswith(b"-"):
            raise RuntimeError(head.decode())
        if not head.startswith(b"$") or head == b"$-1":
            return head
        return self.stream.read(int(head[1:]) + 2)[:-2]
