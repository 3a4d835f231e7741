"""Read the figures that Prometheus and statsd export (`read`). Callers in one process share the queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from .. import conf
from ..core.histograms import OTHER, Series
from ..store.queues import Waiting
from ..store.shared_reads import shared
from ..store.statistics import counts as numbers
from ..store.statistics import histograms
from ..store.statistics.counts import AllCounts
from . import alarms, queue_sizes

MAX_EXPORTED = 200
"""Maximum number of queues, and of pairs of queue and task, with series of their own. Clients choose their names, so
their number is unbounded.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedStatistics:
    """The exported figures: sizes by name, latencies in seconds, sums since the beginning by queue and task."""

    queues: Mapping[str, float]
    """Sizes of at most `MAX_EXPORTED` queues. All further queues are combined in `OTHER`: the sum of their sizes,
    their longest latency, and how many of them are paused.
    """
    latencies: Mapping[str, float]
    """Seconds that the first job of each queue has waited."""
    paused: Mapping[str, float]
    """1 for each paused queue, else 0."""
    sets: Mapping[str, float]
    workers: Mapping[str, float]
    batches: Mapping[str, float]
    processed: int
    failed: int
    late: int
    """Reports that came too late to change anything."""
    alarms: Mapping[str, float] = field(default_factory=dict)
    """Number of alarms by kind, 0 for kinds without one."""
    series: dict[tuple[str, str], Series] = field(default_factory=dict)


def read(*, using: str, limit: int = MAX_EXPORTED) -> ExportedStatistics:
    """Return the figures. Sizes are of now; alarms, latencies and timings may be one second old, or ten times the
    duration of their query if that is more.
    """
    counts = numbers.read(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    waiting = shared(_read_waiting, partial(_read_waiting, counts, using), using=using)
    series = shared(
        (histograms.read_totals, limit), partial(histograms.read_totals, using=using, limit=limit), using=using
    )
    alarm_counts = dict.fromkeys(sorted(alarms.KINDS), 0.0)
    for alarm in alarms.read(using=using):
        alarm_counts[alarm.kind] += 1
    queues, latencies, paused = _select(counts, waiting, limit)
    return ExportedStatistics(
        queues=queues,
        latencies=latencies,
        paused=paused,
        sets=counts.sets,
        workers=counts.workers,
        batches=numbers.count_batches(using=using),
        processed=counts.totals["processed"],
        failed=counts.totals["failed"],
        late=counts.totals["late"],
        alarms=alarm_counts,
        series=series,
    )


def _read_waiting(counts: AllCounts, using: str) -> dict[str, Waiting]:
    return queue_sizes.read([name for name, size in counts.queues.items() if size], using=using, all_counts=counts)


def _select(
    counts: AllCounts, waiting: Mapping[str, Waiting], limit: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return size, latency and pause of the exported queues."""
    sizes = counts.queues
    latencies = {name: found.latency_s for name, found in waiting.items() if sizes.get(name)}
    if len(sizes) <= limit:
        names = list(sizes)
    else:  # both halves matter: a long queue, and a short one where jobs wait long
        by_size = sorted(sizes, key=sizes.__getitem__, reverse=True)  # stable: equal sizes remain in the order of names
        by_age = sorted(latencies, key=lambda name: (-latencies[name], name))
        # The halves may overlap; the largest queues fill the places that remain.
        names = list(dict.fromkeys([*by_size[: limit // 2], *by_age[: limit // 2], *by_size]))[:limit]
    exported = {name: float(sizes[name]) for name in names}
    ages = {name: latencies.get(name, 0.0) for name in names}
    paused = {name: float(name in counts.paused) for name in names}
    if others := sizes.keys() - exported:
        exported[OTHER] = sum(sizes[name] for name in others)
        ages[OTHER] = max((latencies.get(name, 0.0) for name in others), default=0.0)
        paused[OTHER] = len(counts.paused - set(names))
    return exported, ages, paused
