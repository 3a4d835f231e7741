"""Start nodes, workers and clients on one store, cause faults, and judge the run at its end."""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress

import psutil

from tests.faults.history import History
from tests.faults.verdict import FINAL, judge
from tests.programs import Program
from tests.waiting import wait_until

FAST = {"POLL_INTERVAL": 0.2, "BEAT_INTERVAL": 0.5, "WORKER_TIMEOUT": 4}
SOON_S = 120
"""Timeout in seconds of a wait that normally ends much earlier; the machine may be busy."""


class Arena:
    """The programs of one run. Call `start_*` at any time, and `verdict` at the end."""

    def __init__(self, folder, store, **settings):
        self.folder, self.store = folder, store
        self._settings = FAST | settings
        self._nodes = {}
        self._programs = []
        self._clients = []
        self._makers = []
        self._ended = []

    def start_node(self, *, at=None, environment=None):
        """Start a server and return its number. `at` maps its address to the one that clients use instead."""
        program = self._runfaktory("127.0.0.1:0", "--server-only", environment=environment)
        [line, *_] = program.wait_for_log("server listens", timeout_s=SOON_S)
        address = re.search(r"address=(\S+)", line)[1]
        number = len(self._programs)
        self._nodes[number] = (at(address) if at else address), program
        self._write_nodes()
        return number

    def start_workers(self, processes=1, concurrency=4, environment=None):
        """Start a pool of workers for Django tasks; return its program once the workers are ready."""
        program = self.begin_workers(processes, concurrency, environment)
        program.wait_for_log("worker started", times=processes, timeout_s=SOON_S)
        return program

    def begin_workers(self, processes=1, concurrency=4, environment=None):
        """Start a pool of workers, and do not wait for them."""
        return self._runfaktory(
            *("--worker-only", "--processes", str(processes), "--concurrency", str(concurrency)),
            environment={"FAKTORY_FAULTS_FOLDER": str(self.folder)} | (environment or {}),
        )

    def start_makers(self, count, queue="default", jobtype="noop"):
        """Start `count` clients that push jobs until the verdict."""
        for _ in range(count):
            self._makers.append(self._client(f"m{len(self._makers)}", "make", queue, jobtype))

    def start_takers(self, count, queue="default"):
        return [self._client(f"t{len(self._clients)}", "take", queue) for _ in range(count)]

    def _client(self, name, *arguments):
        program = Program("-m", "tests.faults.client", str(self.folder), name, *arguments)
        program.name = name
        self._clients.append(program)
        return program

    def _runfaktory(self, *arguments, environment=None):
        program = Program(
            *("-m", "django", "runfaktory", *arguments, "--no-reload"),
            **{
                "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
                "FAKTORY_TEST_SETTINGS": json.dumps(self._settings),
                "FAKTORY_TEST_APPS": "tests.faults",
                **self.store.environment,
                **(environment or {}),
            },
        )
        self._programs.append(program)
        return program

    def _write_nodes(self):
        """Write the nodes' addresses to the file FOLDER/nodes, which clients read."""
        new = self.folder / "new"
        new.write_text(" ".join(address for address, _ in self._nodes.values()))
        # Replaced in one step, so that a client never reads half a file.
        new.replace(self.folder / "nodes")

    def nodes(self):
        return list(self._nodes)

    def node(self, number):
        return self._nodes[number][1]

    def address(self, number):
        """Return the host and port at which clients connect to the node."""
        host, port = self._nodes[number][0].rsplit(":", 1)
        return host, int(port)

    def kill_node(self, number):
        """Kill all processes of the node at once, without updating FOLDER/nodes."""
        _, program = self._nodes.pop(number)
        self._ended.append(program)
        kill(program)

    def stop_node(self, number, timeout_s=SOON_S):
        """Stop a node with SIGTERM; return its exit code and the seconds it took."""
        _, program = self._nodes.pop(number)
        self._write_nodes()
        return self.stop(program, timeout_s)

    def stop(self, program, timeout_s=SOON_S):
        """Stop a program with SIGTERM; return its exit code and the seconds it took."""
        self._ended.append(program)
        begun = time.monotonic()
        program.signal(signal.SIGTERM)
        return program.code(timeout_s), time.monotonic() - begun

    def so_far(self, word):
        """Return the number of notes of this word."""
        return sum(path.read_bytes().count(f" {word} ".encode()) for path in self.folder.glob("*.history"))

    def await_progress(self, word="ok", more=1, timeout_s=SOON_S):
        """Wait until `more` further notes of this word exist; return the seconds it took."""
        before, begun = self.so_far(word), time.monotonic()
        wait_until(lambda: self.so_far(word) >= before + more, timeout_s, every_s=0.05, what=f"{more} {word!r}")
        return time.monotonic() - begun

    def is_making(self):
        return any(maker.is_alive() for maker in self._makers)

    def verdict(self, timeout_s=600):
        """Stop the makers, wait until all accepted jobs are done, and judge."""
        (self.folder / "make-ends").touch()
        wait_until(lambda: not self.is_making(), SOON_S, every_s=0.1, what="the end of all makers")
        try:
            wait_until(self._is_done, timeout_s, every_s=0.5, what="all is done")
        except AssertionError:
            self._print_unfinished()
            raise
        (self.folder / "take-ends").touch()
        for client in self._clients:
            with suppress(ChildProcessError):
                client.code(SOON_S)
        found = judge(History(self.folder), self.store.rows())
        print(f"{type(self.store).__name__}: {found}")  # noqa: T201  (pytest -s shows it)
        return found

    def _is_done(self):
        return set(self.store.rows().values()) <= FINAL

    def _print_unfinished(self):
        left = {jid for jid, state in self.store.rows().items() if state not in FINAL}
        for path in self.folder.glob("*.history"):
            for line in path.read_text().splitlines():
                if left & set(line.split()):
                    print(path.stem, line)  # noqa: T201  (the test has failed)

    def history(self):
        return History(self.folder)

    def text(self):
        return "\n".join(f"--- {program.pid}\n{program.text[-3000:]}" for program in [*self._programs, *self._clients])

    def all_alive(self):
        """Return True if no node and no pool has ended, except those ended by this arena."""
        ended = [program for program in self._programs if not program.is_alive()]
        return [program for program in ended if program not in self._ended] == []

    def logs(self):
        """Return the output of all nodes and workers."""
        return "\n".join(program.text for program in self._programs)

    def clean_up(self):
        for program in [*self._clients, *self._programs]:
            program.clean_up()


def kill(program):
    """Kill the program and all its child processes at once: none of them can report its end."""
    family = program.children()
    # Suspended first, so that no child can react to the end of its parent.
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    os.kill(program.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    program.code()


def pause_of_chance():
    """Return a random number of seconds to wait before the next fault."""
    return random.uniform(0.05, 1.5)
