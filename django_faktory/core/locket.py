"""Settings of resque-locket: identical jobs of the selected queues run one at a time.

`Locket` applies the settings, `problems` validates them. Pure: no Django; the clock is read only for a job without
`created_at`. Docs: `docs/locks.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from ..errors import FaktoryError, InvalidPayload
from .job_options import JobOptions, default_lock_key, lock_key
from .json import jsontext
from .json.fields import parse_instant
from .payloads import JobPayload

__all__ = ["LockedJob", "locket", "unique_queues"]

# Names and defaults are those of resque-locket (docs/locks.md).
DEFAULTS: dict[str, Any] = {
    "ENABLED": False,
    "QUEUES": None,
    "HEARTBEAT_FREQUENCY": 30,
    "JOB_LOCK_DURATION": 35,
    "JOB_LOCK_KEY": None,
}

SLACK_S = 5
"""Seconds by which an extension may be late."""

LONGEST_BEAT_S = 15.0
"""Seconds between two BEATs, as the protocol recommends."""

_NO_OPTIONS = JobOptions()


class Problem(NamedTuple):
    """An error in the settings, or a warning if `is_warning`."""

    code: str
    """E1 to E6, W1 to W3."""
    message: str
    remedy: str

    @property
    def is_warning(self) -> bool:
        """True if the settings work despite the problem."""
        return self.code.startswith("W")


def locket(
    queues: Sequence[str] | None = None,
    *,
    heartbeat_frequency: float = 30,
    job_lock_duration: int = 35,
    job_lock_key: Callable[[LockedJob], str | None] | str | None = None,
) -> dict[str, Any]:
    """Return the value of `FAKTORY["LOCKET"]`: jobs of these `queues`, by default of all, get lock keys.

    `heartbeat_frequency` is the pause in seconds between two renewals of a lock, `job_lock_duration` the whole seconds
    after which it expires without one. `job_lock_key` is a function of a `LockedJob` that returns its key, None for no
    lock; or the function's path. System checks report invalid values.
    """
    return {
        "ENABLED": True,
        "QUEUES": queues,
        "HEARTBEAT_FREQUENCY": heartbeat_frequency,
        "JOB_LOCK_DURATION": job_lock_duration,
        "JOB_LOCK_KEY": job_lock_key,
    }


unique_queues = locket
"""Alias; the name that the README of resque-locket uses."""


class LockedJob:
    """Argument of a key callable: a read-only view of a job as its client sent it."""

    def __init__(self, job: JobPayload) -> None:
        self._job = job
        self.jid, self.jobtype, self.queue, self.priority = job.jid, job.jobtype, job.queue, job.priority

    @cached_property
    def payload(self) -> dict[str, Any]:
        """The whole job, decoded."""
        payload: dict[str, Any] = jsontext.decode(self._job.text)
        return payload

    @property
    def args(self) -> list[Any]:
        """The positional arguments of the job."""
        args: list[Any] = self.payload["args"]
        return args

    @property
    def custom(self) -> dict[str, Any]:
        """The job's options; keyword arguments of a Django task are in `custom["kwargs"]`."""
        return self.payload.get("custom") or {}

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of a Django task."""
        return self.custom.get("kwargs") or {}

    @property
    def created_at(self) -> datetime:
        """When the job was created; as part of a key it makes every key unique."""
        text = self.payload.get("created_at")
        return parse_instant("created_at", text) if text else datetime.now(UTC)


class Locket:
    """The parsed settings, used by the pushing and the fetching side."""

    def __init__(self, settings: Mapping[str, Any], *, key: Callable[[LockedJob], str | None] | None = None) -> None:
        values = {**DEFAULTS, **settings}
        self.is_enabled: bool = values["ENABLED"]
        self.queues: Collection[str] | None = values["QUEUES"]
        self.heartbeat_s: float = values["HEARTBEAT_FREQUENCY"]
        self.lease_s: float = values["JOB_LOCK_DURATION"]
        self._key = key
        # Not raised here, so that system checks can report it: `raise_if_invalid` raises it before the first lock.
        self._problem = next((problem for problem in problems(settings) if not problem.is_warning), None)
        self.is_inactive = not self.is_enabled and self._problem is None
        """True if no job is affected: it is disabled and there is no error to raise."""

    def raise_if_invalid(self) -> None:
        """Raise FaktoryError if the settings are invalid, before any lock is acquired."""
        if self._problem is not None:
            raise FaktoryError(f"{self._problem.message}; {self._problem.remedy}")

    def applies_to(self, queue: str) -> bool:
        """Return True if LOCKET applies to this queue: its jobs get lock keys without an option of their own."""
        return self.is_enabled and (self.queues is None or queue in self.queues)

    def with_lock_key(self, job: JobPayload) -> JobPayload:
        """Return the job with its lock key.

        Raises InvalidPayload if the callable fails; the job must then not be stored.
        """
        options = job.options or _NO_OPTIONS
        # A key of the job itself takes precedence.
        if not self.applies_to(job.queue) or options.lock_key is not None:
            return job
        view = LockedJob(job)
        # The text search comes first: decoding every job to find this rare option would cost more.
        if '"lock"' in job.text and view.custom.get("lock") is False:
            return job
        key = self._key_of(view, job)
        return (
            job if key is None else msgspec.structs.replace(job, options=msgspec.structs.replace(options, lock_key=key))
        )

    def _key_of(self, view: LockedJob, job: JobPayload) -> str | None:
        if self._key is None:
            # Works on raw texts: the default key needs no decoded arguments.
            members = jsontext.members(job.text)
            custom = members.get("custom", "null")
            kwargs = jsontext.last_members(custom).get("kwargs", "") if custom.startswith("{") else ""
            return default_lock_key(job.jobtype, members["args"], *([kwargs] if kwargs else []))
        try:
            key = self._key(view)
        except Exception as error:
            # A failed key callable rejects the job: without its key the job could run concurrently with an identical
            # one.
            text = f"JOB_LOCK_KEY: {type(error).__name__}: {error}".splitlines()[0]
            raise InvalidPayload(f"{text:.200}; the job was not stored", jid=job.jid) from error
        if key is None:
            return None
        try:
            return lock_key(key)
        except ValueError as error:
            raise InvalidPayload(f"JOB_LOCK_KEY: {error}, or None, got {key!r:.80}", jid=job.jid) from None


def problems(settings: object, *, beat_s: float = LONGEST_BEAT_S) -> list[Problem]:
    """Return the problems of the settings, each with a remedy."""
    if not isinstance(settings, Mapping):
        return [
            Problem(
                "E6", f"LOCKET: expected a dict, got {type(settings).__name__}", "Write LOCKET = locket([…]), or {}."
            )
        ]
    values = {**DEFAULTS, **settings}
    heartbeat, duration = values["HEARTBEAT_FREQUENCY"], values["JOB_LOCK_DURATION"]
    errors = [*_check_keys(settings), *_check_times(heartbeat, duration), *_check_queues(values), *_check_key(values)]
    # Warnings compare the values, so they need valid ones.
    return errors or [*_check_margins(heartbeat, duration, beat_s)]


def _check_keys(settings: Mapping[str, Any]) -> list[Problem]:
    unknown = sorted(map(str, settings.keys() - DEFAULTS.keys()))
    if unknown:
        return [Problem("E6", f"LOCKET: unknown key {unknown[0]!r}", f"Known: {', '.join(DEFAULTS)}.")]
    if not isinstance(settings.get("ENABLED", False), bool):
        text = f"LOCKET: ENABLED: expected True or False, got {settings['ENABLED']!r:.80}"
        return [Problem("E6", text, "Write LOCKET = locket([…]), or {}.")]
    return []


def _check_times(heartbeat: Any, duration: Any) -> list[Problem]:
    errors = []
    if not _is_number(heartbeat) or heartbeat <= 0:
        text = f"LOCKET: HEARTBEAT_FREQUENCY: expected seconds above 0, got {heartbeat!r:.80}"
        errors.append(Problem("E1", text, "30 is the default."))
    if not isinstance(duration, int) or isinstance(duration, bool) or duration < 1:
        text = f"LOCKET: JOB_LOCK_DURATION: expected whole seconds, 1 or more, got {duration!r:.80}"
        errors.append(Problem("E2", text, "35 is the default."))
    if not errors and duration < heartbeat:
        text = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}) is shorter than HEARTBEAT_FREQUENCY ({heartbeat:g}): every lock "
            "expires before it is extended"
        )
        errors.append(Problem("E3", text, f"Set it to {int(heartbeat + SLACK_S + 1)} or more."))
    return errors


def _check_queues(values: Mapping[str, Any]) -> list[Problem]:
    queues = values["QUEUES"]
    # A string would pass as a collection of names of one letter each.
    if queues is None or (isinstance(queues, list | tuple) and all(isinstance(name, str) for name in queues)):
        return []
    text = f"LOCKET: QUEUES: expected a list of names, or None for all queues, got {queues!r:.80}"
    return [Problem("E4", text, 'Write ["name"]: a list, even for one queue.')]


def _check_key(values: Mapping[str, Any]) -> list[Problem]:
    key = values["JOB_LOCK_KEY"]
    if key is None or callable(key) or (isinstance(key, str) and "." in key):
        return []
    text = f"LOCKET: JOB_LOCK_KEY: expected a function of a job, or its dotted path, got {key!r:.80}"
    return [Problem("E5", text, "Write a function that takes a job and returns a string, or None for no lock.")]


def _check_margins(heartbeat: float, duration: int, beat_s: float) -> list[Problem]:
    warnings = []
    if duration < heartbeat + SLACK_S:
        text = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}) lets an extension be late by less than {SLACK_S} seconds, "
            f"with a HEARTBEAT_FREQUENCY of {heartbeat:g}"
        )
        warnings.append(Problem("W1", text, f"Set it to {int(heartbeat + SLACK_S + 0.999)} or more."))
    # A worker in another language extends its locks by BEAT only, and one BEAT may be late.
    if duration < 2 * LONGEST_BEAT_S:
        text = (
            f"LOCKET: JOB_LOCK_DURATION ({duration}): workers in other languages send a BEAT every {LONGEST_BEAT_S:g} "
            "seconds, and a late BEAT loses the locks"
        )
        warnings.append(
            Problem("W2", text, f"Set it to {2 * LONGEST_BEAT_S:g} or more, unless all workers are this project's.")
        )
    # A lock must survive one late extension: SLACK_S for long locks, half the duration for short ones.
    if min(beat_s, heartbeat) > max(duration - SLACK_S, duration / 2):
        text = f"LOCKET: with a BEAT_INTERVAL of {beat_s:g} s locks of {duration} s expire before they are extended"
        warnings.append(Problem("W3", text, f"Set JOB_LOCK_DURATION to {int(beat_s + SLACK_S + 1)} or more."))
    return warnings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
