"""`runfaktory` in processes of its own: a node that listens, workers alone."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager


@contextmanager
def node(*options):
    """A server on a free port, with workers unless told otherwise: its process, and the port."""
    port = _free_port()
    with _running(f"127.0.0.1:{port}", *options) as process:
        _wait_for(port)
        yield process, port


@contextmanager
def workers(*options):
    """Workers without a server: their process, ended afterwards where it did not end by itself."""
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
