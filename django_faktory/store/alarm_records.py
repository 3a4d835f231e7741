"""Record lost workers, the present alarms, and when messages about them were sent.

Every node calls `claim_message`; the row locks let one node send the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..models import AlarmRecord, Job, WorkerProcess
from .dialects import clock_of
from .transactions import run

LOST_WORKER = "lost-worker"
LOST_SHOWN_S = 3600.0
"""Seconds for which the loss of a worker is reported."""
MAX_LOST = 100
"""Number of records of lost workers that one read returns."""

MAX_JOBS = 50
"""Jobs of a lost worker that its record names."""

LATEST_MESSAGE = "latest-message"
"""Kind of the record whose `notified_at` is the time of the latest message."""

Key = tuple[str, str]
"""Kind and subject of an alarm."""


class Message(NamedTuple):
    """Content of the next message."""

    due: dict[Key, datetime | None]
    """Alarms to report now, with the time of the previous message about each."""
    ended: list[AlarmRecord]
    """Records of the alarms that were reported, and have ended; claimed with the message, so no longer stored."""
    previous_at: datetime | None
    """Time of the previous message about any alarm."""

    @property
    def resolved(self) -> list[str]:
        """The texts of the alarms that were reported, and have ended."""
        return [record.text for record in self.ended]


def record_lost(workers: Sequence[WorkerProcess], held: Sequence[Job], *, using: str) -> None:
    """Record that these workers were lost, with the jobs that they held. Safe to repeat."""
    records: list[AlarmRecord] = []
    for worker in workers:
        jobs = [[job.jid, job.jobtype, job.queue] for job in held if job.wid == worker.wid]
        records.append(
            AlarmRecord(
                kind=LOST_WORKER,
                subject=worker.wid,
                text=worker.name,
                jobs=jobs[:MAX_JOBS],
                affected=len(jobs),
            )
        )
    if records:
        run(
            using,
            lambda _: AlarmRecord.objects.using(using).bulk_create(records, ignore_conflicts=True),
            atomic=False,
            writes=True,
        )


def read_lost(*, using: str, since: datetime) -> list[AlarmRecord]:
    """Return the latest lost workers, at most `MAX_LOST`."""
    lost = AlarmRecord.objects.using(using).filter(kind=LOST_WORKER, began_at__gt=since).order_by("-began_at")
    return run(using, lambda _: list(lost[:MAX_LOST]), atomic=False)


def purge_lost(*, using: str) -> int:
    """Delete the records of lost workers that are no longer shown; return how many."""
    outdated = AlarmRecord.objects.using(using).filter(
        kind=LOST_WORKER, began_at__lt=Now() - timedelta(seconds=2 * LOST_SHOWN_S)
    )
    return run(using, lambda _: outdated.delete()[0], atomic=False, writes=True)


def claim_message(
    texts: Mapping[Key, str], *, using: str, confirm_s: float, repeat_s: float, pause_s: float
) -> Message | None:
    """Record the present alarms, and return what to report now; None if there is nothing or another node reports it.

    `texts` are all present alarms. An alarm is due if it lasts for `confirm_s`, and again `repeat_s` after the previous
    message about it. Between two messages `pause_s` must pass.
    """

    def verb(connection: BaseDatabaseWrapper) -> Message | None:
        rows = AlarmRecord.objects.using(using)
        now = clock_of(connection)
        # In the order of the unique key, so that two nodes wait for each other instead of deadlocking.
        expected = sorted([(LATEST_MESSAGE, ""), *texts])
        rows.bulk_create(
            [AlarmRecord(kind=kind, subject=subject, began_at=now) for kind, subject in expected], ignore_conflicts=True
        )
        locked = rows.order_by("kind", "subject").select_for_update()
        record_by_key = {(record.kind, record.subject): record for record in locked}
        latest = record_by_key.pop((LATEST_MESSAGE, ""))
        ended = [record for key, record in record_by_key.items() if key not in texts and record.kind != LOST_WORKER]
        due = [
            key
            for key, record in record_by_key.items()
            if key in texts and _is_due(record, now, confirm_s=confirm_s, repeat_s=repeat_s)
        ]
        reported = [record for record in ended if record.notified_at is not None]
        # Before the pause is checked: an alarm that begins again must last for `confirm_s` again.
        rows.filter(pk__in=[record.pk for record in ended if record.notified_at is None]).delete()
        if latest.notified_at is not None and now - latest.notified_at < timedelta(seconds=pause_s):
            return None
        if not due and not reported:
            return None
        rows.filter(pk__in=[record.pk for record in reported]).delete()
        for key in due:
            record = record_by_key[key]
            # The text of a lost worker is its name, from which `operations.alarms` makes a sentence.
            text = record.text if record.kind == LOST_WORKER else texts[key]
            rows.filter(pk=record.pk).update(notified_at=now, text=text)
        rows.filter(pk=latest.pk).update(notified_at=now)
        return Message({key: record_by_key[key].notified_at for key in due}, reported, latest.notified_at)

    return run(using, verb)


def _is_due(record: AlarmRecord, now: datetime, *, confirm_s: float, repeat_s: float) -> bool:
    if record.notified_at is None:
        return now - record.began_at >= timedelta(seconds=confirm_s)
    return now - record.notified_at >= timedelta(seconds=repeat_s)


def forget_message(message: Message, *, using: str) -> None:
    """Restore the records as they were before this message was claimed, because it could not be sent."""
    rows = AlarmRecord.objects.using(using)

    def verb(_: BaseDatabaseWrapper) -> None:
        for (kind, subject), previous_at in sorted(message.due.items()):
            rows.filter(kind=kind, subject=subject).update(notified_at=previous_at)
        for record in message.ended:
            record.pk = None
        # An alarm that has begun again meanwhile has a record already.
        rows.bulk_create(message.ended, ignore_conflicts=True)
        rows.filter(kind=LATEST_MESSAGE).update(notified_at=message.previous_at)

    run(using, verb)
