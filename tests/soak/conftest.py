"""Import fixtures of the command's tests, which start the nodes to be killed."""

from tests.runtime.processes.conftest import address, runfaktory  # noqa: F401  (fixtures)
