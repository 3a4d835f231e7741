"""Group failed jobs by cause: error class, task, and the place in the code that raised the error.

The place is the innermost frame of the project's own code, without its line number. Without a traceback it is the
message, without numbers and ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.db.models.functions import Right, Substr

from ..core.lifecycle import State
from ..core.payloads import is_storable
from ..core.queries import LATEST_FAILURE
from ..models import Job, JobQuerySet
from ..store.statistics import counts

JOBS_READ = 3000
"""Maximum number of dead jobs, and of retrying jobs, that are read; those that failed last."""
BEGINNING, END = 1200, 2000
"""Characters read of a failure's text: the message is near its beginning, the innermost frames are at its end."""
MAX_HEAD_LENGTH = 120
PATH_PARTS = 2
"""Parts of a file's path that a place shows: the same code has another path on each machine."""

# Not parsed as JSON: the text is cut off in the middle.
_message_pattern = re.compile(r'"message":"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
_python_frame = re.compile(r'File \\"([^"\\]+)\\", line \d+, in ([^\s"\\]+)')
_release = re.compile(r'"release":"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)"\}\]$')
_first_backtrace_line = re.compile(r'"backtrace":\["((?:[^"\\]|\\.)*)')
_line_number = re.compile(r":\d+")
# Quoted texts, e-mail addresses, UUIDs, and words with a digit: they differ from job to job.
_varying_parts = re.compile(
    r"'[^']*'|\"[^\"]*\"|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b[\w-]*\d[\w-]*(?:[.,:]\d+)*"
)
# Identifiers such as cus_NsNXKzkNRizNiN: lower and upper case mixed, after an underscore.
_mixed_id = re.compile(r"\b[a-z]+_(?=\w*[a-z])(?=\w*[A-Z])\w{8,}\b")
_library_paths = ("site-packages", "dist-packages", "/lib/python", "<frozen")


class FailureKind(NamedTuple):
    """Properties that the jobs of a group share."""

    errtype: str
    jobtype: str
    place: str

    @property
    def query(self) -> str:
        """Return the kind as a URL query string."""
        return urlencode({"error": self.errtype, "task": self.jobtype, "at": self.place})


@dataclass(slots=True)
class ErrorGroup:
    """Failed jobs of one kind."""

    kind: FailureKind
    frame: str = ""
    """Its place in the code; "" if the place of its kind is the pattern of a message."""
    message: str = ""
    """First line of the message of its latest failure."""
    count: int = 0
    """Number of its dead jobs."""
    retrying: int = 0
    first_at: datetime | None = None
    latest_at: datetime | None = None
    """Earliest and latest failure of its jobs; of each job the latest one counts."""
    queues: set[str] = field(default_factory=set)


class ErrorGroups(NamedTuple):
    """Groups, the largest first, and how many jobs were read."""

    groups: list[ErrorGroup]
    jobs_read: int
    jobs_total: int
    """Failed jobs that there are."""

    @property
    def is_more(self) -> bool:
        """True if not all of them were read."""
        return self.jobs_total > self.jobs_read


def extract_message(failure: str) -> str:
    """Return the message at the beginning of a failure's text, or ""."""
    match = _message_pattern.search(failure)
    return "" if match is None else _unescape(match[1])


def _unescape(text: str) -> str:
    try:
        unescaped = json.loads(f'"{text}"', strict=False)
    except ValueError:
        unescaped = text
    return replace_unsendable(unescaped)


def replace_unsendable(text: str) -> str:
    """Return the text with NUL and lone surrogates replaced, which no page can contain."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")


def normalize_message(message: str) -> str:
    """Return the first line of a message, with N in place of everything that varies between jobs."""
    # Cut before the substitution too: a very long line would make it slow.
    line = message.strip().partition("\n")[0][: MAX_HEAD_LENGTH * 2]
    return _mixed_id.sub("N", _varying_parts.sub("N", line))[:MAX_HEAD_LENGTH]


def shorten_message(message: str) -> str:
    """Return the first line of a message, cut for a list."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= MAX_HEAD_LENGTH else f"{line[: MAX_HEAD_LENGTH - 1]}…"


def find_place(beginning: str, end: str) -> str:
    """Return the place in the code that raised the error, "" if the failure has no traceback."""
    # Without the message, which differs from job to job, most jobs of a group have the same text, and one search of
    # `_find_python_place` serves them all.
    traceback = end[max(0, end.rfind('"backtrace":')) :]
    if place := _find_python_place(traceback) or _find_python_place(end):
        return place
    # Other languages begin a backtrace with the innermost frame.
    match = _first_backtrace_line.search(beginning) or _first_backtrace_line.search(end)
    return _line_number.sub("", _unescape(match[1]))[:MAX_HEAD_LENGTH] if match else ""


# Cached: the jobs of a group usually end with the same frames, so 10,000 failed jobs need a few searches only.
@lru_cache(maxsize=256)
def _find_python_place(end: str) -> str:
    frames = _python_frame.findall(end)
    if not frames:
        return ""
    own = [frame for frame in frames if not any(library in frame[0] for library in _library_paths)]
    path, function = (own or frames)[-1]
    return replace_unsendable(f"{function} ({'/'.join(path.split('/')[-PATH_PARTS:])})")[:MAX_HEAD_LENGTH]


def read_releases(pks: Sequence[int], *, using: str) -> list[str]:
    """Return the recorded releases of the latest failures of these jobs, in the order of `pks`."""
    # The release is the last member of an attempt, so no traceback has to be read for it.
    ends = dict(Job.objects.using(using).filter(pk__in=pks).values_list("pk", Right("history", END)))
    found = [match[1] for pk in pks if (match := _release.search(ends.get(pk, "")))]
    return list(dict.fromkeys(replace_unsendable(_unescape(text)) for text in found))


def read_kind(job: Job) -> FailureKind:
    """Return the kind of a failed job, with one query."""
    rows = _with_ends(Job.objects.using(job._state.db).filter(pk=job.pk)).values_list(*_ENDS)  # noqa: SLF001
    beginning, end = rows.first() or ("", "")  # it may be deleted meanwhile
    return _make_kind(job.errtype, job.jobtype, beginning, end)


def _make_kind(errtype: str, jobtype: str, beginning: str, end: str) -> FailureKind:
    return FailureKind(errtype, jobtype, find_place(beginning, end) or normalize_message(extract_message(beginning)))


def group_failed(*, using: str, limit: int = JOBS_READ) -> ErrorGroups:
    """Return the groups of the latest `limit` dead and `limit` retrying jobs, in two to four queries."""
    groups: dict[FailureKind, ErrorGroup] = {}
    jobs_read = jobs_total = 0
    for state in (State.DEAD, State.RETRIES):
        fields = ("errtype", "jobtype", "failed_at", "queue", *_ENDS)
        jobs = _with_ends(Job.objects.using(using).in_state(state)).order_by(*LATEST_FAILURE)
        rows: list[Any] = list(jobs.values_list(*fields)[: limit + 1])
        for errtype, jobtype, failed_at, queue, beginning, end in rows[:limit]:
            kind = _make_kind(errtype, jobtype, beginning, end)
            group = groups.get(kind)
            if group is None:
                group = groups[kind] = ErrorGroup(kind, find_place(beginning, end))
            if group.latest_at is None or (failed_at is not None and failed_at > group.latest_at):
                group.message = shorten_message(extract_message(beginning))
            _add(group, state, failed_at, queue)
        jobs_read += len(rows[:limit])
        is_cut = len(rows) > limit
        jobs_total += counts.read(using=using).of(state) if is_cut else len(rows)
    in_order = sorted(groups.values(), key=lambda group: (-(group.count + group.retrying), -group.count))
    return ErrorGroups(in_order, jobs_read, jobs_total)


def _add(group: ErrorGroup, state: State, failed_at: datetime | None, queue: str) -> None:
    group.queues.add(queue)
    if state is State.RETRIES:
        group.retrying += 1
    else:
        group.count += 1
    if failed_at is not None:
        group.first_at = min(group.first_at or failed_at, failed_at)
        group.latest_at = max(group.latest_at or failed_at, failed_at)


def filter_kind(kind: FailureKind, *, using: str, state: State = State.DEAD) -> JobQuerySet:
    """Return jobs with this error and task; `ids_of_kind` picks those of its place."""
    # An edited URL may contain NUL, which PostgreSQL rejects.
    if not (is_storable(kind.errtype) and is_storable(kind.jobtype)):
        return Job.objects.using(using).none()
    return Job.objects.using(using).in_state(state).filter(errtype=kind.errtype, jobtype=kind.jobtype)


def ids_of_kind(jobs: JobQuerySet, kind: FailureKind) -> list[int]:
    """Return the ids of the jobs that failed at the place of this kind, in the order of `jobs`."""
    rows = _with_ends(jobs).values_list("pk", *_ENDS)
    return [pk for pk, beginning, end in rows if _make_kind(kind.errtype, kind.jobtype, beginning, end) == kind]


_ENDS = ("failure_beginning", "failure_end")


def _with_ends(jobs: JobQuerySet) -> Any:
    # Only the ends of the text leave the database: tracebacks can be large.
    return jobs.annotate(failure_beginning=Substr("failure", 1, BEGINNING), failure_end=Right("failure", END))
