"""Render the statistics in Prometheus' text format with its own client library (`exposition`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ... import __version__
from ...core.extras import explain_missing
from ...core.histograms import BOUNDS_S
from ...operations.statistics import ExportedStatistics

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(explain_missing(__name__, "prometheus-client", "metrics")) from error

CONTENT_TYPE = CONTENT_TYPE_LATEST
# The names of queues and tasks are the clients'; `operations.statistics` bounds their number.
_BY_TASK = ("queue", "task")


def exposition(statistics: ExportedStatistics) -> bytes:
    """Return the page that Prometheus scrapes."""
    # A registry for each page: the default one would add metrics of this process only.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Statistics(statistics))
    return generate_latest(registry)


class _Statistics(Collector):
    def __init__(self, statistics: ExportedStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, in the order of the reference page."""
        yield InfoMetricFamily("django_faktory", "The running version.", value={"version": __version__})
        yield from self._sizes()
        yield from self._by_task()

    def _sizes(self) -> Iterator[Metric]:
        exported = self._statistics
        yield _gauge("django_faktory_queue_size", "Enqueued jobs.", "queue", exported.queues)
        yield _gauge(
            "django_faktory_queue_latency_seconds", "How long its first job has waited.", "queue", exported.latencies
        )
        yield _gauge("django_faktory_queue_paused", "1: no worker gets its jobs.", "queue", exported.paused)
        yield _gauge("django_faktory_jobs", "Jobs in each state that waits for something.", "state", exported.sets)
        yield _gauge("django_faktory_workers", "Live worker processes, by state.", "state", exported.workers)
        yield _gauge("django_faktory_batches", "Unfinished batches, by state.", "state", exported.batches)
        yield _gauge("django_faktory_alarms", "Conditions that need attention.", "kind", exported.alarms)
        for name, text, value in (
            ("processed", "Finished attempts, successes and failures.", exported.processed),
            ("failed", "Failures; a job may have several.", exported.failed),
            ("late", "Reports that came too late to change anything.", exported.late),
        ):
            yield CounterMetricFamily(f"django_faktory_{name}", text, value=value)

    def _by_task(self) -> Iterator[Metric]:
        started = CounterMetricFamily("django_faktory_started", "Jobs delivered to workers.", labels=_BY_TASK)
        ended = CounterMetricFamily(
            "django_faktory_ended", "Jobs reported by their workers.", labels=(*_BY_TASK, "outcome")
        )
        waits = HistogramMetricFamily(
            "django_faktory_wait_seconds", "Time from enqueue to delivery to a worker.", labels=_BY_TASK
        )
        runs = HistogramMetricFamily(
            "django_faktory_run_seconds", "Time from delivery to a worker to its report.", labels=_BY_TASK
        )
        for names, sums in self._statistics.series.items():
            started.add_metric(names, sums.started)
            ended.add_metric((*names, "succeeded"), sums.succeeded)
            ended.add_metric((*names, "failed"), sums.failed)
            waits.add_metric(names, _buckets(sums.waits), sums.waited_s)
            runs.add_metric(names, _buckets(sums.runs), sums.ran_s)
        # The text format requires that all series of a family are adjacent.
        yield from (started, ended, waits, runs)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    # Sorted, so that two scrapes differ in their values only.
    for label_value in sorted(values):
        family.add_metric((label_value,), values[label_value])
    return family


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets: in Prometheus each one includes the counts of all smaller ones."""
    ends = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    return list(zip(ends, map(float, accumulate(counts)), strict=True))
