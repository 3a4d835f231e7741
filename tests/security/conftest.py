"""Servers, and programs of their own, as their rooms start them."""

from tests.commands.conftest import address, runfaktory
from tests.server.conftest import serve, transport

__all__ = ["address", "runfaktory", "serve", "transport"]
