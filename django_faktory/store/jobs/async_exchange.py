"""Execute exchanges on an event loop, with a connection that it owns (ADR 0005).

Only exchanges that are one message take this path. What needs further queries afterwards is done in a thread, because
it may block.
"""

from __future__ import annotations

from functools import partial

from django.db import Error, connections

from ...core.loop_connection import InThread, LoopConnection
from ...core.payloads import ExchangeReply
from ...errors import BrokerUnavailable
from .. import sharing, transactions
from ..database_errors import first_line
from ..dialects import dialect_of
from .exchanges import NO_CLAIM, Exchange
from .pushes import order_jobs


def take_connection(using: str) -> LoopConnection | None:
    """Take the idle connection of the calling thread for an event loop; the thread opens another one when it needs one.

    None if the dialect cannot use the connection on a loop, or the database has too few connections.
    """
    if sharing.is_needed():
        return None
    connection = connections[using]
    try:
        taken = dialect_of(connection).take_for_loop(connection)
    except Error:  # lost: the thread's next attempt reports it
        return None
    if taken:
        del connections[using]
    return taken


async def exchange(connection: LoopConnection, work: Exchange, in_thread: InThread) -> ExchangeReply | None:
    """Execute an exchange; return None, with nothing done, if `exchanges.execute` must do it in a thread."""
    if not work.is_one_transaction() or (work.acks and work.may_hand_off_lock()):
        return None
    # The thread opens another connection, and the next set takes that one.
    if transactions.leads_to_old_primary(connection.connection) or (sharing.until[0] and sharing.is_needed()):
        connection.close()
        return None
    plan = NO_CLAIM
    if work.requests:
        plan = work.plan(work.store.claim_numbers.number())
        if not plan.slots and work.wants_jobs():
            return None  # the plan depends on the number of waiting jobs, which is another query
    jobs = order_jobs(work.jobs) if work.jobs else []
    calls, convert = work.store.dialect.build_exchange(connection.connection, jobs, work.acks, plan, work.store.clock())
    try:
        with transactions.limit_attempt(connection.connection):
            rows = await connection.execute(calls)
    except (Error, UnicodeEncodeError) as error:
        # The failed statement undid the whole exchange: the thread finds the command at fault.
        if connection.is_usable():
            return None
        work.schedule_checks(plan)
        raise BrokerUnavailable(f"database unavailable: {first_line(error)}") from error
    reply = convert(rows)
    if work.needs_no_query(plan, *reply):
        return work.conclude(plan, *reply)
    try:
        return await in_thread(partial(work.conclude, plan, *reply))
    except BaseException:
        work.schedule_checks(plan)
        raise
