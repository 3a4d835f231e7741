"""GearMonkey: jobs in Redis lists, shared with peers in any language (`docs/gearmonkey.md`, ADR 0013).

Needs redis-py: `pip install django-faktory[redis]`. In this package "the specification" is the text of the GearMonkey
protocol, and a naive peer is one that follows it to the letter and knows no `gm:` keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import JobNotFound
from .errors import GearMonkeyError, JobCreationFailed, JobTimeout, NoWorkers, RemoteFailure, UnusableServer
from .protocol import OPT_BLOCKING, OPT_ROLLCALL, Job, Status

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .remote_task import gearmonkey_task
    from .worker import Worker

__all__ = [
    "OPT_BLOCKING",
    "OPT_ROLLCALL",
    "AsyncClient",
    "Client",
    "GearMonkeyError",
    "Job",
    "JobCreationFailed",
    "JobNotFound",
    "JobTimeout",
    "NoWorkers",
    "RemoteFailure",
    "Status",
    "UnusableServer",
    "Worker",
    "gearmonkey_task",
]

_MODULE_BY_NAME = {
    "AsyncClient": "client",
    "Client": "client",
    "Worker": "worker",
    "gearmonkey_task": "remote_task",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: these need redis-py or Django's settings, the names above do not.
    if name in _MODULE_BY_NAME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
