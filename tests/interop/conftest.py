"""Other people's clients, unmodified, against our server on this database."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import serve  # noqa: F401  (a fixture)

HERE = Path(__file__).parent
COMMANDS = {
    "pyfaktory": [sys.executable, str(HERE / "pyfaktory_worker.py")],
    "faktory": [sys.executable, str(HERE / "faktory_worker.py")],
    "node": ["node", str(HERE / "node" / "worker.js")],
}


@pytest.fixture
def password():
    """The server's; none, unless a test says otherwise."""
    return ""


@pytest.fixture
def url(serve, password):  # noqa: F811
    """The address of a server."""
    host, port = serve(password=password).address
    return f"tcp://:{password}@{host}:{port}" if password else f"tcp://{host}:{port}"


@pytest.fixture
def start_worker(request, url):
    """Start another project's worker; it is ended, as a person would, when the test is over."""
    running = []

    def start(kind):
        if kind == "node":
            request.getfixturevalue("node_folder")
        running.append(subprocess.Popen([*COMMANDS[kind], url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
