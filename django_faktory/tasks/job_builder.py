"""Build jobs from calls of tasks.

A `JobBuilder` computes once what all jobs of its task share. `backend` keeps one builder for each task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import ceil
from typing import Any

from django.utils import timezone
from msgspec.structs import replace

from .. import conf
from ..core.json import jsontext
from ..core.payloads import JobPayload, JobTemplate, rfc3339
from ..errors import InvalidPayload
from . import encryption
from .arguments import ENCODING_ERRORS, name_argument
from .base import FaktoryTask
from .middleware import Call, get_middleware
from .options import TIMEOUT_MARGIN_S, to_custom
from .signatures import signature_of


class JobBuilder:
    """Builder of the jobs of one task. Valid until the settings change."""

    def __init__(self, task: FaktoryTask[..., Any]) -> None:
        self.task, self.middleware = task, get_middleware()
        self.signature = signature_of(task)
        self._is_encrypted = encryption.is_enabled(task.encrypt)
        self._template = JobTemplate(
            jobtype=task.jobtype,
            queue=task.queue_name,
            priority=int(task.priority),
            # The protocol counts retries, Django's option counts all attempts.
            retry=_option_or_setting(task.max_attempts, "MAX_ATTEMPTS") - 1,
            reserve_for=_choose_reserve_for(task),
            backtrace=task.backtrace,
            at=_make_aware(task.run_after) if task.run_after else None,
            result_ttl=_option_or_setting(task.result_ttl, "RESULT_TTL"),
            has_new_jids=True,
        )
        # Only a function among the options makes the members depend on the arguments.
        has_function = callable(task.lock) or callable(task.limit_key)
        self._custom = None if has_function else to_custom(task, (), {})

    def build_custom(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of `custom` for a job with these arguments, without `bid`."""
        return to_custom(self.task, args, kwargs) if self._custom is None else self._custom.copy()

    def build_jobs(self, calls: Sequence[Call], enqueued_at: datetime, caller_wid: str = "") -> list[JobPayload]:
        """Build the jobs of these calls, whose jids are new; `caller_wid` is that of the job that adds to its batch.

        Raises InvalidPayload if no worker could read one, CannotEncrypt without a key.
        """
        created_at = rfc3339(enqueued_at if enqueued_at.tzinfo else _make_aware(enqueued_at))
        jobs: list[JobPayload] = []
        for call in calls:
            args, kwargs = call.result.args, call.result.kwargs
            if self.task.plain_json and not self._is_encrypted and encryption.is_encrypted(args):
                raise InvalidPayload("args[0]: expected no Fernet token in $encrypted: it would be decrypted")
            try:
                if self._is_encrypted:
                    args, kwargs = self._encrypt(args, kwargs), {}
                job = self._template.job(call.result.id, args, kwargs, call.custom, created_at)
                jsontext.check_depth(job.text)  # FETCH rejects deeper JSON
            except (InvalidPayload, *ENCODING_ERRORS) as error:
                raise name_argument(error, call.result.args, call.result.kwargs) from None
            if caller_wid and job.options:
                job = replace(job, options=replace(job.options, caller_wid=caller_wid))
            jobs.append(job)
        return jobs

    def _encrypt(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        task = self.task
        # Uniqueness and locks compare arguments, which encryption makes different each time: ask for a fingerprint.
        with_fingerprint = task.unique_for is not None or task.lock is not None or bool(conf.get("LOCKET"))
        return encryption.encrypt_arguments(task.jobtype, args, kwargs, with_fingerprint=with_fingerprint)


def _choose_reserve_for(task: FaktoryTask[..., Any]) -> int:
    """Return the reservation in seconds: long enough for the timeout unless the task sets it."""
    seconds = _option_or_setting(task.reserve_for, "RESERVE_FOR")
    timeout = task.own_timeout or task.timeout
    if timeout is None or task.reserve_for is not None:
        return seconds
    return max(seconds, ceil(timeout) + TIMEOUT_MARGIN_S)


def _make_aware(moment: datetime) -> datetime:
    """Make a time aware: without USE_TZ Django's times are naive and local."""
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


def _option_or_setting(option: int | None, name: str) -> int:
    return int(conf.get(name)) if option is None else option
