"""Feed starts and ends of a broker's jobs to the metrics recorder."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from django.db import transaction

from ..core.histograms import JobTiming, Recorder
from ..core.payloads import Reservation
from ..store.dialects.base import EndedRun


class MetricsHook:
    """Metrics hook of one broker; does nothing without a recorder."""

    def __init__(self, recorder: Recorder | None, alias: str) -> None:
        self._recorder, self._alias = recorder, alias

    def started(self, fetched: Iterable[Iterable[Reservation]], *, from_buffer: bool = False) -> None:
        """Record that the fetched jobs were delivered; prefetched ones start when they leave the buffer."""
        if not self._recorder:
            return
        timings = [
            JobTiming(job.queue, job.jobtype, job.waited_s)
            for jobs in fetched
            for job in jobs
            if from_buffer or not job.is_prefetched
        ]
        if timings:
            self._recorder.started(timings)

    def ended(self, jobs: Collection[EndedRun], *, succeeded: bool = True) -> None:
        """Record that these jobs ended, once the transaction commits; `succeeded` is whether they succeeded."""
        if self._recorder and jobs:
            transaction.on_commit(
                partial(self._recorder.ended, _timings_of(jobs), succeeded=succeeded), using=self._alias
            )

    def record_succeeded_now(self, jobs: Collection[EndedRun]) -> None:
        """Record that these jobs succeeded; for exchanges that committed outside Django's transactions."""
        if self._recorder and jobs:
            self._recorder.ended(_timings_of(jobs), succeeded=True)


def _timings_of(ended: Collection[EndedRun]) -> list[JobTiming]:
    return [JobTiming(job.queue, job.jobtype, job.ran_s) for job in ended]
