"""Send a signal to a stored job: for admin, API and command line."""

from __future__ import annotations

from typing import Any

from .. import conf
from ..brokers import configured_store
from ..models import Job
from ..store.jobs import waits
from ..tasks.results import call_of
from ..tasks.steps import encode_payload


def send(job: Job, name: str, payload: Any) -> None:
    """Send a signal to a job, whose payload is encrypted if the job's arguments are. Raises as `JobResult.signal`."""
    text = encode_payload(payload, is_encrypted=call_of(job.payload).is_encrypted)
    using = job._state.db or conf.get("DATABASE")  # noqa: SLF001  (documented)
    waits.signal(configured_store(using), job.jid, name, text)
