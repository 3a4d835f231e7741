"""Dead jobs by what killed them: the error's class, the head of its message without numbers and ids, and the task.

Looks at the newest `LOOKED_AT` only, and into no backtrace: a page says how many it has looked at.
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

from ..models import Job, JobQuerySet
from ..store.jobs import is_storable

LOOKED_AT = 5000
READ = 1200
"""Characters of a failure's text: its message comes early."""
LONGEST = 120

_message = re.compile(r'"message":"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
_changing = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b(?=\w*\d)[0-9a-fA-F]{12,}\b|\d+(?:[.,:]\d+)*"
)


class Kind(NamedTuple):
    """What the jobs of a group share."""

    errtype: str
    jobtype: str
    head: str

    @property
    def query(self) -> str:
        """As an address has it."""
        return urlencode({"error": self.errtype, "task": self.jobtype, "head": self.head})


@dataclass(slots=True)
class Group:
    """Dead jobs of one kind."""

    kind: Kind
    count: int
    latest_pk: int
    latest_at: datetime | None
    message: str
    queues: set[str]


class Found(NamedTuple):
    """Groups, the largest first."""

    groups: list[Group]
    looked_at: int
    is_more: bool


def message_of(failure: str) -> str:
    """The message in the beginning of a failure's text; "" where there is none."""
    match = _message.search(failure)
    if match is None:
        return ""
    try:
        message = json.loads(f'"{match[1]}"', strict=False)
    except ValueError:
        message = match[1]
    return sendable(message)


def sendable(text: str) -> str:
    """The text without what no page can carry: NUL, and halves of characters."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def head_of(message: str) -> str:
    """The first line, with an N for what differs from job to job."""
    line = message.strip().partition("\n")[0]
    return _changing.sub("N", line[: LONGEST * 2])[:LONGEST]


def kind_of(job: Job, failure: str) -> Kind:
    """Return the group of a dead job; `failure` is the beginning of its failure's text."""
    return Kind(job.errtype, job.jobtype, head_of(message_of(failure)))


def found(jobs: JobQuerySet, *, most: int = LOOKED_AT) -> Found:
    """The groups of these jobs, in one query."""
    fields = ("pk", "errtype", "jobtype", "told", "finished_at", "queue")
    rows: list[Any] = list(_told(jobs).order_by("-pk").values_list(*fields)[: most + 1])
    groups: dict[Kind, Group] = {}
    for pk, errtype, jobtype, told, finished_at, queue in rows[:most]:
        message = message_of(told)
        kind = Kind(errtype, jobtype, head_of(message))
        group = groups.setdefault(kind, Group(kind, 0, pk, finished_at, message, set()))
        group.count += 1
        group.queues.add(queue)
    in_order = sorted(groups.values(), key=lambda group: (-group.count, -group.latest_pk))
    return Found(in_order, min(len(rows), most), len(rows) > most)


def of_kind(kind: Kind, *, using: str) -> JobQuerySet:
    """Dead jobs with this error and task; `matching` picks those with its message."""
    if not (is_storable(kind.errtype) and is_storable(kind.jobtype)):
        return Job.objects.using(using).none()
    return Job.objects.using(using).dead().filter(errtype=kind.errtype, jobtype=kind.jobtype)


def matching(jobs: JobQuerySet, kind: Kind) -> Iterable[int]:
    """The ids of those of these jobs whose message is of this kind, in their order."""
    rows = _told(jobs).values_list("pk", "told")
    return [pk for pk, told in rows if head_of(message_of(told)) == kind.head]


def _told(jobs: JobQuerySet) -> Any:
    return jobs.annotate(told=Substr("failure", 1, READ))
