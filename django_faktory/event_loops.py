"""The event loop of the server and of `async def` tasks: uvloop's, where there is one for this platform."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new one. Imported here and not before: a worker without an `async def` task has none, and saves its memory."""
    try:
        import uvloop
    except ImportError:  # slower, nothing else
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
