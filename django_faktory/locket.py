"""resque-locket's settings: identical jobs of the locketed queues run one at a time. What they mean, and what is wrong.

Pure: knows no Django; a job's creation is the clock's only where it does not say. Docs: `docs/locks.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from . import jsontext
from .errors import FaktoryError, InvalidPayload
from .jsonfields import parse_instant
from .options import JobOptions, default_lock_key, lock_key
from .payloads import JobPayload

DEFAULTS: dict[str, Any] = {
    "ENABLED": False,
    "QUEUES": None,
    "HEARTBEAT_FREQUENCY": 30,
    "JOB_LOCK_DURATION": 35,
    "JOB_LOCK_KEY": None,
}

SLACK_S = 5
"""What an extension may be late by."""

LONGEST_BEAT_S = 15.0
"""Seconds between two BEATs, as the protocol recommends them."""

_NONE = JobOptions()


class Problem(NamedTuple):
    """What is wrong with the settings; an error, or where `is_warning` only unwise."""

    code: str
    """E1 to E6, W1 to W3."""
    message: str
    remedy: str

    @property
    def is_warning(self) -> bool:
        """Whether it works all the same."""
        return self.code.startswith("W")


def locket(
    queues: Sequence[str] | None = None,
    *,
    heartbeat_frequency: float = 30,
    job_lock_duration: int = 35,
    job_lock_key: Callable[[LockedJob], str | None] | str | None = None,
) -> dict[str, Any]:
    """For the settings: `FAKTORY = {"LOCKET": locket(["unique", "queues"])}`; without queues all are locketed."""
    return {
        "ENABLED": True,
        "QUEUES": queues,
        "HEARTBEAT_FREQUENCY": heartbeat_frequency,
        "JOB_LOCK_DURATION": job_lock_duration,
        "JOB_LOCK_KEY": job_lock_key,
    }


unique_queues = locket
"""The name that resque-locket's README has for it."""


class LockedJob:
    """What a key callable is given: a job as its client sent it, to look at."""

    def __init__(self, job: JobPayload) -> None:
        self._job = job
        self.jid, self.jobtype, self.queue, self.priority = job.jid, job.jobtype, job.queue, job.priority

    @cached_property
    def payload(self) -> dict[str, Any]:
        """All of it."""
        found: dict[str, Any] = jsontext.decode(self._job.text)
        return found

    @property
    def args(self) -> list[Any]:
        """Its arguments."""
        found: list[Any] = self.payload["args"]
        return found

    @property
    def custom(self) -> dict[str, Any]:
        """What it asks for beside; keyword arguments of a Django task are in `custom["kwargs"]`."""
        return self.payload.get("custom") or {}

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of a Django task."""
        return self.custom.get("kwargs") or {}

    @property
    def created_at(self) -> datetime:
        """When it was made. (Part of a key, it makes every key another.)"""
        told = self.payload.get("created_at")
        return parse_instant("created_at", told) if told else datetime.now(UTC)


class Locket:
    """The settings, read; for the side that pushes and the side that fetches."""

    def __init__(self, settings: Mapping[str, Any], *, key: Callable[[LockedJob], str | None] | None = None) -> None:
        found = {**DEFAULTS, **settings}
        self.is_enabled: bool = found["ENABLED"]
        self.queues: Collection[str] | None = found["QUEUES"]
        self.heartbeat_s: float = found["HEARTBEAT_FREQUENCY"]
        self.lease_s: float = found["JOB_LOCK_DURATION"]
        self._key = key
        self._problem = next((problem for problem in problems(settings) if not problem.is_warning), None)

    @property
    def is_at_rest(self) -> bool:
        """Whether it concerns no job at all: it is not enabled, and there is nothing to refuse."""
        return not self.is_enabled and self._problem is None

    def refuse_wrong(self) -> None:
        """Raise FaktoryError where the settings are wrong: before any lock is taken."""
        if self._problem is not None:
            raise FaktoryError(f"{self._problem.message}; {self._problem.remedy}")

    def is_locketed(self, queue: str) -> bool:
        """Whether jobs of this queue lock each other out without asking for it."""
        return self.is_enabled and (self.queues is None or queue in self.queues)

    def keyed(self, job: JobPayload) -> JobPayload:
        """The job with its key. Raises InvalidPayload where the callable fails: the job is not to be stored."""
        options = job.options or _NONE
        if not self.is_locketed(job.queue) or options.lock_key is not None:
            return job
        seen = LockedJob(job)
        if '"lock"' in job.text and seen.custom.get("lock") is False:
            return job
        key = self._key_of(seen, job)
        return (
            job if key is None else msgspec.structs.replace(job, options=msgspec.structs.replace(options, lock_key=key))
        )

    def _key_of(self, seen: LockedJob, job: JobPayload) -> str | None:
        if self._key is None:
            members = jsontext.members(job.text)
            custom = members.get("custom", "null")
            kwargs = jsontext.last_members(custom).get("kwargs", "") if custom.startswith("{") else ""
            return default_lock_key(job.jobtype, members["args"], *([kwargs] if kwargs else []))
        try:
            key = self._key(seen)
        except Exception as error:
            told = f"JOB_LOCK_KEY: {type(error).__name__}: {error}".splitlines()[0]
            raise InvalidPayload(f"{told:.200}; the job was not stored", jid=job.jid) from error
        if key is None:
            return None
        try:
            return lock_key(key)
        except ValueError as error:
            raise InvalidPayload(f"JOB_LOCK_KEY: {error}, or None, got {key!r:.80}", jid=job.jid) from None


def problems(settings: object, *, beat_s: float = LONGEST_BEAT_S) -> list[Problem]:
    """What is wrong with the settings, and how to mend it."""
    if not isinstance(settings, Mapping):
        return [
            Problem(
                "E6", f"LOCKET: expected a dict, got {type(settings).__name__}", "Write LOCKET = locket([…]), or {}."
            )
        ]
    found = {**DEFAULTS, **settings}
    heartbeat, duration = found["HEARTBEAT_FREQUENCY"], found["JOB_LOCK_DURATION"]
    wrong = [*_unknown(settings), *_wrong_times(heartbeat, duration), *_wrong_queues(found), *_wrong_key(found)]
    return wrong or [*_unwise(heartbeat, duration, beat_s)]


def _unknown(settings: Mapping[str, Any]) -> list[Problem]:
    unknown = sorted(map(str, settings.keys() - DEFAULTS.keys()))
    if unknown:
        return [Problem("E6", f"LOCKET: unknown key {unknown[0]!r}", f"Known: {', '.join(DEFAULTS)}.")]
    if not isinstance(settings.get("ENABLED", False), bool):
        told = f"LOCKET: ENABLED: expected True or False, got {settings['ENABLED']!r:.80}"
        return [Problem("E6", told, "Write LOCKET = locket([…]), or {}.")]
    return []


def _wrong_times(heartbeat: Any, duration: Any) -> list[Problem]:
    found = []
    if not _is_number(heartbeat) or heartbeat <= 0:
        told = f"LOCKET: HEARTBEAT_FREQUENCY: expected seconds above 0, got {heartbeat!r:.80}"
        found.append(Problem("E1", told, "30 is the default."))
    if not isinstance(duration, int) or isinstance(duration, bool) or duration < 1:
        told = f"LOCKET: JOB_LOCK_DURATION: expected whole seconds, 1 or more, got {duration!r:.80}"
        found.append(Problem("E2", told, "35 is the default."))
    if not found and duration < heartbeat:
        told = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}) is shorter than HEARTBEAT_FREQUENCY ({heartbeat:g}): every lock "
            "is over before it is extended"
        )
        found.append(Problem("E3", told, f"Let it be {int(heartbeat + SLACK_S + 1)} or more."))
    return found


def _wrong_queues(found: Mapping[str, Any]) -> list[Problem]:
    queues = found["QUEUES"]
    if queues is None or (isinstance(queues, list | tuple) and all(isinstance(name, str) for name in queues)):
        return []
    told = f"LOCKET: QUEUES: expected a list of names, or None for all queues, got {queues!r:.80}"
    return [Problem("E4", told, 'Write ["name"], with brackets, even for one.')]


def _wrong_key(found: Mapping[str, Any]) -> list[Problem]:
    key = found["JOB_LOCK_KEY"]
    if key is None or callable(key) or (isinstance(key, str) and "." in key):
        return []
    told = f"LOCKET: JOB_LOCK_KEY: expected a function of a job, or its dotted path, got {key!r:.80}"
    return [Problem("E5", told, "Write a function that takes a job and returns a string, or None for no lock.")]


def _unwise(heartbeat: float, duration: int, beat_s: float) -> list[Problem]:
    found = []
    if duration < heartbeat + SLACK_S:
        told = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}) leaves an extension less than {SLACK_S} seconds to be late by, "
            f"with a HEARTBEAT_FREQUENCY of {heartbeat:g}"
        )
        found.append(Problem("W1", told, f"Let it be {int(heartbeat + SLACK_S + 0.999)} or more."))
    if duration < 2 * LONGEST_BEAT_S:
        told = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}): workers in other languages send a BEAT every {LONGEST_BEAT_S:g} "
            "seconds, and one that is late loses its locks"
        )
        found.append(
            Problem("W2", told, f"Let it be {2 * LONGEST_BEAT_S:g} or more, unless all workers are this project's.")
        )
    if min(beat_s, heartbeat) > max(duration - SLACK_S, duration / 2):
        told = f"LOCKET: with a BEAT_INTERVAL of {beat_s:g} s locks of {duration} s are over before they are extended"
        found.append(Problem("W3", told, f"Let JOB_LOCK_DURATION be {int(beat_s + SLACK_S + 1)} or more."))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
