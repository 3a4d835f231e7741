"""Numbers of waiting jobs of queues: one reading and one text for all pages, the bar and the alarms."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from django.utils.formats import number_format
from django.utils.translation import gettext

from ..core.lifecycle import State
from ..store import queues
from ..store.queues import Waiting
from ..store.statistics import counts


def read(names: Sequence[str], *, using: str, all_counts: counts.AllCounts | None = None) -> dict[str, Waiting]:
    """Return size and latency of each queue. Sizes are those of `all_counts`, or are read now."""
    all_counts = all_counts or counts.read(using=using)
    # An empty queue has no oldest job.
    ages = queues.read_ages([name for name in names if all_counts.queues.get(name)], using=using)
    return {name: _read_one(all_counts, name, *ages.get(name, (0.0, 0.0))) for name in names}


def _read_one(all_counts: counts.AllCounts, name: str, ready_s: float, held_s: float) -> Waiting:
    ready, held = all_counts.in_queue(name, State.ENQUEUED), all_counts.in_queue(name, State.BLOCKED)
    return Waiting(ready, held, max(ready_s, held_s), ready_s)


def describe(waiting: Waiting) -> str:
    """Return the size as text: "1,215, of them 900 held by limits or locks"."""
    size = format_number(waiting.size)
    if not waiting.held:
        return size
    if not waiting.ready:
        return gettext("%(size)s, all held by limits or locks") % {"size": size}
    return gettext("%(size)s, of them %(held)s held by limits or locks") % {
        "size": size,
        "held": format_number(waiting.held),
    }


def format_number(number: int | str, *, is_more: bool = False) -> str:
    """Format a number in the language of the reader, "1,234" in English, with a plus sign if it is a lower bound."""
    return number_format(Decimal(number), force_grouping=True) + ("+" if is_more else "")
