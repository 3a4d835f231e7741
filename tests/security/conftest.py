"""Fixtures of `tests.management.cli` and the server tests, shared with the security tests."""

from tests.management.cli.conftest import faktory
from tests.runtime.processes.conftest import address, runfaktory
from tests.server.conftest import serve, transport
from tests.worker.conftest import state, work

__all__ = ["address", "faktory", "runfaktory", "serve", "state", "transport", "work"]
