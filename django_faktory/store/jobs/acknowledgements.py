"""Acknowledge jobs: end them successfully. Rule: W16.

`endings` ends jobs on SQLite and MariaDB. PostgreSQL has a function of its own; the jobs of batches that it leaves
unchanged are ended by `endings` too (ADR 0011).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from ...core.logs import get_logger
from ...core.payloads import Ack, Reservation, failure, is_storable
from ...errors import BrokerUnavailable, FaktoryError, InvalidPayload, InvalidResult, LockTimeout
from ..dialects.base import holds
from ..dialects.values import AckResult, Ended, EndedRun
from ..limits import limiters
from ..locks import locks
from ..store import Store
from ..transactions import run, run_each
from . import failures
from .endings import Ending
from .pushes import CHUNK

logger = get_logger(__name__)


def make_waiters_ready(store: Store, ending: AckResult) -> None:
    """Notify the queues in which an end made jobs ready, and look after the commit at what it could not make ready."""
    if not ending.has_waiters:
        return  # on the event loop, `store.connection` would be a new wrapper
    connection = store.connection
    locks.notify_ready(connection, set(ending.readied))
    locks.promote_waiters_later(connection, ending.blocked)
    limiters.promote_waiters_later(connection, ending.limiters)


def end(store: Store, acks: Sequence[Ack], *, pushed: Collection[str] = ()) -> AckResult:
    """End the jobs of these acks, inside a transaction or as a dialect's single statement.

    The rows with the jids in `pushed`, which the same transaction is about to insert, are locked too.
    """
    connection, dialect = store.connection, store.dialect
    if dialect.one_statement:
        return dialect.end(connection, acks, store.clock())
    ending = Ending(store)
    ended = ending.succeed(acks, pushed=pushed)
    ending.write()
    return AckResult(ended, set())


def conclude(
    store: Store, ending: AckResult, acks: Sequence[Ack], record_ended: Callable[[Collection[EndedRun]], None]
) -> list[FaktoryError | bool]:
    """End the jobs that a dialect's statement left unchanged, and return the result of each ack.

    `ending` is already committed. If this transaction fails, only the acks of `ending.remaining` get the error as their
    result: the reporter sends these again. The other acks must not be repeated, they would count as late.
    """
    ended, refused = ending.ended, dict[str, FaktoryError | bool]()
    if ending.remaining:
        ended = {**ended}
        try:
            _end_remaining(store, ending, acks, ended, refused)
        except (BrokerUnavailable, Error) as error:
            if store.connection.in_atomic_block:
                raise
            if not isinstance(error, LockTimeout):
                logger.warning("jobs of batches not acknowledged jobs=%d error=%s", len(ending.remaining), error)
            unavailable = error if isinstance(error, LockTimeout) else BrokerUnavailable("database unavailable")
            refused = {jid: refused.get(jid, unavailable) for jid in ending.remaining if jid not in ended}
    record_ended(ended.values())
    # Each jid was acknowledged once, and ended: the usual case.
    if len(ended) == len(acks):
        return [True] * len(acks)
    return [refused.get(ack.jid) or _take_effect(ack, ended) for ack in acks]


def ack(store: Store, acks: Sequence[Ack], *, chunk_size: int = CHUNK) -> list[FaktoryError | bool]:
    """End jobs successfully: delete the row, or keep it as succeeded for its `result_ttl`.

    Return one item per ack: True if the job was ended; False if nothing changed because the sender does not hold the
    job (W16); InvalidResult if the database refuses the result, and the job is dead; BrokerUnavailable if this job was
    not ended although other jobs of the set were. Raise BrokerUnavailable if no job was ended.
    """
    ack_part, end_refused = partial(_ack_chunk, store), partial(_end_refused, store)
    results: list[FaktoryError | bool] = []
    for start in range(0, len(acks), chunk_size):
        try:
            results += run_each(store.alias, ack_part, acks[start : start + chunk_size], end_refused)
        except BrokerUnavailable as error:
            # Earlier chunks are committed and their acks must not be repeated, so return the error per ack.
            if not results or store.connection.in_atomic_block:
                raise
            logger.warning("jobs not acknowledged jobs=%d error=%s", len(acks) - start, error)
            results += [error] * (len(acks) - start)
            break
    return results


def _ack_chunk(store: Store, acks: Sequence[Ack]) -> list[FaktoryError | bool]:
    # A jid that no database can store (such as one with a NUL character) would fail the statement of the whole set.
    storable = [ack for ack in acks if is_storable(ack.jid)]
    if not storable:
        return [False] * len(acks)
    ending = run(store.alias, lambda _: end(store, storable), atomic=not store.dialect.one_statement)
    make_waiters_ready(store, ending)
    results = conclude(store, ending, storable, store.record_ended)
    if len(storable) == len(acks):
        return results
    # Put False in the places of the jids that were left out, so that results match the acks.
    storable_results = iter(results)
    return [next(storable_results) if is_storable(ack.jid) else False for ack in acks]


def ack_last(store: Store, report: Ack, job: Reservation) -> bool:
    """Acknowledge this job as the last statement of the caller's `atomic` block, which must end right after this call.

    If the dialect supports it, COMMIT is part of the same message, and Django's own commit finds no transaction
    (ADR 0007). Return False if the job was not ended. Raise TransactionManagementError if the transaction is marked for
    rollback, and ReservationLost if another attempt holds the job.
    """
    connection = store.connection
    connection.validate_no_broken_transaction()
    if job.is_batchless:
        ending = store.dialect.end_last(connection, report, store.clock())
        if ending is not None:
            make_waiters_ready(store, ending)
            store.record_ended(ending.ended.values())
            return True
    return ack(store, [report]) == [True]


def _end_remaining(
    store: Store, ending: AckResult, acks: Sequence[Ack], ended: Ended, refused: dict[str, FaktoryError | bool]
) -> None:
    """End the jobs of `ending.remaining` together with their batches, locks and permits.

    Add their runs to `ended`, and the errors of acks that the database refuses to `refused`.
    """

    def verb(_: BaseDatabaseWrapper, part: Sequence[Ack]) -> Ended:
        rest = Ending(store)
        # The statement has counted all acks of a jid but one.
        part_ended = rest.succeed(part, counted=len(part) - len({ack.jid for ack in part}))
        rest.write()
        return part_ended

    def end_part(part: Sequence[Ack]) -> list[None]:
        ended.update(run(store.alias, partial(verb, part=part)))
        return [None] * len(part)

    run_each(
        store.alias,
        end_part,
        [ack for ack in acks if ack.jid in ending.remaining],
        lambda ack, error: refused.update({ack.jid: _end_refused(store, ack, error)}),
    )


def _end_refused(store: Store, ack: Ack, error: InvalidPayload) -> FaktoryError | bool:
    """End a job whose result the database refuses: it fails with the reason, and never runs again."""
    refusal = invalid_result(error)
    report = failure(
        jid=ack.jid,
        wid=ack.wid,
        attempt=ack.attempt,
        errtype=InvalidResult.__name__,
        message=str(refusal),
        verdict="kill",
    )
    try:
        return failures.fail(store, [report]) == [True] and refusal
    except BrokerUnavailable as unavailable:  # the other jobs have ended: only this report is sent again
        return unavailable


def invalid_result(error: InvalidPayload) -> InvalidResult:
    """Return the error of a job whose result the database refuses."""
    return InvalidResult(f"the result was not stored: {str(error).removeprefix('invalid payload: ')}")


def _take_effect(ack: Ack, ended: Ended) -> bool:
    ended_run = ended.get(ack.jid)
    if ended_run is None or not holds(ack.wid, ack.attempt, ended_run.wid, ended_run.attempt):
        return False
    del ended[ack.jid]  # a second ack of the same job finds it ended
    return True
