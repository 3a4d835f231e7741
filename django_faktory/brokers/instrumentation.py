"""Feed starts and ends of a broker's jobs to the metrics recorder."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from django.db import transaction

from ..core.histograms import Passed, Recorder
from ..core.payloads import Reservation
from ..store.dialects.base import Held


class Notes:
    """Metrics hook of one broker; does nothing without a recorder."""

    def __init__(self, recorder: Recorder | None, alias: str) -> None:
        self._recorder, self._alias = recorder, alias

    def started(self, jobs: Iterable[Reservation]) -> None:
        """Record that these jobs were handed out."""
        if self._recorder and (found := [Passed(job.queue, job.jobtype, job.waited_s) for job in jobs]):
            self._recorder.started(found)

    def ended(self, jobs: Collection[Held], *, well: bool = True) -> None:
        """Record that these jobs ended, once the transaction commits; `well` is whether they succeeded."""
        if self._recorder and jobs:
            transaction.on_commit(partial(self._recorder.ended, _passed(jobs), well=well), using=self._alias)

    def ended_now(self, jobs: Collection[Held]) -> None:
        """Record that these jobs succeeded; for exchanges outside of Django's transactions, which have committed."""
        if self._recorder and jobs:
            self._recorder.ended(_passed(jobs), well=True)


def _passed(ended: Collection[Held]) -> list[Passed]:
    return [Passed(job.queue, job.jobtype, job.ran_s) for job in ended]
