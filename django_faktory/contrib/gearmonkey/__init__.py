"""GearMonkey: jobs in Redis lists, shared with peers in any language (`docs/gearmonkey.md`, ADR 0013).

Needs redis-py: `pip install "django-faktory[redis]"`. In this package "the specification" is the text of the GearMonkey
protocol, and a naive peer is one that follows it to the letter and knows no `gm:` keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.lazy_names import import_on_use
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

# These need redis-py or Django's settings, the names above do not.
__getattr__ = import_on_use(
    __name__, {"client": ("AsyncClient", "Client"), "remote_task": ("gearmonkey_task",), "worker": ("Worker",)}
)
