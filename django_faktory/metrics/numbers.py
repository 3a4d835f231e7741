"""All that is told to those who watch, read in a handful of statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import conf
from ..measuring import Series
from ..store import batches, measures, queues, stats, workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Sizes by name, seconds, and the sums since the beginning by queue and task."""

    queues: Mapping[str, float]
    latencies: Mapping[str, float]
    paused: Mapping[str, float]
    sets: Mapping[str, float]
    workers: Mapping[str, float]
    batches: Mapping[str, float]
    processed: int
    failed: int
    late: int
    series: dict[tuple[str, str], Series] = field(default_factory=dict)


def read(*, using: str) -> Numbers:
    """Read them now. Its cost grows with the jobs that wait: see `stats.snapshot`."""
    sizes = stats.snapshot(using=using, worker_timeout_s=conf.get("WORKER_TIMEOUT"))
    names = list(sizes["queues"])
    paused = queues.paused(using=using)
    return Numbers(
        queues=sizes["queues"],
        latencies=queues.latency(names, using=using),
        paused={name: float(name in paused) for name in names},
        sets=sizes["sets"],
        workers=workers.states(using=using, timeout_s=conf.get("WORKER_TIMEOUT")),
        batches=batches.unfinished(using=using),
        processed=sizes["total_processed"],
        failed=sizes["total_failures"],
        late=sizes["total_late"],
        series=measures.ever(using=using),
    )
