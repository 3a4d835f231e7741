"""Numbers of waiting jobs of queues: one reading and one text for all pages, the bar and the alarms."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from django.utils.formats import number_format
from django.utils.translation import gettext

from .. import conf
from ..store import queues
from ..store.queues import Waiting
from ..store.statistics import counts

AT_ONCE = 50
"""Queues that one statement counts."""


def read(names: Sequence[str], *, using: str) -> dict[str, Waiting]:
    """Return size and latency of each queue: from the shared snapshot if that has all jobs of queues, else counted.

    A queue that is counted has at most `queues.COUNTED` jobs of each state.
    """
    all_counts = counts.shared_bounded_counts(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    if all_counts.has_all_queues:
        return {name: all_counts.waiting.get(name, Waiting()) for name in names}
    found: dict[str, Waiting] = {}
    for start in range(0, len(names), AT_ONCE):
        found |= queues.read_waiting(names[start : start + AT_ONCE], using=using)
    return found


def describe(waiting: Waiting) -> str:
    """Return the size as text: "1,215, of them 900 held by limits or locks"; "500+" if it was cut."""
    size = format_number(waiting.size, is_more=waiting.is_more)
    if not waiting.held:
        return size
    if not waiting.ready:
        return gettext("%(size)s, all held by limits or locks") % {"size": size}
    held = format_number(waiting.held, is_more=waiting.held >= queues.COUNTED and waiting.is_more)
    return gettext("%(size)s, of them %(held)s held by limits or locks") % {"size": size, "held": held}


def format_number(number: int | str, *, is_more: bool = False) -> str:
    """Format a number in the language of the reader, "1,234" in English, with a plus sign if it is a lower bound."""
    return number_format(Decimal(number), force_grouping=True) + ("+" if is_more else "")
