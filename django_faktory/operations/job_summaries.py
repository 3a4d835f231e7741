"""Arguments and messages of jobs in lists, shared by the admin and the command line: shortened, redacted, read in part.

A job may have 16 MiB of arguments, so the database sends the beginning of long ones only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from django.db.models.functions import Substr

from ..errors import FaktoryError
from ..models import Job, JobQuerySet
from ..tasks import redaction
from ..tasks.encryption import is_encrypted
from .edit import call_of
from .error_groups import BEGINNING, extract_message, replace_unsendable

WHOLE = 16 * 1024
"""Characters of a job's JSON up to which a list reads it completely."""
ON_PAGES = 2000
"""The same for the lists of pages, which show the beginning of the arguments anyway."""

_args = re.compile(r'"args":\s*(\[.*)', re.DOTALL)


def with_texts(jobs: JobQuerySet, whole: int = WHOLE) -> Any:
    """Add the beginnings of the job's JSON and of its latest failure."""
    # One character more than `whole` shows that the text is longer.
    return jobs.annotate(
        payload_beginning=Substr("payload", 1, whole + 1), failure_beginning=Substr("failure", 1, BEGINNING)
    )


def read_call(job: Any, whole: int = WHOLE) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the visible arguments of a job; None if its JSON is too long, or is no object."""
    if len(job.payload_beginning) > whole:
        return None
    try:
        return call_of(Job(payload=redaction.redact_job(job.jobtype, job.payload_beginning)))
    except FaktoryError:  # a row that was edited manually
        return None


def describe_call(job: Any, whole: int = WHOLE) -> str:
    """Return the visible arguments as one line of JSON; if they are long, the beginning, unless `REDACT` is on."""
    if (call := read_call(job, whole)) is not None:
        args, kwargs = call
        if isinstance(args, list) and is_encrypted(args):
            return "(encrypted)"
        named = f" {json.dumps(kwargs, ensure_ascii=False)}" if kwargs else ""
        return replace_unsendable(f"{json.dumps(args, ensure_ascii=False)}{named}")
    if len(job.payload_beginning) <= whole:
        return "(not a JSON object)"
    # A part of the JSON cannot be parsed, and so not be redacted.
    found = None if redaction.is_on() else _args.search(job.payload_beginning)
    return replace_unsendable(found[1]) if found else "(too long)"


def read_message(job: Any) -> str:
    """Return the message of the latest failure; "" for none."""
    return extract_message(job.failure_beginning or "")
