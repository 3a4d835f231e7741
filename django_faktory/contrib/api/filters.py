"""Filters of the list endpoints.

The filters of jobs are words of the query language, with the same meaning.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import django_filters
from django.db.models import QuerySet
from django_filters.rest_framework import FilterSet
from msgspec.structs import replace

from ...core.queries import MAX_TEXT, Query
from ...errors import InvalidQuery
from ...models import Batch, CronEntry, Job, WorkerProcess
from ...operations import searches
from ...store.batches import tree
from ...tasks.redaction import query_of

# Each name is also a key of the query language, see docs/queries.md.
_FIELDS = {
    "state": "states",
    "queue": "queues",
    "task": "tasks",
    "error": "errors",
    "about": "about",
    "batch": "batches",
    "older": "older",
    "newer": "newer",
    "failed_after": "failed_after",
    "failed_before": "failed_before",
}
"""Query parameters, each with the field of `Query` that it may set."""


def _word(help_text: str) -> django_filters.CharFilter:
    # django-filter needs a method per filter; `JobFilter.filter_queryset` does the work for all of them.
    return django_filters.CharFilter(help_text=help_text, max_length=MAX_TEXT, method="word")


class JobFilter(FilterSet):
    """Filter jobs by a query, by single words of it, or both; all conditions must match."""

    # Plain texts without choices: `core.queries` checks the words and names the position of an error.
    query = _word("A query, such as `dead queue:mail error:Timeout older:2d`, or words of arguments and messages.")
    state = _word("In this state, or in one of several: `dead,retries`.")
    queue = _word("In this queue; `mail.*` matches a prefix, commas separate several queues.")
    task = _word("Of the task with this jobtype; same syntax as queue.")
    error = _word("With a latest failure of this type: its full path, its last part, or a prefix with a star.")
    about = _word("About this object, `app.model/pk`.")
    batch = _word("Members of this batch.")
    older = _word("Pushed longer ago than this, `90s`, `15m`, `2h`, `7d`, `2w`, or before a time, `2026-11-27T14:00`.")
    newer = _word("Pushed within this time, or since a time; same syntax as older.")
    failed_after = _word("With a latest failure since this time; same syntax as older.")
    failed_before = _word("With a latest failure before this time; same syntax as older.")

    def word(self, rows: QuerySet[Job], _: str, __: str) -> QuerySet[Job]:
        """Return the rows unchanged: `filter_queryset` applies all words together."""
        return rows

    def filter_queryset(self, queryset: Any) -> Any:
        """Return the jobs that match all parameters. Raises InvalidQuery with the parameter's name."""
        query = build_query(self.form.cleaned_data, using=queryset.db)
        self.request.faktory_query = query  # for the page, which says how far the list looked
        return queryset.shown(query).order_by(*query.order)


def build_query(values: dict[str, Any], *, using: str) -> Query:
    """Combine all parameters into one query. Raises InvalidQuery if `query` and a parameter set the same field."""
    query = _parse("query", values.get("query") or "", using=using)
    for parameter, field in _FIELDS.items():
        if not values.get(parameter):
            continue
        parsed = _parse(parameter, values[parameter], using=using)
        # It would not be obvious how two values combine: both, either, or the last one.
        if getattr(query, field) not in ((), None):
            raise _invalid_query(parameter, f"{parameter}: also in query; give it once")
        query = replace(query, **{field: getattr(parsed, field)})
    return query


def _parse(parameter: str, text: str, *, using: str) -> Query:
    prefix = "" if parameter == "query" else f"{parameter}:"
    try:
        query = query_of(prefix + text) if prefix else searches.parse_search(text, using=using)
    except InvalidQuery as error:
        # The position refers to the client's value, without the prefix added above.
        at = None if error.at is None else max(0, error.at - len(prefix))
        raise _invalid_query(parameter, str(error), at) from error
    field = _FIELDS.get(parameter)
    # `state=dead queue:mail` would add a second condition through one parameter; accept only the parameter's own field.
    if field and query != Query(**{field: getattr(query, field)}):
        raise _invalid_query(
            parameter, f"{parameter}: expected values with commas between them; other words go into query"
        )
    return query


def _invalid_query(parameter: str, message: str, at: int | None = None) -> InvalidQuery:
    error = InvalidQuery(message)
    error.at, error.field = at, parameter
    return error


_Text, _Choice = partial(django_filters.CharFilter, max_length=255), django_filters.ChoiceFilter


class QueueFilterSet(FilterSet):
    """Filter queues by the start of the name and by pause."""

    name = _Text(lookup_expr="startswith", help_text="With a name that begins with this.")
    is_paused = django_filters.BooleanFilter(
        "paused_at", "isnull", exclude=True, help_text="Only paused queues, or only queues that are not."
    )


class WorkerFilter(FilterSet):
    """Filter worker processes by state and host."""

    state = _Choice(choices=WorkerProcess.Phase.choices, help_text="In this state.")
    hostname = _Text(help_text="On this machine.")


class BatchFilter(FilterSet):
    """Filter batches by stage and parent, both served by an index."""

    stage = _Choice(
        choices=[(name, name) for name in tree.STAGES],
        method="by_stage",
        help_text="Not committed, running, with failed members here or in a nested batch, unable to succeed, or ended.",
    )
    parent = _Text("parent_bid", help_text="Children of this batch.")

    def by_stage(self, rows: QuerySet[Batch], _: str, stage: str) -> QuerySet[Batch]:
        return tree.in_stage(rows, stage)


class CronFilter(FilterSet):
    """Filter cron entries by origin and jobtype."""

    origin = django_filters.ChoiceFilter(
        choices=CronEntry.EntryOrigin.choices, help_text="Defined in code or in the admin."
    )
    jobtype = _Text(help_text="Entries that enqueue this jobtype.")


class LimitFilter(FilterSet):
    """Filter limits by scope and exact name."""

    scope = _Text(max_length=10, help_text="queue, task or key.")
    name = _Text(help_text="With exactly this name.")


class LockFilter(FilterSet):
    """Filter locks by exact key and by worker."""

    key = _Text(help_text="With exactly this key.")
    worker = _Text("wid", help_text="Held by jobs of this worker process.")
