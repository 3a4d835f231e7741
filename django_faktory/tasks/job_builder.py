"""Builds jobs from calls of tasks: what all jobs of one enqueue share is computed once by `JobBuilder`."""

from __future__ import annotations

from datetime import datetime
from math import ceil
from typing import Any

from django.utils import timezone
from msgspec.structs import replace

from .. import conf
from ..core.json import jsontext
from ..core.payloads import JobPayload, JobTemplate
from ..errors import InvalidPayload
from . import batch as batches
from . import encryption
from .base import FaktoryTask
from .compat import TaskResult
from .middleware import Call
from .options import TIMEOUT_MARGIN_S


class JobBuilder:
    """Job builder for one task at one moment."""

    def __init__(self, task: FaktoryTask[..., Any], enqueued_at: datetime) -> None:
        self._task = task
        self._is_encrypted = encryption.is_enabled(task.encrypt)
        self._template = JobTemplate(
            jobtype=task.jobtype,
            queue=task.queue_name,
            priority=int(task.priority),
            # The protocol counts retries, Django's option counts all attempts.
            retry=_option_or_setting(task.max_attempts, "MAX_ATTEMPTS") - 1,
            reserve_for=_reserve_for(task),
            backtrace=task.backtrace,
            at=_make_aware(task.run_after),
            created_at=_make_aware(enqueued_at),
            result_ttl=_option_or_setting(task.result_ttl, "RESULT_TTL"),
        )
        batch = batches.current()
        self._caller_wid = batch.caller_wid if batch is not None else ""

    def job(self, call: Call) -> JobPayload:
        """Build the job of one call. Raises InvalidPayload if no worker could read it, CannotEncrypt without a key."""
        args, kwargs = self._arguments(call.result)
        job = self._template.job(call.result.id, args, kwargs, call.custom)
        jsontext.check_depth(job.text)  # FETCH rejects deeper JSON
        # Only members of a batch need the wid of the pushing job: it proves that the job may add to the batch.
        if self._caller_wid and job.options:
            return replace(job, options=replace(job.options, caller_wid=self._caller_wid))
        return job

    def _arguments(self, result: TaskResult[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the job carries them: encrypted if the task or the project asks for it."""
        task = self._task
        if not self._is_encrypted:
            if task.plain_json and encryption.is_encrypted(result.args):
                raise InvalidPayload("args[0]: expected no Fernet token in $encrypted: it would be decrypted")
            return result.args, result.kwargs
        # Uniqueness and locks compare arguments, which encryption makes different each time: ask for a fingerprint.
        with_fingerprint = task.unique_for is not None or task.lock is not None or bool(conf.get("LOCKET"))
        return encryption.encrypt_arguments(
            task.jobtype, result.args, result.kwargs, with_fingerprint=with_fingerprint
        ), {}


def _reserve_for(task: FaktoryTask[..., Any]) -> int:
    """Return the reservation in seconds: long enough for the timeout unless the task sets it."""
    seconds = _option_or_setting(task.reserve_for, "RESERVE_FOR")
    if task.timeout is None or task.reserve_for is not None:
        return seconds
    return max(seconds, ceil(task.timeout) + TIMEOUT_MARGIN_S)


def _make_aware(moment: datetime | None) -> datetime | None:
    """Make a time aware: without USE_TZ Django's times are naive and local."""
    return timezone.make_aware(moment) if moment is not None and timezone.is_naive(moment) else moment


def _option_or_setting(option: int | None, name: str) -> int:
    return int(conf.get(name)) if option is None else option
