"""Show alarms on the overview: a link to the page that explains each, and the button that ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from django.utils.translation import gettext

from ...operations import alarms
from ...operations.alarms import Alarm
from ..formats import format_age
from ..links import jobs_link, page_url, row_link


class Button(NamedTuple):
    """A form that ends an alarm, or keeps it from getting worse, and returns to the overview."""

    label: str
    url: str
    fields: tuple[tuple[str, str], ...]


class AlarmLine(NamedTuple):
    """An alarm with its age, link and buttons."""

    alarm: Alarm
    age: str
    """How long it has lasted; "" if that is unknown."""
    link: str
    buttons: tuple[Button, ...]


def read_alarm_lines(may: Callable[[str], bool], *, using: str) -> list[AlarmLine]:
    """Return the present alarms, critical ones first. `may` returns whether the user has a permission, `resource.verb`.

    Without it an alarm has no button, and names no row that the user may not view.
    """
    return [
        AlarmLine(
            alarm,
            format_age(alarm.since) if alarm.since else "",
            _LINKS[alarm.kind](alarm.subject),
            tuple(_build_buttons(alarm, may)),
        )
        for alarm in alarms.hide_names(alarms.read(using=using), lambda resource: may(f"{resource}.view"))
    ]


def _build_buttons(alarm: Alarm, may: Callable[[str], bool]) -> Iterator[Button]:
    back = ("back", page_url("overview_changelist"))
    if not alarm.subject:
        return
    if alarm.kind == "paused-queue" and may("queue.resume"):
        fields = (("action", "resume"), ("_selected_action", alarm.subject), back)
        yield Button(gettext("Resume queue"), _list_url("queue"), fields)
    elif alarm.kind == "paused-task" and may("limit.resume"):
        yield Button(
            gettext("Resume task"), page_url("task_pause"), (("task", alarm.subject), ("verb", "resume"), back)
        )
    elif alarm.kind == "failing-task" and may("limit.pause"):
        yield Button(gettext("Pause task"), page_url("task_pause"), (("task", alarm.subject), ("verb", "pause"), back))


def _list_url(model: str, **filters: str) -> str:
    return page_url(f"{model}_changelist", **filters)


def _page_url(model: str, key: str) -> str:
    return row_link(model, key) if key else _list_url(model)


def _task_page(task: str) -> str:
    return page_url("task", task=task) if task else page_url("tasks")


_LINKS: dict[str, Callable[[str], str]] = {
    "no-workers": lambda _: _list_url("workerprocess"),
    "lost-worker": lambda _: f"{_list_url('workerprocess')}#faktory-lost",
    "silent-worker": lambda wid: _page_url("workerprocess", wid),
    "unserved-queue": lambda name: _page_url("queue", name),
    "late-queue": lambda name: _page_url("queue", name),
    "paused-queue": lambda name: _page_url("queue", name),
    "paused-task": _task_page,
    "failing-task": _task_page,
    "unknown-task": lambda task: jobs_link(q=f'task:"{task}"') if task else jobs_link(),
    "overdue-jobs": lambda _: jobs_link(state="scheduled"),
    "stuck-batch": lambda bid: _list_url("batch", q=bid) if bid else _list_url("batch", stage="failing"),
    "cron-never-runs": lambda _: _list_url("cronentry", state="never runs"),
    "cron-overdue": lambda _: _list_url("cronentry"),
    "outbox-refused": lambda _: _list_url("outboxentry", error__isempty="0"),
    "slow-database": lambda _: _list_url("workerprocess"),
}
"""The page that explains an alarm, from its kind and its subject."""
