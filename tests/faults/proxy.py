"""A TCP proxy that can disturb its connections. It parses no protocol.

It runs in threads of the test's process, two for each connection. A new mode applies to open connections at once.
"""

import contextlib
import socket
import struct
import threading

CHUNK = 65_536
SLOW_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close that sends RST


class Proxy:
    """Forward connections to a target. `harm` sets one of MODES; `address` is where clients connect instead."""

    MODES = ("reset", "silence", "delay", "dribble")

    def __init__(self, target):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs = set()
        self._may_pass = threading.Event()
        self._mode = ""
        self._is_closed = False
        self.harm("")
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self):
        return "{}:{}".format(*self._listener.getsockname())

    @property
    def port(self):
        return self._listener.getsockname()[1]

    def harm(self, mode):
        """Set the mode, one of MODES, `mute`, or "" for no disturbance.

        `reset` cuts all connections and accepts none, `silence` passes nothing while connections stay open, `delay`
        adds 2 s, `dribble` passes one byte at a time, and `mute` holds back data from servers.
        """
        self._mode = mode
        (self._may_pass.clear if mode == "silence" else self._may_pass.set)()
        if mode == "reset":
            self.cut()

    def cut(self):
        """Close all open connections."""
        for pair in list(self._pairs):
            self._end(pair)

    def lead_to(self, target):
        """Connect new clients to another target; open connections stay."""
        self._target = target

    def close(self):
        self._is_closed = True
        self._may_pass.set()
        self._listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[client], daemon=True).start()

    def _connect(self, client):
        self._may_pass.wait()
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        pair = (client, server)
        self._pairs.add(pair)
        if self._mode == "reset" or self._is_closed:
            self._end(pair)
            return
        with contextlib.suppress(OSError):  # cut already: its pumps will notice
            for one in pair:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for one, other in (pair, pair[::-1]):
            threading.Thread(target=self._pump, args=[one, other, pair], daemon=True).start()

    def _pump(self, source, target, pair):
        wait = threading.Event().wait
        try:
            while data := source.recv(CHUNK):
                self._may_pass.wait()
                while self._mode == "mute" and source is pair[1] and not self._is_closed:
                    wait(0.01)
                if self._mode == "delay":
                    wait(SLOW_S)
                step = 1 if self._mode == "dribble" else len(data)
                for start in range(0, len(data), step):
                    target.sendall(data[start : start + step])
        except OSError:
            pass
        self._end(pair)

    def _end(self, pair):
        self._pairs.discard(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                if self._mode == "reset":
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                one.shutdown(socket.SHUT_RDWR)
            one.close()
