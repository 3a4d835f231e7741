"""Start Redis servers that tests can flush, fill, disconnect and restart; each is stopped by its process id."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess

from redis import Redis, RedisError

from tests.programs import WITH_US
from tests.waiting import wait_until

PROGRAM = shutil.which("redis-server")
PORTS = range(12_000, 22_000)
"""Below the range for outgoing connections, so that a restarted server gets its port back. A cluster node also listens
on its port plus 10,000.
"""

START_S = 30


class RedisServer:
    def __init__(self, folder, *options):
        self.folder, self.options = folder, options
        self._clients = []
        self.process = None
        for _ in range(10):
            self.port = free_port()
            if self._came_up():
                return
        raise AssertionError(f"no Redis came up: {self.log_text}")

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def log_text(self):
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    @property
    def _log(self):
        return self.folder / f"redis-{os.getpid()}-{self.port}.log"

    def start(self):
        """Start the server again on its old port."""
        assert self._came_up(), self.log_text

    def _came_up(self):
        """Start the process; return False if another process has taken the port meanwhile."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen([*WITH_US, PROGRAM, *self.command()], stdout=log, stderr=log)
        try:
            return wait_until(self._state, START_S, what="a Redis that answers") == "up"
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _state(self):
        if self.process.poll() is not None:
            return "gone"
        with contextlib.suppress(RedisError), Redis(host="127.0.0.1", port=self.port, socket_timeout=5) as client:
            # a Redis of another test may answer on this port
            return "up" if client.info("server")["process_id"] == self.process.pid else None

    def command(self):
        return ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "", *self.options]

    def client(self, **options):
        client = Redis(host="127.0.0.1", port=self.port, **options)
        self._clients.append(client)
        return client

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)

    def clean_up(self):
        self.stop(signal.SIGKILL)
        for client in self._clients:
            client.close()


class Sentinel(RedisServer):
    """A Sentinel that monitors `master` as "jobs", and starts a failover after 3 s without an answer."""

    def __init__(self, folder, master):
        self._master = master
        super().__init__(folder)

    def command(self):
        config = self.folder / f"sentinel-{self.port}.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"sentinel monitor jobs 127.0.0.1 {self._master.port} 1",
            "sentinel down-after-milliseconds jobs 3000",
            "sentinel failover-timeout jobs 10000",
        ]
        config.write_text("\n".join(lines) + "\n")
        return [str(config), "--sentinel"]


def free_port():
    while True:
        port = secrets.choice(PORTS)  # not `random`: other test processes have the same seed
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for one in (port, port + 10_000):
                held.enter_context(socket.socket()).bind(("127.0.0.1", one))
            return port


def become_cluster(*servers):
    """Join the servers to a cluster; return its URL once every node reports that the cluster is up."""
    first, *_ = nodes = [server.client() for server in servers]
    for server in servers[1:]:
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
    ends = [16_384 * place // len(nodes) for place in range(len(nodes) + 1)]
    for node, begin, end in zip(nodes, ends, ends[1:], strict=False):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)

    def is_one():
        infos = [node.cluster("INFO") for node in nodes]
        return all(one["cluster_state"] == "ok" and one["cluster_known_nodes"] == str(len(nodes)) for one in infos)

    wait_until(is_one, START_S, every_s=0.05, what="a cluster")
    return f"redis+cluster://127.0.0.1:{servers[0].port}"
