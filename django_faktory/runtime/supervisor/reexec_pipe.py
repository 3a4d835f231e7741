"""Pass orders from one process of `runfaktory` to another, as a JSON object in a pipe. Knows no Django.

Not on the command line or in the environment: other users can read these, and a broker URL contains a password.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DJANGO_FAKTORY_ORDERS"
"""Environment variable with the pipe's file descriptor, for a process started with the project's own command line."""

MAX_BYTES = 16_384
"""Size that any pipe buffers before it is read. With larger orders, runfaktory keeps Django loaded."""


def fits(orders: dict[str, Any]) -> bool:
    """Return whether these orders fit into a pipe."""
    return len(json.dumps(orders).encode()) <= MAX_BYTES


def write(orders: dict[str, Any]) -> int:
    """Write orders into a pipe; return the read end, which survives `exec`."""
    reader, writer = os.pipe()
    # Closed at the end of the block: `read` reads until the end of the data.
    with open(writer, "wb") as pipe:
        pipe.write(json.dumps(orders).encode())
    os.set_inheritable(reader, True)
    return reader


def read(reader: int) -> dict[str, Any]:
    """Read the orders from this pipe and close it."""
    with open(reader, "rb") as pipe:
        orders: dict[str, Any] = json.load(pipe)
    return orders


def read_own() -> dict[str, Any] | None:
    """Return the orders of this process, once; None if it has none."""
    # Popped, so that programs started by this process do not take them for theirs.
    descriptor = os.environ.pop(VARIABLE, None)
    return read(int(descriptor)) if descriptor else None
