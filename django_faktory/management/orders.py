"""What a process of `runfaktory` tells one that is executed in its place, or started by it: a JSON object in a pipe.

Knows no Django. Not in the command line or the environment: those are shown to others, and a URL has a password.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DJANGO_FAKTORY_ORDERS"
"""The file descriptor, for a process that begins with this project's own command line."""

MOST_BYTES = 16_384
"""What any pipe holds before anybody reads; with more, runfaktory stays as it is."""


def fits(orders: dict[str, Any]) -> bool:
    """Whether they can be given."""
    return len(json.dumps(orders).encode()) <= MOST_BYTES


def write(orders: dict[str, Any]) -> int:
    """The file descriptor to read them from; it survives `exec`."""
    reader, writer = os.pipe()
    with open(writer, "wb") as pipe:
        pipe.write(json.dumps(orders).encode())
    os.set_inheritable(reader, True)
    return reader


def read(reader: int) -> dict[str, Any]:
    """Those of this process."""
    with open(reader, "rb") as pipe:
        found: dict[str, Any] = json.load(pipe)
    return found


def read_own() -> dict[str, Any] | None:
    """What the environment leads to, once; None: this process has none."""
    found = os.environ.pop(VARIABLE, None)
    return read(int(found)) if found else None
