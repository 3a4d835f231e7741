"""Record lost workers, the present alarms, and when messages about them were sent in each way.

Every node calls `claim_message`; the claim lets one node send the message. A claim that is not settled lapses: the node
may have been killed, and another one sends the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now

from ..core.payloads import in_ascii
from ..errors import InvalidPayload
from ..models import AlarmRecord, Job, WorkerProcess
from .dialects import clock_of
from .transactions import read, run

LOST_WORKER = "lost-worker"
LOST_SHOWN_S = 3600.0
"""Seconds for which the loss of a worker is reported."""
MAX_LOST = 100
"""Number of records of lost workers that one read returns."""

FAILED_EXPORT = "failed-export"

MAX_JOBS = 50
"""Jobs of a lost worker that its record names."""

LATEST_MESSAGE = "latest-message"
"""Kind of the record of a way: its `notified_at` is the time of the latest message, `claimed_until` the claim."""

CLAIM_S = 60.0
"""Seconds after which a claim lapses."""

Key = tuple[str, str]
"""Kind and subject of an alarm."""


class Message(NamedTuple):
    """Content of the next message in one way."""

    way: str
    due: list[Key]
    """Alarms to report now."""
    ended: dict[int, str]
    """The texts of the alarms that were reported and have ended, by the id of their records."""


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
    lost = AlarmRecord.objects.using(using).filter(kind=LOST_WORKER, way="", began_at__gt=since).order_by("-began_at")
    return read(lost[:MAX_LOST])


def purge_lost(*, using: str) -> int:
    """Delete the records of lost workers that are no longer shown; return how many."""
    outdated = AlarmRecord.objects.using(using).filter(
        kind=LOST_WORKER, way="", began_at__lt=Now() - timedelta(seconds=2 * LOST_SHOWN_S)
    )
    return run(using, lambda _: outdated.delete()[0], atomic=False, writes=True)


def record_failed_export(*, using: str) -> None:
    """Record that the export of ended jobs fails. Safe to repeat."""
    record = AlarmRecord(kind=FAILED_EXPORT)
    records = AlarmRecord.objects.using(using)
    run(using, lambda _: records.bulk_create([record], ignore_conflicts=True), atomic=False, writes=True)


def forget_failed_export(*, using: str) -> None:
    """Record that the export works again."""
    failed = AlarmRecord.objects.using(using).filter(kind=FAILED_EXPORT, way="")
    run(using, lambda _: failed.delete(), atomic=False, writes=True)


def read_failed_export(*, using: str) -> datetime | None:
    """Return since when the export of ended jobs fails; None if it does not."""
    failed = AlarmRecord.objects.using(using).filter(kind=FAILED_EXPORT, way="")
    return next(iter(read(failed.values_list("began_at", flat=True))), None)


def claim_message(
    texts: Mapping[Key, str], way: str, *, using: str, confirm_s: float, repeat_s: float, pause_s: float
) -> Message | None:
    """Record the present alarms, and claim what to report now in this way; None if there is nothing to report, or if
    another node is sending it. Call `settle_message` when it was sent, or could not be sent.

    `texts` are all present alarms. An alarm is due if it lasts for `confirm_s`, and again `repeat_s` after the previous
    message about it. Between two messages `pause_s` must pass.
    """

    def verb(connection: BaseDatabaseWrapper) -> Message | None:
        rows = AlarmRecord.objects.using(using).filter(way=way)
        now = clock_of(connection)
        # In the order of the unique key, so that two nodes wait for each other instead of deadlocking.
        expected = sorted([(LATEST_MESSAGE, ""), *texts])
        rows.bulk_create(
            [AlarmRecord(kind=kind, subject=subject, way=way, began_at=now) for kind, subject in expected],
            ignore_conflicts=True,
        )
        locked = rows.order_by("kind", "subject").select_for_update()
        record_by_key = {(record.kind, record.subject): record for record in locked}
        latest = record_by_key.pop((LATEST_MESSAGE, ""))
        ended = [record for key, record in record_by_key.items() if key not in texts]
        due = [
            key
            for key, record in record_by_key.items()
            if key in texts and _is_due(record, now, confirm_s=confirm_s, repeat_s=repeat_s)
        ]
        # The loss of a worker has no end. Before the pause is checked: an alarm that begins again must last again.
        unreported = [record.pk for record in ended if record.notified_at is None or record.kind == LOST_WORKER]
        rows.filter(pk__in=unreported).delete()
        reported = {record.pk: record.text for record in ended if record.pk not in unreported}
        is_paused = latest.notified_at is not None and now - latest.notified_at < timedelta(seconds=pause_s)
        is_claimed = latest.claimed_until is not None and now < latest.claimed_until
        if is_paused or is_claimed or not (due or reported):
            return None
        rows.filter(pk=latest.pk).update(claimed_until=now + timedelta(seconds=CLAIM_S))
        return Message(way, due, reported)

    return run(using, verb)


def _is_due(record: AlarmRecord, now: datetime, *, confirm_s: float, repeat_s: float) -> bool:
    if record.notified_at is None:
        return now - record.began_at >= timedelta(seconds=confirm_s)
    return now - record.notified_at >= timedelta(seconds=repeat_s)


def settle_message(message: Message, texts: Mapping[Key, str], *, using: str, is_sent: bool) -> None:
    """End the claim of a message. If it was sent, record this; otherwise the next look claims it again."""

    def verb(connection: BaseDatabaseWrapper, texts: Mapping[Key, str] = texts) -> None:
        rows = AlarmRecord.objects.using(using).filter(way=message.way)
        if is_sent:
            now = clock_of(connection)
            for kind, subject in sorted(message.due):
                rows.filter(kind=kind, subject=subject).update(notified_at=now, text=texts[kind, subject])
            rows.filter(pk__in=message.ended).delete()
            rows.filter(kind=LATEST_MESSAGE).update(notified_at=now)
        rows.filter(kind=LATEST_MESSAGE).update(claimed_until=None)

    try:
        run(using, verb)
    except InvalidPayload:  # a text that the encoding of the database lacks
        run(using, partial(verb, texts={key: in_ascii(text) for key, text in texts.items()}))
