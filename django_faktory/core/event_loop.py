"""Create the event loop of the server and of `async def` tasks: uvloop's if it is installed."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop.

    uvloop is imported here, so that a worker without `async def` tasks does not need memory for it.
    """
    try:
        import uvloop
    except ImportError:  # asyncio's loop is only slower
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
