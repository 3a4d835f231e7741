"""A fake pooler in front of PostgreSQL: it can drop notifications, and refuse or cut connections."""

import socket
import struct
import threading
from contextlib import suppress


class Pooler:
    """Forward connections to `upstream`. With `swallows`, drop NotificationResponse messages."""

    def __init__(self, upstream, *, swallows=False):
        self.upstream = upstream
        self.swallows = swallows
        self.is_open = True
        self.accepted = 0
        self._pairs = []
        self._threads = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._start(self._accept)

    def cut(self):
        """Shut down every open connection."""
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.is_open = False
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(20)
        for pair in self._pairs:
            for end in pair:
                end.close()
        self._listening.close()

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if not self.is_open:
                    client.close()
                    continue
                server = socket.create_connection(self.upstream)
                self._pairs.append((client, server))
                self.accepted += 1
                self._start(self._forward, client, server)
                self._start(self._return, server, client)

    def _forward(self, client, server):
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _return(self, server, client):
        """Forward message by message: a byte for the type, the length, and the content."""
        with suppress(OSError):
            answers = server.makefile("rb")
            client.sendall(answers.read(1))  # the answer to SSLRequest: "N"
            while head := answers.read(5):
                body = answers.read(struct.unpack("!i", head[1:])[0] - 4)
                if not (self.swallows and head[:1] == b"A"):
                    client.sendall(head + body)
            client.shutdown(socket.SHUT_RDWR)
