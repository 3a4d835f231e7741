"""Template context of a job's page: facts, a timeline of attempts, and the beginnings of its long texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.urls import NoReverseMatch
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ... import conf
from ...core.json.fields import parse_instant
from ...core.json.jsontext import decode, items, last_members
from ...core.lifecycle import ENDED, WORKER_LOST, State
from ...core.payloads import LOGGED
from ...core.queries import split_about
from ...errors import FaktoryError
from ...models import Batch, Job, Limiter, Tracking
from ...models.cron import CronRun
from ...models.permissions import may, may_see
from ...operations import error_groups, waiting, worker_names
from ...operations.edit import EDITABLE
from ...operations.job_actions import JOB_ACTIONS, Verb, get_allowed_actions
from ...operations.signatures import bind, find_task
from ...store.jobs.prefetch import is_unconfirmed
from ...store.texts import SHOWN_BYTES, WHOLE, StoredText, cut, format_json
from ...tasks import redaction
from ...tasks.arguments import may_have_references
from ...tasks.encryption import is_encrypted
from ...tasks.results import Attempt, runs_of
from ...tasks.tracing import trace_id_of
from ..formats import format_duration, render_worker
from ..history import translate_entry
from ..labels import STATES
from ..links import admin_url, jobs_link, row_link
from ..locks import holder_of
from ..long_texts import build_shown_text
from ..sanitize import make_readable

MAX_ATTEMPTS_SHOWN = 50
"""Attempts shown at most, the latest ones."""
MAX_ACTIONS_SHOWN = 20
"""Actions of users shown at most, the latest ones."""

MESSAGE_BYTES = 2048
TIMELINE_BYTES = 48 * 1024
"""Bytes of HTML: for the message of one attempt, and for all messages and backtraces together."""

MAX_ARGUMENTS_SHOWN = 50
"""Rows of the table of arguments; the JSON below it has all of them."""
ARGUMENT_BYTES = 1024
"""Bytes of HTML for the name, and for the value, of one argument in the table."""

MAX_EDITED = WHOLE
"""Characters of the longest arguments that the edit page shows."""

TOO_LONG = _("Its arguments are too long to be edited on a page; edit them through the API.")


class TimelineEntry(NamedTuple):
    """One event of the timeline."""

    title: str
    at: datetime | None
    is_failed: bool = False
    is_good: bool = False
    took: str = ""
    worker: str = ""
    error: str = ""
    message: str = ""
    backtrace: str = ""
    by: str = ""
    """The user, if a person did it."""
    log: str = ""
    log_count: int = 0
    """The latest lines that the task logged, and how many there are."""
    release: str = ""
    """The project's release that the worker ran, if known."""
    is_open: bool = False
    """Whether the traceback is shown without a click: the newest one."""


class ShownArgument(NamedTuple):
    """A row of the table of arguments."""

    name: str
    text: str
    is_cut: bool


def build_context(
    job: Job, stored: Mapping[str, StoredText], urls: Mapping[str, str], request: HttpRequest
) -> dict[str, Any]:
    """Return the template's context. `stored` are the job's long texts, the payload as far as it may be seen."""
    payload = stored["payload"]
    # A text that was cut off cannot be parsed.
    members = _parse_members(payload.text) if payload.is_whole else {}
    # Keyword arguments are in `custom`, because the protocol has positional arguments only.
    custom = _parse_members(members.get("custom", ""))
    shown_texts = {column: build_shown_text(text, urls[column]) for column, text in stored.items() if text.size}
    for name, text in (("args", members.get("args", "")), ("kwargs", custom.get("kwargs", ""))):
        if text:
            shown_texts[name] = build_shown_text(payload, urls["payload"], format_json(text))
    timeline = build_timeline(job, stored["history"])
    names = {}
    if may_see(request.user, "workerprocess"):  # host names need this permission
        names = worker_names.read([job.wid, *(entry.worker for entry in timeline)], using=conf.get("DATABASE"))
    timeline = [_name_worker(entry, names) if entry.worker else entry for entry in timeline]
    return {
        "job": job,
        "status": STATUS_WORDS.get(State(job.state), STATES[job.state]),
        "is_final": job.state in FINAL,
        "why": _link_reason(job),
        "facts": [
            (name, value)
            for name, value in [
                *_build_facts(job, names),
                (gettext("Trace"), _link_trace(custom.get("traceparent", ""))),
            ]
            if value not in (None, "", "–")
        ],
        "times": [(name, at) for name, at in _build_times(job) if at is not None],
        "texts": shown_texts,
        "is_too_long": not payload.is_whole,
        "timeline": add_operator_actions(timeline, job),
        "job_actions": get_allowed_actions(job, request.user),
        "may_edit": job.state in EDITABLE and may(request.user, "job.change"),
        "may_signal": job.state not in ENDED and may(request.user, "job.signal"),
        "kind": error_groups.read_kind(job) if job.state == State.DEAD else None,
        "may_test": job.state == State.DEAD and JOB_ACTIONS[Verb.RETRY].is_allowed(request.user),
    }


def read_editable_call(job: Job, payload: StoredText) -> tuple[str, str, str]:
    """Return a job's arguments and keyword arguments as text to edit, and why they cannot be edited.

    The reason is "" if they can be edited.
    """
    if not payload.is_whole:
        return "", "", str(TOO_LONG)
    members = _parse_members(redaction.redact_job(job.jobtype, payload.text))
    kwargs = _parse_members(members.get("custom", "")).get("kwargs", "")
    call = format_json(members.get("args", "[]"), MAX_EDITED), format_json(kwargs, MAX_EDITED) or "{}"
    if any(len(text) > MAX_EDITED for text in call):
        return "", "", str(TOO_LONG)
    if job.state not in EDITABLE:
        return *call, (
            gettext(
                "This job is %(state)s and cannot be edited: only scheduled, enqueued, blocked, retrying and dead jobs "
                "can."
            )
            % {"state": STATES[job.state]}
        )
    # The placeholder shown for a hidden value would be saved as the value.
    if redaction.is_redacted(job.jobtype, payload.text):
        return *call, gettext("FAKTORY['REDACT'] hides some of its arguments: they cannot be edited on a page.")
    return *call, ""


def name_arguments(job: Job, payload: StoredText, shown: StoredText) -> list[ShownArgument]:
    """Return the arguments with the names of their parameters; none if the task is unknown or cannot take them.

    `payload` is the stored text, `shown` the part of it that `REDACT` shows.
    """
    task = find_task(job.jobtype) if payload.is_whole and shown.is_whole else None
    if task is None:
        return []
    try:
        stored_args, stored_kwargs = _split_call(payload.text)
        args, kwargs = _split_call(shown.text)
        if len(args) == 1 and is_encrypted([decode(args[0])]):
            return []
    except FaktoryError:
        return []
    # If `REDACT` removes a value, the positions of the later ones change, and their names would be wrong.
    if len(args) != len(stored_args) or kwargs.keys() != stored_kwargs.keys():
        return []
    rows: list[ShownArgument] = []
    remaining = SHOWN_BYTES
    for _parameter, name, raw in (bind(task, args, kwargs) or [])[:MAX_ARGUMENTS_SHOWN]:
        whole = _describe_value(raw, is_plain=task.plain_json)
        limit = min(remaining, ARGUMENT_BYTES)
        # A client chooses the names of further keyword arguments: half a character could not be encoded.
        row_name, text = cut(make_readable(name), limit), cut(make_readable(whole), limit)
        remaining = max(0, remaining - len(escape(row_name + text).encode("utf-8", "replace")))
        rows.append(ShownArgument(row_name, text, len(text) < len(whole)))
    return rows


def _describe_value(raw: str, *, is_plain: bool) -> str:
    """Return the JSON of an argument, or the value and type that a reference stands for."""
    if not is_plain and may_have_references(raw) and len(raw) < ARGUMENT_BYTES:
        match decode(raw):
            case {"$type": str(name), "value": str(value), **others} if not others:
                return f"{value} ({name})"
            case {"$model": str(name), "pk": str() | int() as key, **others} if not others:
                return f"{name} {key}"
    return format_json(raw, ARGUMENT_BYTES)


def _split_call(payload: str) -> tuple[list[str], dict[str, str]]:
    """Return the JSON text of each argument. Raises InvalidPayload."""
    members = last_members(payload)
    kwargs = _parse_members(members.get("custom", "")).get("kwargs", "")
    return items(members.get("args", "[]")), _parse_members(kwargs)


def build_timeline(job: Job, history: StoredText) -> list[TimelineEntry]:
    """Return the job's events, oldest first. Room for backtraces is given to the latest attempts first."""
    runs = runs_of(history.text) if history.is_whole else []
    omitted_runs, shown_runs = runs[:-MAX_ATTEMPTS_SHOWN], runs[-MAX_ATTEMPTS_SHOWN:]
    # The stored history is limited in length, and an imported job has its latest failure only.
    unrecorded = max(0, job.failures + job.losses - sum(run.has_failed for run in runs))
    number = unrecorded + sum(run.has_failed for run in omitted_runs)
    texts = _cut_runs(job, shown_runs)
    entries = [TimelineEntry(gettext("Enqueued"), job.created_at)]
    current = _build_current_entry(job)
    if number:
        text = ngettext("%(number)s earlier attempt", "%(number)s earlier attempts", number)
        entries.append(TimelineEntry(text % {"number": number}, None))
    for run, (message, backtrace, log) in zip(shown_runs, texts, strict=True):
        started_at, failed_at = _parse_time(run.started_at), _parse_time(run.failed_at)
        log_count = log.count("\n") + bool(log)
        if run.kind == LOGGED:
            # A log is stored before the ACK of its run. After a lost run, another entry follows.
            if run is runs[-1] and job.state in (State.SUCCEEDED, State.WORKING):
                current = current._replace(log=log, log_count=log_count)
            else:  # its end was reported too late, or not at all
                title = gettext("A run ended; its report had no effect")
                entries.append(TimelineEntry(title, None, worker=run.wid, log=log, log_count=log_count))
            continue
        number += run.has_failed
        if run.is_interruption:
            took = _format_span(started_at, failed_at)
            title = run.message[:1].upper() + run.message[1:]
            entries.append(TimelineEntry(title, failed_at, took=took, worker=run.wid, log=log, log_count=log_count))
            continue
        entries.append(
            TimelineEntry(
                gettext("Attempt %(number)s failed") % {"number": number},
                failed_at,
                is_failed=True,
                took=_format_span(started_at, failed_at),
                worker=run.wid,
                error=run.errtype,
                message=message,
                backtrace=backtrace,
                log=log,
                log_count=log_count,
                release=cut(run.release, MESSAGE_BYTES),
            )
        )
    newest = max((index for index, entry in enumerate(entries) if entry.backtrace), default=None)
    if newest is not None:
        entries[newest] = entries[newest]._replace(is_open=True)
    return [*entries, current]


def add_operator_actions(entries: Sequence[TimelineEntry], job: Job) -> list[TimelineEntry]:
    """Return the entries with what users did to this job in the admin, at their times."""
    content_type = ContentType.objects.get_for_model(Job)
    # An earlier job with this primary key may have had entries.
    logged = LogEntry.objects.filter(
        content_type=content_type, object_id=str(job.pk), action_time__gte=job.created_at
    ).select_related("user")
    latest = list(logged.order_by("-action_time")[:MAX_ACTIONS_SHOWN])
    if not latest:
        return list(entries)
    *events, current = entries
    timed: list[tuple[datetime, TimelineEntry]] = []
    at = job.created_at
    for event in events:
        at = event.at or at  # an entry without a time stays behind the one before it
        timed.append((at, event))
    for entry in latest:
        title = cut(translate_entry(entry.get_change_message()), MESSAGE_BYTES)
        timed.append((entry.action_time, TimelineEntry(title, entry.action_time, by=entry.user.get_username())))
    return [*(event for _, event in sorted(timed, key=itemgetter(0))), current]


def _cut_runs(job: Job, runs: Sequence[Attempt]) -> list[tuple[str, str, str]]:
    """Return message, backtrace and log lines of each attempt, cut to `TIMELINE_BYTES` in total."""
    remaining, texts = TIMELINE_BYTES, []
    # The latest first: if room is missing, the earlier texts are cut.
    for run in reversed(runs):
        shown: list[str] = []
        for text, limit in (
            (run.message, MESSAGE_BYTES),
            ("\n".join(run.backtrace), SHOWN_BYTES),
            ("\n".join(redaction.redact_log(job.jobtype, run.log)), SHOWN_BYTES),
        ):
            shown.append(cut(text, min(remaining, limit)))
            # Escaped size: `<` becomes four bytes of HTML.
            remaining = max(0, remaining - len(escape(shown[-1]).encode("utf-8", "replace")))
        message, backtrace, log = shown
        texts.append((message, backtrace, log))
    return texts[::-1]


FINAL = frozenset({State.SUCCEEDED, State.DEAD, State.DISCARDED, State.EXPIRED})
"""States in which a job's page need not be reloaded: only people change these jobs."""

STATUS_WORDS = {State.RETRIES: _("waiting to retry"), State.WORKING: _("running")}
"""Words for states with names that do not fit into a sentence."""

_WAITS = {
    State.SCHEDULED: (_("Scheduled for"), "run_at"),
    State.RETRIES: (_("Next retry at"), "run_at"),
    State.ENQUEUED: (_("Waiting for a worker since"), "enqueued_at"),
    State.BLOCKED: (_("Waiting for a lock or a limit since"), "enqueued_at"),
}


def _build_current_entry(job: Job) -> TimelineEntry:
    state = State(job.state)
    if state in _WAITS:
        title, column = _WAITS[state]
        if job.awaited:
            text = gettext("Waits for signal %(signal)s") % {"signal": job.awaited}
            return TimelineEntry(text, job.due_at)
        return TimelineEntry(str(title), getattr(job, column))
    if state is State.WORKING:
        text = gettext("Attempt %(number)s running since") % {"number": job.attempts}
        return TimelineEntry(text, job.started_at, worker=job.wid)
    if state is State.SUCCEEDED:
        return TimelineEntry(
            gettext("Succeeded"),
            job.finished_at,
            is_good=True,
            took=_format_span(job.started_at, job.finished_at),
            worker=job.wid,
        )
    return TimelineEntry(capfirst(str(STATES[state])), job.finished_at, is_failed=state is State.DEAD)


def _format_span(started_at: datetime | None, ended_at: datetime | None) -> str:
    return format_duration((ended_at - started_at).total_seconds()) if started_at and ended_at else ""


def _name_worker(entry: TimelineEntry, names: Mapping[str, str]) -> TimelineEntry:
    name = names.get(entry.worker, entry.worker)
    message = entry.message.replace(entry.worker, name) if entry.error == WORKER_LOST else entry.message
    return entry._replace(worker=render_worker(entry.worker, name), message=message)


def _link_reason(job: Job) -> SafeString | str | None:
    """Return why the job waits, as a link to the row that explains it."""
    reason = waiting.read_reason(job, using=conf.get("DATABASE"))
    if reason is None or not reason.model:
        return reason and reason.text
    return _admin_link(reason.model, reason.key, reason.text)


def _build_facts(job: Job, names: Mapping[str, str]) -> list[tuple[str, Any]]:
    using = conf.get("DATABASE")
    attempts = gettext("%(number)s of %(total)s") % {"number": job.attempts, "total": job.max_attempts}
    return [
        (gettext("Task"), job.jobtype),
        (gettext("State"), STATES[job.state]),
        (gettext("Queue"), _admin_link("queue", job.queue, job.queue)),
        (gettext("About"), _link_related_object(job.about)),
        (gettext("Priority"), job.priority or None),
        (gettext("Attempts"), attempts if job.attempts else None),
        (gettext("Interruptions"), job.interruptions or None),
        (gettext("Lost workers"), job.losses or None),
        (gettext("Progress") if job.state == State.WORKING else gettext("Last progress"), _render_progress(job, using)),
        (
            gettext("Cancelled"),
            gettext("requested; the worker was notified") if job.is_cancelled and job.state == State.WORKING else None,
        ),
        (gettext("Worker"), _link_worker(job, names)),
        (gettext("Batch"), _link_batch(job.bid, using)),
        (gettext("Callback of batch"), _link_batch(job.callback_of, using)),
        (gettext("Lock"), job.lock_key),
        (gettext("Lock held by"), None if job.state in FINAL else holder_of(job)),
        (gettext("Lock token"), job.lock_token),
        (gettext("Limit of the key"), job.limit_key),
        (gettext("Blocked by limit"), _link_limit(job, using)),
        (gettext("Unique until"), job.unique_expires_at if job.unique_key else None),
        (gettext("Cron entry"), _link_cron_entry(job, using)),
        (gettext("Job ID"), _render_copyable(job.jid)),
    ]


def _render_copyable(jid: str) -> SafeString:
    """Return the job ID with a button that copies it, which the page's script shows."""
    button = render_to_string(
        "admin/django_faktory/copy.html", {"source": "faktory-jid", "label": gettext("Copy job ID")}
    )
    return format_html('<span id="faktory-jid">{}</span> {}', jid, button)


def _link_trace(traceparent: str) -> SafeString | None:
    """Return a link to the trace that the job belongs to, if the project has set `TRACE_URL`."""
    address = str(conf.get("TRACE_URL"))
    with suppress(FaktoryError):  # any client can write this member
        trace_id = trace_id_of(decode(traceparent)) if address and traceparent else ""
        if trace_id:
            link = '<a href="{}" rel="noreferrer">{}</a>'
            return format_html(link, address.replace("{trace_id}", trace_id), trace_id)
    return None


def _link_limit(job: Job, using: str) -> Any:
    """Return the limit that blocks the job, as a link."""
    if job.state != State.BLOCKED or job.limiter is None:
        return None
    limiter = Limiter.objects.using(using).filter(pk=job.limiter).first()
    return None if limiter is None else _admin_link("limit", limiter.limit_id, str(limiter))


def _build_times(job: Job) -> list[tuple[str, datetime | None]]:
    return [
        (gettext("Created"), job.created_at),
        (gettext("Due"), job.due_at),
        (gettext("Enqueued"), job.enqueued_at),
        (gettext("Started"), job.started_at),
        (
            gettext("Leased, delivery not confirmed, until") if is_unconfirmed(job) else gettext("Reserved until"),
            job.reserved_until if job.state == State.WORKING else None,
        ),
        (gettext("Ended"), job.finished_at),
        (gettext("Expires"), job.expires_at if State(job.state) in _WAITS else None),
        (gettext("Kept until"), job.purge_at),
    ]


def _render_progress(job: Job, using: str) -> SafeString | str:
    tracking = Tracking.objects.using(using).filter(jid=job.jid).first()
    # A tracking row older than the job belongs to an earlier job with the same jid.
    if tracking is None or tracking.updated_at < job.created_at:
        return ""
    desc = cut(tracking.desc or "", MESSAGE_BYTES)
    if tracking.percent is None:
        return desc
    # A bar that does not move would look like a job that runs.
    if job.state != State.WORKING:
        return f"{tracking.percent} % {desc}"
    bar = '<progress max="100" value="{0}" aria-label="{2}"></progress> {0} % {1}'
    return format_html(bar, tracking.percent, desc, gettext("Progress"))


def _link_worker(job: Job, names: Mapping[str, str]) -> SafeString | str | None:
    if not job.wid:
        return None
    name = render_worker(job.wid, names.get(job.wid, ""))
    # The row of a worker is deleted some time after its end: no link then.
    return _admin_link("workerprocess", job.wid, name) if job.wid in names else name


def _link_batch(bid: str | None, using: str) -> SafeString | str | None:
    if not bid:
        return None
    # Without the texts of its callbacks, which may be long. A finished batch is deleted after a while.
    batch = Batch.objects.using(using).filter(bid=bid).only("pk", "description", "bid").first()
    return bid if batch is None else _admin_link("batch", batch.pk, batch.description[:200] or bid)


def _link_cron_entry(job: Job, using: str) -> SafeString | str | None:
    run = CronRun.objects.using(using).filter(jid=job.jid).select_related("entry").order_by("-pk").first()
    return None if run is None else _admin_link("cronentry", run.entry.pk, run.entry.name)


def _admin_link(model: str, pk: int | str, label: str) -> SafeString:
    # <bdi> isolates bidirectional text of clients, which could otherwise reorder the page around it.
    return format_html('<a href="{}"><bdi>{}</bdi></a>', row_link(model, pk), label)


def _link_related_object(about: str | None) -> SafeString | str | None:
    """Return the related object with links to its admin page and to all its jobs."""
    if not about:
        return None
    link: SafeString | str = format_html("<bdi>{}</bdi>", about)
    # `about` may name a model that is not installed here or has no admin page.
    with suppress(FaktoryError, LookupError, NoReverseMatch, ValueError):
        label, key = split_about(about)
        meta = apps.get_model(label)._meta  # noqa: SLF001  (documented)
        address = admin_url(f"{meta.app_label}_{meta.model_name}_change", quote(key))
        link = format_html('<a href="{}"><bdi>{}</bdi></a>', address, about)
    return format_html('{} (<a href="{}">{}</a>)', link, jobs_link(about=about), gettext("all its jobs"))


def _parse_members(text: str) -> dict[str, str]:
    """Return the JSON text of each member of an object; {} for any other text."""
    # `custom` may be missing, or null.
    if not text.startswith("{"):
        return {}
    try:
        return last_members(text)
    except FaktoryError:
        return {}


def _parse_time(text: str) -> datetime | None:
    try:
        # The history of an imported job may contain any text.
        return parse_instant("at", text) if text else None
    except FaktoryError:
        return None
