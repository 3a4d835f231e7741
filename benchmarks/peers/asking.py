"""Manage the processes of a run: each system's agent, its workers, and a Redis of this run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from benchmarks.peers import marks, readings
from benchmarks.peers.environments import ROOT, CannotInstall

RESULTS = ROOT / "benchmarks" / "results"
STOP_S = 15


class Failed(Exception):
    """A measure could not be completed; the message gives the reason in one line."""


class Place:
    """The environment of one system: its Python, its database, its folder of marks, its log."""

    def __init__(self, system, python, folder, redis):
        self.system, self.python, self.redis = system, str(python), redis
        self.marks = folder / "marks" / system.name
        self.log = RESULTS / f"peers-{system.name}.log"
        self.log.write_bytes(b"")
        base = os.environ.get("BENCH_NAME", "faktory_peers")
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "benchmarks.peers.project.settings",
            "BENCH_SYSTEM": system.name,
            "BENCH_DATABASE": "sqlite" if system.store == "SQLite" else "postgresql",
            "BENCH_NAME": f"{base}_{system.name.replace('-', '_')}",
            "BENCH_SQLITE": str(folder / f"{system.name}.sqlite3"),
            "BENCH_REDIS": redis.url,
            marks.FOLDER: str(self.marks),
        }

    def start(self, arguments, **options):
        with open(self.log, "ab") as log:
            command = [self.python, *arguments]
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": self.environment} | options
            return subprocess.Popen(command, start_new_session=True, **options)


class Agent:
    """Sends commands to the agent process in a system's environment: `agent.left()` and the like."""

    def __init__(self, place):
        self._place = place
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = place.start(["-m", "benchmarks.peers.agent"], **pipes)

    def __getattr__(self, name):
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, name, *arguments):
        try:
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise Failed(f"{name}: the agent has ended; see {self._place.log}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{name}: {answer['error']}; see {self._place.log}")
        return answer["result"]

    def end(self):
        try:
            self._process.stdin.close()
            self._process.wait(STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


class Workers:
    """Runs a system's workers while the block lasts."""

    def __init__(self, place):
        self._place = place
        self._roots = []

    def __enter__(self):
        self._roots = [self._place.start(command) for command in self._place.system.commands()]
        return self

    def pids(self):
        return readings.tree(*(root.pid for root in self._roots))

    def require(self):
        """Raise Failed if one of the worker processes has ended."""
        for root in self._roots:
            if root.poll() is not None:
                raise Failed(f"a worker ended unexpectedly, exit code {root.returncode}; see {self._place.log}")

    def __exit__(self, *error):
        everyone = self.pids()
        for root in self._roots:
            if root.poll() is None:
                root.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for root in self._roots:
            try:
                root.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(root.pid, signal.SIGKILL)
                root.wait()
        self._bury(everyone)

    def _bury(self, pids):
        """Kill processes that outlived their parents.

        Processes of this run are recognized by the folder of marks in their environment.
        """
        ours = f"{marks.FOLDER}={self._place.marks}".encode()
        for pid in pids:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if ours in file.read().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


class Redis:
    """A Redis without persistence on a free port, so that commands of other programs are not counted."""

    url = ""
    pid = None

    def __init__(self):
        program = shutil.which("redis-server")
        if not program:
            raise CannotInstall("expected redis-server on PATH for the peers that need it")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [program, *options], cwd=self._folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.pid, self.url = self._process.pid, f"redis://127.0.0.1:{port}/0"
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CannotInstall("redis-server did not start within 10 seconds") from error
                time.sleep(0.02)

    def end(self):
        self._process.terminate()
        self._process.wait(STOP_S)
        self._folder.cleanup()
