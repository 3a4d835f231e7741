"""Run the collected tests in forked processes: `pytest --processes 6`.

Each process of pytest-xdist imports and collects all tests again, which takes 4 s of CPU. A forked process has them.
"""

import gc
import io
import os
import signal
import sys
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait

import pytest

from tests import fork_server

NAME = "FAKTORY_TEST_PROCESS"
"""Environment variable of a forked process: its name, which is a part of the names of its databases."""

AHEAD = 2
"""Number of tests that a process has: pytest needs the next one to see which fixtures end after the current one."""

COLLECTED = 20_000, 20, 20
"""Objects between two garbage collections, and their generations: the default 700 took 3 % of the CPU time."""

CRASHED_S = 1.0
"""Seconds between checks for processes that ended: their children may keep the pipe open."""


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=0, metavar="N", help="run the tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    options = session.config.option
    if not options.processes or options.collectonly or session.testsfailed:
        return None  # pytest's own loop
    Run(session).run(min(options.processes, len(session.items)))
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Run:
    """The tests of a session, divided among forked processes."""

    def __init__(self, session):
        self._session = session
        self._hook = session.config.hook
        self._processes = []

    def run(self, count):
        """Run all tests in this number of processes."""
        gc.freeze()  # a collection in a forked process would copy the memory of all tests
        gc.set_threshold(*COLLECTED)
        self._session.config._tmp_path_factory.getbasetemp()  # forked processes make folders in it
        for item in self._session.items:
            item.location  # noqa: B018  (cached: otherwise both this process and the forked one read the source)
        total = len(self._session.items)
        for number in range(count):
            share = range(total * number // count, total * (number + 1) // count)
            self._start(f"gw{number}", deque(share))
        while self._processes:
            ready = wait([process.pipe for process in self._processes], CRASHED_S)
            for process in list(self._processes):
                if process.pipe in ready:
                    self._receive(process)
                elif process.has_ended() and not process.pipe.poll():  # it may have sent reports before it ended
                    self._end(process)

    def _start(self, name, share):
        process = Process(self._session, name, share)
        self._processes.append(process)
        for _ in range(AHEAD):
            self._send(process)

    def _send(self, process):
        """Send the next test to the process, or None if there is none."""
        if self._session.shouldfail or self._session.shouldstop:
            process.share.clear()
        elif not process.share:
            process.share = self._steal()
        process.send(process.share.popleft() if process.share else None)

    def _steal(self):
        """Take the last half of the tests of the process that has most."""
        richest = max(self._processes, key=lambda process: len(process.share)).share
        return deque(reversed([richest.pop() for _ in range((len(richest) + 1) // 2)]))

    def _receive(self, process):
        try:
            reports = process.pipe.recv()
        except (EOFError, OSError):
            self._end(process)
            return
        if isinstance(reports, str):
            process.error = reports
            return
        item = self._session.items[process.sent.popleft()]
        for data in reports:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._send(process)

    def _end(self, process):
        """Report the test of a process that crashed, and start another process for its other tests."""
        code = process.wait()
        self._processes.remove(process)
        if not process.sent:
            return
        index, *others = process.sent
        item = self._session.items[index]
        text = f"expected a result of this test, but its process ended with {code}\n{process.error}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._start(f"{process.name}b", deque([*others, *process.share]))


class Process:
    """A forked process; `share` has the tests that are left for it, `sent` those that it has."""

    def __init__(self, session, name, share):
        self.name, self.share, self.sent = name, share, deque()
        self.error = ""
        self.pipe, theirs = Pipe()
        self._code = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            self.pipe.close()
            run_child(session, name, theirs)
        theirs.close()

    def send(self, index):
        if index is not None:
            self.sent.append(index)
        with suppress(OSError):  # it crashed, which the next read of the pipe shows
            self.pipe.send(index)

    def has_ended(self):
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self):
        """Return the exit code, negative for a signal."""
        if not self.has_ended():
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code


def run_child(session, name, pipe):
    """Run the tests whose indexes come through the pipe, until None; never return."""
    code = 1
    try:
        Child(session, name, pipe).run()
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:  # noqa: BLE001  (the parent reports it)
        pipe.send(traceback.format_exc())
    finally:
        os._exit(code)


class Child:
    """What a forked process does; registered as a plugin, it collects the reports of a test for the pipe."""

    def __init__(self, session, name, pipe):
        self._items, self._config, self._pipe = session.items, session.config, pipe
        self._reports = []
        fork_server.end_with_parent()
        os.environ[NAME] = name
        self._config.workerinput = {"workerid": name}  # pytest-django appends it to the names of the databases
        self._separate_files(name)
        self._config.pluginmanager.register(self)

    def _separate_files(self, name):
        """Use files of its own: the parent's would be shared, with their positions."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        self._config.get_terminal_writer()._file = io.StringIO()  # the parent prints the reports
        folders = self._config._tmp_path_factory
        folders._basetemp = folders.getbasetemp() / name
        folders._basetemp.mkdir(mode=0o700)

    def run(self):
        current = self._pipe.recv()
        while current is not None:
            following = self._pipe.recv()
            item = self._items[current]
            next_item = None if following is None else self._items[following]
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            self._pipe.send(self._reports)  # one message for all of them: each wakes the parent
            self._reports = []
            current = following

    def pytest_runtest_logreport(self, report):
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
