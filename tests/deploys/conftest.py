"""Workers in threads, and programs of their own, as their rooms start them."""

from tests.commands.conftest import address, runfaktory
from tests.worker.conftest import state, work

__all__ = ["address", "runfaktory", "state", "work"]
