"""What the measures are told of the jobs of a broker: who began, and who ended how."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from django.db import transaction

from ..measuring import Passed, Recorder
from ..payloads import Reservation
from ..store.dialects.base import Held


class Notes:
    """Those of one broker; without a recorder nobody listens."""

    def __init__(self, recorder: Recorder | None, alias: str) -> None:
        self._recorder, self._alias = recorder, alias

    def started(self, jobs: Iterable[Reservation]) -> None:
        """These were handed out."""
        if self._recorder and (found := [Passed(job.queue, job.jobtype, job.waited_s) for job in jobs]):
            self._recorder.started(found)

    def ended(self, jobs: Collection[Held], *, well: bool = True) -> None:
        """These ended, if the transaction commits."""
        if self._recorder and jobs:
            transaction.on_commit(partial(self._recorder.ended, _passed(jobs), well=well), using=self._alias)

    def ended_now(self, jobs: Collection[Held]) -> None:
        """`ended` where there is no transaction."""
        if self._recorder and jobs:
            self._recorder.ended(_passed(jobs), well=True)


def _passed(ended: Collection[Held]) -> list[Passed]:
    return [Passed(job.queue, job.jobtype, job.ran_s) for job in ended]
