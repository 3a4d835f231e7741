"""Run servers in their own processes: `runfaktory` as a node or as workers only, and the original server."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager


@contextmanager
def node(*options):
    """Run a server on a free port, with workers unless the options exclude them; yield its process and the port."""
    port = _free_port()
    with _running(f"127.0.0.1:{port}", *options) as process:
        _wait_for(port)
        yield process, port


@contextmanager
def original(binary):
    """Run the original server on a free port, with nothing stored; yield its process and the port.

    It starts a Redis itself.
    """
    port, pages = _free_port(), _free_port()
    with tempfile.TemporaryDirectory(prefix="faktory-bench-") as home:
        # Not HOME: the original takes the home directory of the password database, and so the data of the last run.
        command = [binary, "-b", f"127.0.0.1:{port}", "-w", f"127.0.0.1:{pages}", "-d", home, "-l", "warn"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield process, port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(40)


@contextmanager
def workers(*options):
    """Run workers without a server; yield their process, and stop it afterwards if it is still running."""
    with _running("--worker-only", *options) as process:
        yield process


@contextmanager
def _running(*options):
    command = [sys.executable, "-m", "django", "runfaktory", "--no-reload", *options]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start within 30 seconds")
