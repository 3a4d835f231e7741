"""Acknowledge jobs: end them successfully. Rule: W16.

`endings` ends jobs on SQLite and MariaDB. PostgreSQL has a function of its own; the jobs of batches that it leaves
unchanged are ended by `endings` too (ADR 0011).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.logs import get_logger
from ...core.payloads import Ack, Reservation, is_storable
from ...errors import BrokerUnavailable, FaktoryError, LockTimeout
from ..dialects import dialect_of
from ..dialects.base import holds
from ..dialects.values import AckResult, Ended, EndedRun
from ..limits import limiters
from ..locks import locks
from ..transactions import run, run_each
from .endings import Ending
from .pushes import CHUNK

logger = get_logger(__name__)


OnFinished = Callable[[Collection[EndedRun]], None]
"""Callback for jobs after the end of their runs. Called inside the transaction that ended them, or after it."""


def ignore_finished(_: Collection[EndedRun]) -> None:
    """Ignore the ended jobs; the default for `on_finished`."""


def make_waiters_ready(connection: BaseDatabaseWrapper, ending: AckResult) -> None:
    """Notify the queues in which an end made jobs ready, and look after the commit at what it could not make ready."""
    locks.notify_ready(connection, set(ending.readied))
    locks.promote_waiters_later(connection, ending.blocked)
    limiters.promote_waiters_later(connection, ending.limiters)


def end(
    connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, *, pushed: Collection[str] = ()
) -> AckResult:
    """End the jobs of these acks, inside a transaction or as a dialect's single statement.

    The rows with the jids in `pushed`, which the same transaction is about to insert, are locked too.
    """
    dialect = dialect_of(connection)
    if dialect.one_statement:
        return dialect.end(connection, acks, now)
    ending = Ending(connection, now)
    ended = ending.succeed(acks, pushed=pushed)
    ending.write()
    return AckResult(ended, set())


def conclude(
    ending: AckResult, acks: Sequence[Ack], *, using: str, now: datetime | None, on_finished: OnFinished
) -> list[FaktoryError | bool]:
    """End the jobs that a dialect's statement left unchanged, and return the result of each ack.

    `ending` is already committed. If this transaction fails, only the acks of `ending.remaining` get the error as their
    result: the reporter sends these again. The other acks must not be repeated, they would count as late.
    """
    ended, refused = ending.ended, dict[str, FaktoryError]()
    if ending.remaining:
        ended = {**ended}
        try:
            _end_remaining(ending, acks, ended, refused, using=using, now=now)
        except (BrokerUnavailable, Error) as error:
            if connections[using].in_atomic_block:
                raise
            if not isinstance(error, LockTimeout):
                logger.warning("jobs of batches not acknowledged jobs=%d error=%s", len(ending.remaining), error)
            unavailable = error if isinstance(error, LockTimeout) else BrokerUnavailable("database unavailable")
            refused = {jid: refused.get(jid, unavailable) for jid in ending.remaining if jid not in ended}
    on_finished(ended.values())
    # Each jid was acknowledged once, and ended: the usual case.
    if len(ended) == len(acks):
        return [True] * len(acks)
    return [refused.get(ack.jid) or _take_effect(ack, ended) for ack in acks]


def ack(
    acks: Sequence[Ack],
    *,
    using: str,
    now: datetime | None = None,
    on_finished: OnFinished = ignore_finished,
    chunk_size: int = CHUNK,
) -> list[FaktoryError | bool]:
    """End jobs successfully: delete the row, or keep it as succeeded for its `result_ttl`.

    Return one item per ack: True if the job was ended; False if nothing changed because the sender does not hold the
    job (W16); InvalidPayload if the database refuses the result; BrokerUnavailable if this job was not ended although
    other jobs of the set were. Raise BrokerUnavailable if no job was ended.
    """

    def end_part(part: Sequence[Ack]) -> list[FaktoryError | bool]:
        return _ack_chunk(part, using=using, now=now, on_finished=on_finished)

    results: list[FaktoryError | bool] = []
    for start in range(0, len(acks), chunk_size):
        try:
            results += run_each(using, end_part, acks[start : start + chunk_size], lambda _, error: error)
        except BrokerUnavailable as error:
            # Earlier chunks are committed and their acks must not be repeated, so return the error per ack.
            if not results or connections[using].in_atomic_block:
                raise
            logger.warning("jobs not acknowledged jobs=%d error=%s", len(acks) - start, error)
            results += [error] * (len(acks) - start)
            break
    return results


def _ack_chunk(
    acks: Sequence[Ack], *, using: str, now: datetime | None, on_finished: OnFinished
) -> list[FaktoryError | bool]:
    # A jid that no database can store (such as one with a NUL character) would fail the statement of the whole set.
    storable = [ack for ack in acks if is_storable(ack.jid)]
    if not storable:
        return [False] * len(acks)
    connection = connections[using]
    dialect = dialect_of(connection)
    ending = run(
        using,
        lambda connection: end(connection, storable, now),
        atomic=not dialect.one_statement,
    )
    make_waiters_ready(connection, ending)
    results = conclude(ending, storable, using=using, now=now, on_finished=on_finished)
    if len(storable) == len(acks):
        return results
    # Put False in the places of the jids that were left out, so that results match the acks.
    storable_results = iter(results)
    return [next(storable_results) if is_storable(ack.jid) else False for ack in acks]


def ack_last(
    report: Ack, job: Reservation, *, using: str, now: datetime | None = None, on_finished: OnFinished = ignore_finished
) -> bool:
    """Acknowledge this job as the last statement of the caller's `atomic` block, which must end right after this call.

    If the dialect supports it, COMMIT is part of the same message, and Django's own commit finds no transaction
    (ADR 0007). Return False if the job was not ended. Raise TransactionManagementError if the transaction is marked for
    rollback, and ReservationLost if another attempt holds the job.
    """
    connection = connections[using]
    connection.validate_no_broken_transaction()
    # Only in the outermost block: COMMIT inside a savepoint would also commit the caller's outer transaction.
    if job.is_batchless and len(connection.atomic_blocks) == 1 and connection.commit_on_exit:
        ending = dialect_of(connection).end_last(connection, report, now)
        if ending is not None:
            make_waiters_ready(connection, ending)
            on_finished(ending.ended.values())
            return True
    return ack([report], using=using, now=now, on_finished=on_finished) == [True]


def _end_remaining(
    ending: AckResult,
    acks: Sequence[Ack],
    ended: Ended,
    refused: dict[str, FaktoryError],
    *,
    using: str,
    now: datetime | None,
) -> None:
    """End the jobs of `ending.remaining` together with their batches, locks and permits.

    Add their runs to `ended`, and the errors of acks that the database refuses to `refused`.
    """

    def verb(connection: BaseDatabaseWrapper, part: Sequence[Ack]) -> Ended:
        rest = Ending(connection, now)
        # The statement has counted all acks of a jid but one.
        part_ended = rest.succeed(part, counted=len(part) - len({ack.jid for ack in part}))
        rest.write()
        return part_ended

    def end_part(part: Sequence[Ack]) -> list[None]:
        ended.update(run(using, partial(verb, part=part)))
        return [None] * len(part)

    run_each(
        using,
        end_part,
        [ack for ack in acks if ack.jid in ending.remaining],
        lambda ack, error: refused.update({ack.jid: error}),
    )


def _take_effect(ack: Ack, ended: Ended) -> bool:
    ended_run = ended.get(ack.jid)
    if ended_run is None or not holds(ack.wid, ack.attempt, ended_run.wid, ended_run.attempt):
        return False
    del ended[ack.jid]  # a second ack of the same job finds it ended
    return True
