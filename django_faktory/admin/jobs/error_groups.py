"""Group dead jobs by cause: error class, task, and the message's first line without numbers and ids.

Reads the newest `JOBS_READ` jobs only, and no backtraces; a page shows how many were read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.db.models.functions import Substr

from ...core.payloads import is_storable
from ...models import Job, JobQuerySet

JOBS_READ = 5000
FAILURE_CHARACTERS = 1200
"""Characters read of a failure's text: the message is near its beginning."""
MAX_HEAD_LENGTH = 120

# Not parsed as JSON: the text is cut off in the middle.
_message_pattern = re.compile(r'"message":"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
# Addresses, UUIDs, other long hexadecimal numbers, and decimal numbers: they differ from job to job.
_varying_parts = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b(?=\w*\d)[0-9a-fA-F]{12,}\b|\d+(?:[.,:]\d+)*"
)


class ErrorKind(NamedTuple):
    """Properties that the jobs of a group share."""

    errtype: str
    jobtype: str
    head: str

    @property
    def query(self) -> str:
        """Return the kind as a URL query string."""
        return urlencode({"error": self.errtype, "task": self.jobtype, "head": self.head})


@dataclass(slots=True)
class ErrorGroup:
    """Dead jobs of one kind."""

    kind: ErrorKind
    count: int
    latest_pk: int
    latest_at: datetime | None
    message: str
    queues: set[str]


class ErrorGroups(NamedTuple):
    """Groups, the largest first, and how many jobs were read."""

    groups: list[ErrorGroup]
    jobs_read: int
    is_more: bool


def extract_message(failure: str) -> str:
    """Return the message at the beginning of a failure's text, or ""."""
    match = _message_pattern.search(failure)
    if match is None:
        return ""
    try:
        message = json.loads(f'"{match[1]}"', strict=False)
    except ValueError:
        message = match[1]
    return replace_unsendable(message)


def replace_unsendable(text: str) -> str:
    """Return the text with NUL and lone surrogates replaced, which no page can contain."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def normalize_message(message: str) -> str:
    """Return the first line of a message, with N in place of everything that varies between jobs."""
    # Cut before the substitution too: a very long line would make it slow.
    line = message.strip().partition("\n")[0]
    return _varying_parts.sub("N", line[: MAX_HEAD_LENGTH * 2])[:MAX_HEAD_LENGTH]


def get_kind(job: Job, failure: str) -> ErrorKind:
    """Return the group of a dead job; `failure` is the beginning of its failure's text."""
    return ErrorKind(job.errtype, job.jobtype, normalize_message(extract_message(failure)))


def group_jobs(jobs: JobQuerySet, *, limit: int = JOBS_READ) -> ErrorGroups:
    """Return the groups of these jobs, newest `limit` jobs only, in one query."""
    fields = ("pk", "errtype", "jobtype", "failure_text", "finished_at", "queue")
    rows: list[Any] = list(_with_failure_text(jobs).order_by("-pk").values_list(*fields)[: limit + 1])
    groups: dict[ErrorKind, ErrorGroup] = {}
    for pk, errtype, jobtype, failure_text, finished_at, queue in rows[:limit]:
        message = extract_message(failure_text)
        kind = ErrorKind(errtype, jobtype, normalize_message(message))
        group = groups.setdefault(kind, ErrorGroup(kind, 0, pk, finished_at, message, set()))
        group.count += 1
        group.queues.add(queue)
    in_order = sorted(groups.values(), key=lambda group: (-group.count, -group.latest_pk))
    return ErrorGroups(in_order, min(len(rows), limit), len(rows) > limit)


def filter_kind(kind: ErrorKind, *, using: str) -> JobQuerySet:
    """Return dead jobs with this error and task; `ids_of_kind` picks those with its message."""
    # An edited URL may contain NUL, which PostgreSQL rejects.
    if not (is_storable(kind.errtype) and is_storable(kind.jobtype)):
        return Job.objects.using(using).none()
    return Job.objects.using(using).dead().filter(errtype=kind.errtype, jobtype=kind.jobtype)


def ids_of_kind(jobs: JobQuerySet, kind: ErrorKind) -> Iterable[int]:
    """Return the ids of the jobs with a message of this kind, in the order of `jobs`."""
    rows = _with_failure_text(jobs).values_list("pk", "failure_text")
    return [pk for pk, failure_text in rows if normalize_message(extract_message(failure_text)) == kind.head]


def _with_failure_text(jobs: JobQuerySet) -> Any:
    # Only the beginning of the text leaves the database: backtraces can be large.
    return jobs.annotate(failure_text=Substr("failure", 1, FAILURE_CHARACTERS))
