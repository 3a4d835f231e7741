"""Enqueue jobs for workers in another language or of another project, by jobtype: `push` and `apush`.

Imports no model. For a task of this project use its `enqueue`, which converts more and applies its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils import timezone
from msgspec.structs import replace

from .. import brokers
from ..core import payloads
from ..core.json import jsontext
from ..core.payloads import DEFAULT_QUEUE, DEFAULT_RETRY, JobPayload
from ..errors import InvalidPayload
from . import batch as batches
from .arguments import ENCODING_ERRORS, encode_call, name_argument
from .base import find_registered
from .coroutines import names_awaitable
from .job_id import new_jid
from .json_values import normalize
from .options import OPTIONS
from .signatures import call_error, signature_of

if TYPE_CHECKING:
    from django.db.models import Model

LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100


@names_awaitable("push", "await apush(…)")
def push(
    jobtype: str,
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    queue_name: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_after: datetime | timedelta | None = None,
    max_attempts: int = DEFAULT_RETRY + 1,
    about: Model | str | None = None,
    custom: Mapping[str, Any] | None = None,
) -> str:
    """Enqueue a job by its jobtype, for which this project needs no task; return its jid.

    `args` have JSON types, and so do `kwargs`, for Django workers of another project, and `custom`, the options of
    docs/job-options.md. `priority` is -100 to 100, larger first. `run_after` is an aware datetime, or a timedelta from
    now. `queue_name`, `max_attempts` and `about` are as in `using` of a task.

    Inside a transaction the job is stored if it commits; inside `with Batch(…)` it joins the batch. No middleware runs,
    and nothing is encrypted. Raises InvalidPayload, TypeError or ValueError before anything is written, also for
    arguments that a task of this project does not take, and NotUnique.
    """
    _check_option("jobtype", jobtype)
    _check_option("max_attempts", max_attempts)
    if type(priority) is not int or not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise InvalidPayload(f"priority: expected -100 to 100, got {priority!r:.80}")
    task = find_registered(jobtype)
    if task is not None and (problem := signature_of(task).problem_with(args, kwargs or {})):
        raise call_error(task, args, kwargs or {}, problem)
    positional, named = encode_call(args, kwargs or {}, plain_json=True)
    members = dict(normalize(custom or {}))
    if about is not None:
        from ..models.related_object import about_of  # models can only be imported once apps are ready

        members["about"] = about_of(about)
    job = _build_job(
        members,
        jid=new_jid(),
        jobtype=jobtype,
        args=positional,
        kwargs=named,
        queue=payloads.queue_name(queue_name),
        priority=priority,
        retry=max_attempts - 1,
        at=_due_time(run_after),
    )
    # An outbox returns None here, and logs a refusal by its target later (ADR 0008).
    [refusal] = brokers.get_producer().push([job])
    if refusal:
        raise refusal
    return job.jid


async def apush(jobtype: str, /, *args: Any, **options: Any) -> str:
    """Enqueue a job by its jobtype from async code; see `push`."""
    return await sync_to_async(push)(jobtype, *args, **options)


def _check_option(name: str, value: object) -> None:
    if value is None or not OPTIONS[name].is_valid(value):
        raise InvalidPayload(f"{name}: expected {OPTIONS[name].expected}, got {value!r:.80}")


def _due_time(run_after: datetime | timedelta | None) -> datetime | None:
    if isinstance(run_after, timedelta):
        return datetime.now(UTC) + run_after
    if run_after is None or (isinstance(run_after, datetime) and timezone.is_aware(run_after)):
        return run_after
    raise TypeError(f"run_after: expected a timedelta or an aware datetime, got {run_after!r:.80}")


def _build_job(custom: dict[str, Any], **job: Any) -> JobPayload:
    """Build the job, as a member of the batch that is open here, if any."""
    batch = batches.current_batch.get()
    if batch is not None:
        custom["bid"] = batch.bid
    try:
        payload = payloads.new_job(custom=custom or None, **job)
        jsontext.check_depth(payload.text)  # FETCH rejects deeper JSON
    except (InvalidPayload, *ENCODING_ERRORS) as error:
        raise name_argument(error, job["args"], job["kwargs"]) from None
    if batch is not None and batch.caller_wid and payload.options:
        return replace(payload, options=replace(payload.options, caller_wid=batch.caller_wid))
    return payload
