"""The numbers that Prometheus and statsd get: two statements, shared by the callers of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from .. import conf
from ..measuring import OTHER, Series
from ..store import measures, stats
from ..store.shared import may_share, shared

MOST_EXPORTED = 200
"""Queues, and pairs of queue and task, that have series of their own: clients choose the names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Sizes by name, seconds, and the sums since the beginning by queue and task."""

    queues: Mapping[str, float]
    """At most `MOST_EXPORTED` queues, and `OTHER`: the sum of the others' sizes, their longest latency, how many of
    them are paused."""
    latencies: Mapping[str, float]
    paused: Mapping[str, float]
    sets: Mapping[str, float]
    workers: Mapping[str, float]
    batches: Mapping[str, float]
    processed: int
    failed: int
    late: int
    series: dict[tuple[str, str], Series] = field(default_factory=dict)


def read(*, using: str, most: int = MOST_EXPORTED) -> Numbers:
    """Return the numbers, at most a second old, or ten times as old as reading them takes."""
    counts = stats.shared_counts(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    read_series = partial(measures.ever, using=using, most=most)
    series = shared((measures.ever, using, most), read_series) if may_share(using) else read_series()
    return _exported(counts, series, most)


def _exported(counts: stats.AllCounts, series: dict[tuple[str, str], Series], most: int) -> Numbers:
    latencies = counts.latencies
    if len(counts.queues) <= most:
        chosen, others = list(counts.queues), []
    else:  # the largest, and those that wait longest
        by_size = sorted(counts.queues, key=lambda name: (-counts.queues[name], name))
        by_age = sorted(counts.queues, key=lambda name: (-latencies.get(name, 0.0), name))
        chosen = list(dict.fromkeys([*by_size[: most // 2], *by_age[: most // 2], *by_size]))[:most]
        others = list(set(counts.queues).difference(chosen))
    numbers = Numbers(
        queues={name: counts.queues[name] for name in chosen},
        latencies={name: latencies.get(name, 0.0) for name in chosen},
        paused={name: float(name in counts.paused) for name in chosen},
        sets=counts.sets,
        workers=counts.workers,
        batches=counts.batches,
        processed=counts.totals["processed"],
        failed=counts.totals["failed"],
        late=counts.totals["late"],
        series=series,
    )
    if not others:
        return numbers
    return replace(
        numbers,
        queues={**numbers.queues, OTHER: sum(counts.queues[name] for name in others)},
        latencies={**numbers.latencies, OTHER: max(latencies.get(name, 0.0) for name in others)},
        paused={**numbers.paused, OTHER: float(len(counts.paused.intersection(others)))},
    )
