"""Format numbers, durations, ages, times and errors for the admin pages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from ..core.lifecycle import State
from ..errors import TranslatableError
from ..operations.queue_sizes import format_number as format_number  # noqa: PLC0414  (pages import it from here)

DETAIL_SHOWN = 120
"""Characters of arguments and messages that a list shows."""

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise

    from ..models import Job

    StrOrPromise = _StrOrPromise
else:
    StrOrPromise = object
"""A text, or a translation that is made when it is shown. Known to type checkers only."""


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    remaining = round(seconds)
    counts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining = divmod(remaining, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in counts[:2] if count) or "0 s"


def format_latency(seconds: float | None) -> str:
    """Format a duration to two digits below ten seconds: "12 ms", "1.5 s"; "–" for None."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{format_number(f'{seconds * 1000:.{0 if seconds >= 0.001 else 1}f}')} ms"
    # From 9.95 s on, two digits would round to 10 s.
    return f"{format_number(f'{seconds:.2g}')} s" if seconds < 9.95 else format_duration(seconds)


def error_text(error: Exception) -> str:
    """Return the message in the language of the reader, if it is one of this package."""
    if not isinstance(error, TranslatableError):
        return str(error)
    values = {
        name: error_text(value) if isinstance(value, Exception) else value for name, value in error.values.items()
    }
    text = gettext(error.template)
    return text % values if values else text


def format_age(moment: datetime) -> str:
    # The clock of the database may be ahead of this one.
    return format_duration(max(0.0, (timezone.now() - moment).total_seconds()))


def render_time(moment: datetime | None) -> SafeString | str:
    """Return the time with its zone; the script of the pages adds how long ago it was. "–" for None."""
    if moment is None:
        return "–"
    local = timezone.localtime(moment)
    # As the templates' `date:"Y-m-d H:i:s T"`.
    text = date_format(local, "Y-m-d H:i:s T", use_l10n=False)
    return format_html('<time class="faktory-together" datetime="{}">{}</time>', local.isoformat(), text)


def render_with_detail(text: str, detail: str) -> SafeString | str:
    """Return a text of a list, with a second line that is shortened to `DETAIL_SHOWN` characters."""
    if not detail:
        return text
    shown = detail if len(detail) <= DETAIL_SHOWN else f"{detail[: DETAIL_SHOWN - 1]}…"
    return format_html('{}<br><bdi class="faktory-quiet">{}</bdi>', text, shown)


def event_time_of(job: Job) -> datetime | None:
    """Return the time that says most about a job's state: its end, its next or latest start, or its enqueue time."""
    started_at = job.started_at if job.state == State.WORKING else None
    return job.finished_at or job.due_at or started_at or job.enqueued_at


def render_worker(wid: str, name: str) -> SafeString:
    """Return the name of a worker, `host:pid`, with its wid as a tooltip."""
    return format_html('<span title="{}"><bdi>{}</bdi></span>', wid, name or wid)


def column(read: Callable[[Any], Any], description: StrOrPromise, ordering: Any = None) -> Callable[[Any, Any], Any]:
    """Return a method that shows this value of a row, for the columns and fields of an admin."""

    @admin.display(description=description, ordering=ordering)
    def show(_: Any, row: Any) -> Any:
        return read(row)

    return show


def time_column(field: str, description: StrOrPromise) -> Callable[[Any, Any], Any]:
    """Return a method that shows this time of a row."""
    return column(lambda row: render_time(getattr(row, field)), description, field)
