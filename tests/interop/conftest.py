"""Run the clients of other projects, unmodified, against our server on this database."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import WITH_US
from tests.server.conftest import serve  # noqa: F401  (a fixture)

HERE = Path(__file__).parent
COMMANDS = {
    "pyfaktory": [sys.executable, str(HERE / "pyfaktory_worker.py")],
    "faktory": [sys.executable, str(HERE / "faktory_worker.py")],
    "node": ["node", str(HERE / "node" / "worker.js")],
    "ruby": ["faktory-worker", "--timeout", "5", "--require", str(HERE / "ruby" / "jobs.rb")],
}
FOLDERS = {"node": "node_folder", "go": "go_folder", "ruby": "ruby_folder"}
"""The fixtures that skip if a language is missing."""
KNOW_THE_VARIABLE = ("go", "ruby")
"""Clients that read the address from FAKTORY_URL. The other programs take it as an argument."""


@pytest.fixture
def password():
    """The server's password: none, unless a test sets one."""
    return ""


@pytest.fixture
def url(serve, password):  # noqa: F811
    """Start a server, and return its address."""
    host, port = serve(password=password).address
    return f"tcp://:{password}@{host}:{port}" if password else f"tcp://{host}:{port}"


@pytest.fixture
def start_worker(request, url):
    """Start another project's worker. After the test it is ended by SIGTERM, as an operator would."""
    running = []

    def start(kind):
        folder = request.getfixturevalue(FOLDERS[kind]) if kind in FOLDERS else None
        command = COMMANDS[kind] if kind in COMMANDS else [str(folder / "worker")]
        where = [] if kind in KNOW_THE_VARIABLE else [url]
        environment = {**os.environ, "FAKTORY_URL": url}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen([*WITH_US, *command, *where], env=environment, **pipes))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
