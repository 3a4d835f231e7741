"""Nodes to kill are started as the command's tests start them."""

from tests.commands.conftest import address, runfaktory  # noqa: F401  (fixtures)
