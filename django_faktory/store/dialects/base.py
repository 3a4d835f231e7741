"""What a dialect must do, and the shapes the three share."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import date, datetime
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from ...lifecycle import FINISHED, State
from ...payloads import Ack, HandedOut, JobPayload, Reservation
from .keys import JOB as JOB  # noqa: PLC0414
from .keys import next_ready
from .write_queue import NO_QUEUE

QUEUE = "django_faktory_queue"
WORKER = "django_faktory_workerprocess"
COUNTER = "django_faktory_counter"
LOCK = "django_faktory_joblock"
LIMIT = "django_faktory_limit"
GATE = "django_faktory_gate"
DELIVERY_LEASE_S = 60.0
"""Until the delivery of a job is confirmed: the shortest reservation there is (W9), so that none is shortened."""

_ENDED_SQL = ", ".join(f"'{state}'" for state in sorted(FINISHED - {State.DEAD}))


def replaceable(row: str = "") -> str:
    """SQL: whether a push may take over this row. Not a dead one that a batch still waits for."""
    state, bid, callback_of = (f"{row}{column}" for column in ("state", "bid", "callback_of"))
    return f"({state} IN ({_ENDED_SQL}) OR ({state} = 'dead' AND {bid} IS NULL AND {callback_of} IS NULL))"


FOLDED = -1
"""The slot of the counter row that others are folded into (`store.counters`). The last release counts in 0 to 15."""

_OWN_SLOTS = 2**62

_slots: WeakKeyDictionary[BaseDatabaseWrapper, tuple[int, int]] = WeakKeyDictionary()


def counter_slot(connection: BaseDatabaseWrapper) -> int:
    """Return the slot of the counter row that only this connection writes.

    Drawn at random once per connection and process: two connections that count at the same time must not wait for each
    other's commit, on whichever nodes they are.
    """
    pid, slot = _slots.get(connection, (0, 0))
    if pid != os.getpid():  # new, or inherited over a fork
        slot = 16 + secrets.randbelow(_OWN_SLOTS)
        _slots[connection] = os.getpid(), slot
    return slot


Placed = Sequence[tuple[int, JobPayload]]
"""Jobs to be inserted, each with its place in the set that was pushed."""


def insertion_order(jobs: Sequence[JobPayload]) -> Placed:
    """Return the jobs with their places, in the order of every insert: those without unique key by jid, then by key.

    An insert waits for transactions that insert the same jid or key, so that all use one order (ADR 0024).
    """
    return sorted(enumerate(jobs), key=lambda placed: insertion_key(placed[1].jid, unique_key_of(placed[1])))


def insertion_key(jid: str, unique_key: str | None) -> tuple[str, str]:
    """Return what `insertion_order` sorts by."""
    return (unique_key, "") if unique_key else ("", jid)


def unique_key_of(job: JobPayload) -> str | None:
    """Return the key that the job asks for, or None."""
    return job.options.unique_key if job.options else None


class Slot(msgspec.Struct, frozen=True, gc=False):
    """So many jobs of this queue for this worker: one line of a plan of what to claim."""

    queue: str
    wid: str
    count: int


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What to claim: at most so many of each slot, and no more than the limit of all.

    With several wids in it, the slots add up to the limit.
    """

    slots: Sequence[Slot] = ()
    limit: int = 0
    lease_s: float = 0.0
    """How long a lock is held that comes with a job at once, see `Dialect.exchange`."""
    claim: int | None = None
    """What the rows are marked with, see `store.unanswered`; with its negative until their delivery is confirmed."""
    at_least_s: float | None = None
    """Minimum of a reservation: that of a job whose worker's heartbeat extends it lasts longer than WORKER_TIMEOUT."""
    at_most_s: float | None = None
    """Lease until the delivery is confirmed; None: the claim needs no confirmation."""
    ahead: Sequence[Slot] = ()
    """What may be claimed beyond that, for whoever asks next; of these slots the wid does not count (ADR 0022)."""
    crowd: Collection[str] = ()
    """The wids that may: none of them must be quiet or terminating."""
    then: Sequence[Plan] = ()
    """What is claimed behind that, one after the other, where a dialect `claims_in_turn`: slots and limits."""

    @property
    def mark(self) -> int | None:
        """The number that the rows of a direct claim get."""
        return self.claim if self.claim is None or self.at_most_s is None else -self.claim


class Tally(msgspec.Struct, frozen=True, gc=False):
    """What is added to the counters of the day."""

    processed: int = 0
    failed: int = 0
    late: int = 0


class Changed(NamedTuple):
    """A job's row with what its failure changes."""

    id: Any
    state: Any
    unique_key: Any
    lock_token: Any
    passes: Any
    wid: Any
    failures: Any
    losses: Any
    errtype: Any
    failure: Any
    history: Any
    run_at: Any
    enqueued_at: Any
    started_at: Any
    reserved_until: Any
    finished_at: Any
    purge_at: Any


_SAVE = f"UPDATE {JOB} SET {', '.join(f'{column} = %s' for column in Changed._fields[1:])} WHERE id = %s"


class Found(NamedTuple):
    """Jobs' rows, locked."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]
    now: datetime
    """The time when they were."""


class Held(NamedTuple):
    """A job that was ended: who held it, and what there is to tell of it."""

    wid: str
    attempt: int
    queue: str = ""
    jobtype: str = ""
    ran_s: float = 0.0


Ended = dict[str, Held]
"""By jid."""


class Ending(NamedTuple):
    """What `end` did, and whom it left alone: jobs of batches and holders of locks, which `store.members` ends."""

    ended: Ended
    left: set[str]
    readied: Collection[str] = ()
    """Queues in which jobs became ready that had waited for a lock."""
    blocked: Collection[str] = ()
    """Keys to `settle`: of jobs that were stored along and wait for a lock, and of jobs whose turn it was while another
    transaction had locked their rows."""


class EndedLast(NamedTuple):
    """What `end_last` did."""

    at: datetime
    passes: str | None
    """The permits that a limit, set while the job ran, had given it: given back, and their gates to be looked at."""


class Relayed(NamedTuple):
    """What `relay` did."""

    ended: Ended
    job: Reservation
    is_all: bool
    """Whether nothing else was ready in the plan's queues: whoever asks for more of them gets nothing."""


class Stored(NamedTuple):
    """The result of `insert_free`."""

    jids: Collection[str]
    alive: Collection[str]
    """Jids of stored rows that are not replaced."""
    refused: Collection[str]
    """Jids of jobs whose unique key a stored row holds and keeps."""
    blocked: Collection[str]
    """Lock keys for which some of the stored jobs wait."""
    now: datetime
    """The time of the statement."""


class Underway(Protocol):
    """An exchange that was sent and is read by who does not wait for it."""

    is_sent: bool
    """Whether all of it was sent; else call `send` when there is room."""

    @property
    def fd(self) -> int:
        """Its connection's: readable when there is something to read."""

    def send(self) -> None:
        """Send more of it."""

    def read(self) -> tuple[Ending, list[Reservation]] | None:
        """What `exchange` answers; None while more is to come."""

    is_last: bool
    """When it was read: whether something came behind the answer."""


class Dialect(ABC):
    """The hot verbs. Each takes an open cursor and is one transaction, or part of the caller's."""

    plain_lock = ""
    """At the end of a SELECT: locks the rows, where the database can."""
    skip_lock = ""
    """The same, but for rows that others have locked."""

    hands_over = False
    """Whether `exchange` gives the lock of a job it ends to the next of its key that it claims (ADR 0015)."""

    lends = False
    """Whether there is a `begin`."""

    claims_in_turn = False
    """Whether `exchange` heeds a plan's `then`."""

    reads_ahead = False
    """Whether `exchange` heeds a plan's `ahead`, so that there may be something to `confirm` (ADR 0022)."""

    stores_keyed = False
    """Whether `insert` takes jobs with lock keys, and `insert_free` those with unique ones."""

    one_statement = False
    """Whether claim and end are a single statement, so that no transaction need be opened around them."""

    begin_snapshot: tuple[str, ...] = ()
    """Statements that begin a transaction which only reads, all of it from one snapshot."""

    @abstractmethod
    def now(self, cursor: CursorWrapper) -> datetime:
        """The database's clock."""

    @abstractmethod
    def age(self, moment: str) -> str:
        """SQL: seconds since `moment` as a float, negative if it is in the future."""

    names_of_json: str
    """SQL: a SELECT of the strings of a JSON array, which is its one parameter."""

    @abstractmethod
    def insert(self, connection: BaseDatabaseWrapper, jobs: Placed, now: datetime | None) -> Collection[str]:
        """Insert jobs with different jids, in the order given; return the lock keys for which some of them wait.

        A row with the same jid is replaced if it has finished, else left alone. Where the database locks rows, it
        locks these rows first, by id. The jobs belong to no batch and have no unique key, and lock keys only if the
        dialect `stores_keyed`. Their places decide which is claimed first.
        """

    def insert_free(self, connection: BaseDatabaseWrapper, jobs: Placed, now: datetime | None) -> Stored:
        """Insert, in the order given, jobs of no batch whose jid and unique key no stored row has.

        The caller may change finished rows and take overdue keys from their holders to store the other jobs: these
        rows are locked first, by id.
        """
        raise NotImplementedError

    @abstractmethod
    def lock_stored(self, connection: BaseDatabaseWrapper, jobs: Placed, now: datetime | None) -> datetime:
        """Return the time; lock first, by id, all rows that inserts of these jobs may lock.

        For a set that is inserted by several statements in one transaction.
        """

    @abstractmethod
    def claim(self, connection: BaseDatabaseWrapper, plan: Plan, now: datetime | None) -> list[Reservation]:
        """Reserve jobs, at most as many of each queue as the plan says, in the plan's order.

        With several wids in the plan, the jobs of a queue go to them in the plan's order. Quiet workers and
        paused queues get nothing.
        """

    @abstractmethod
    def waiting(
        self,
        connection: BaseDatabaseWrapper,
        queues: Sequence[str],
        most: int,
        wids: Collection[str],
        now: datetime | None,
    ) -> tuple[dict[str, int], set[str]]:
        """How many jobs wait in each queue that is not paused, counted no further than `most`; and those of `wids`
        that are quiet or terminating."""

    @abstractmethod
    def end(
        self, connection: BaseDatabaseWrapper, acks: Sequence[Ack], now: datetime | None, pushed: Sequence[str] = ()
    ) -> Ending:
        """End the jobs that these acks hold; return their jids and holders. Counts the other acks as late.

        If several acks name one jid, the ack of the holder counts. Jobs of batches and holders of locks are not
        changed, but returned, and one ack of each is not counted. The rows with the jids in `pushed`, which the same
        transaction is about to insert, are locked together with the rows of the acks.
        """

    def exchange(
        self,
        connection: BaseDatabaseWrapper,
        jobs: Placed,
        acks: Sequence[Ack],
        plan: Plan,
        now: datetime | None,
    ) -> tuple[Ending, list[Reservation]]:
        """`end`, `insert` and `claim`, those of them that there is something for.

        What is claimed may have its lock already, for the plan's `lease_s`: then it has the token. What was read ahead
        is in the list too, and says so.
        """
        ended = self.end(connection, acks, now, [job.jid for _, job in jobs]) if acks else Ending({}, set())
        if jobs:
            ended = ended._replace(blocked=self.insert(connection, jobs, now))
        return ended, self.claim(connection, plan, now) if plan.slots else []

    def end_last(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        ack: Ack,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> EndedLast | None:
        """`end` a lone job that held nothing when it was claimed, as the last thing in the caller's transaction, and
        commit that, in one message. None: it cannot go so just now, and nothing was done.

        Raises ReservationLost where the holder was another one, and the database's errors: nothing is committed then.
        """
        return None

    def begin(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        jobs: Placed,  # noqa: ARG002
        acks: Sequence[Ack],  # noqa: ARG002
        plan: Plan,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> Underway | None:
        """`exchange` as a transaction by itself for who must not wait, where it can go so just now; else None, and
        nothing was done (ADR 0021)."""
        return None

    @abstractmethod
    def confirm(self, connection: BaseDatabaseWrapper, handed: Sequence[HandedOut], now: datetime | None) -> set[str]:
        """See `Broker.confirm`."""

    @abstractmethod
    def extend(
        self,
        connection: BaseDatabaseWrapper,
        held: Sequence[tuple[str, str, int]],
        at_least_s: float,
        now: datetime | None,
    ) -> None:
        """Extend the reservations of these jobs (wid, jid, attempt) by `reserve_for`, at least by `at_least_s`.

        Only of those that are half over, so that short jobs cost no write. Skips locked rows, does not wait for them.
        """

    def relay(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        ack: Ack,  # noqa: ARG002
        plan: Plan,  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> Relayed | None:
        """End a holder of a lock and give the lock to the next of its key, claimed for the one worker of the plan, in
        one statement; None: nothing was done (ADR 0020)."""
        return None

    def expects_relay(self, jid: str) -> bool:  # noqa: ARG002
        """Whether a relay is likely to do where this job ends: until it was tried."""
        return False

    def write_queue(self, connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return what a thread holds during a transaction that writes, if the database itself queues no writers."""
        return NO_QUEUE

    has_lock_wait = False
    """Whether `lock_wait` has an effect."""

    def lock_wait(self, seconds: float | None, *, of_transaction: bool = False) -> str:
        """The statement that limits how long the session, or the transaction, waits for a lock; None: the default."""
        raise NotImplementedError

    def keeps_session(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Whether what is set for the session stays with this connection, and with nothing else."""
        return True

    def joins(self, connection: BaseDatabaseWrapper) -> bool:  # noqa: ARG002
        """Whether `exchange` is a transaction by itself, so that none need be opened around it."""
        return False

    @abstractmethod
    def await_claims(self, connection: BaseDatabaseWrapper) -> None:
        """Wait, outside of a transaction, until claims have ended that may have read the limits before this moment."""

    takes: Callable[[BaseDatabaseWrapper, Sequence[Reservation], float, datetime | None], dict[str, int]] | None = None
    """Takes locks in one statement, where it can: of those who got theirs the token, by jid; the others are parked."""

    passes: Callable[[BaseDatabaseWrapper, Sequence[Reservation], datetime | None], dict[str, str | None]] | None = None
    """Lets a set of jobs pass in one statement, where all of it may: the passes they hold, by jid. Else it does
    nothing, and answers with nothing."""

    def ready_of(self, cursor: CursorWrapper, keys: Sequence[str]) -> Sequence[tuple[Any, ...]]:
        """Id, key, queue and weight of the ready jobs of these keys."""
        cursor.execute(
            f"SELECT id, lock_key, queue, weight FROM {JOB} WHERE lock_key IN ({marks(keys)}) AND state = 'enqueued'",
            [*keys],
        )
        found: Sequence[tuple[Any, ...]] = cursor.fetchall()
        return found

    def make_next_ready(self, connection: BaseDatabaseWrapper, keys: Sequence[str]) -> tuple[set[str], set[str]]:
        """Of the jobs blocked by each of these keys make the first of each queue and priority ready, unless one is.

        Waits for no row: returns the queues of those that became so, and the keys of those that others have locked.
        """
        queues: set[str] = set()
        skipped: set[str] = set()
        with connection.cursor() as cursor:
            for key in keys:
                for queue, is_ready in next_ready(cursor, key, self.skip_lock):
                    if is_ready:
                        queues.add(queue)
                    else:
                        skipped.add(key)
        return queues, skipped

    @abstractmethod
    def keep(self, cursor: CursorWrapper, held: Sequence[tuple[int, Ack, int]], now: datetime) -> None:
        """End locked jobs well: (id, its ack, its result_ttl), whose rows stay."""

    def failing(
        self,
        connection: BaseDatabaseWrapper,  # noqa: ARG002
        jids: Collection[str],  # noqa: ARG002
        now: datetime | None,  # noqa: ARG002
    ) -> Found | None:
        """Lock and read these jobs, of which a report says that they failed; None: no sooner than the ORM does."""
        return None

    def save(
        self,
        connection: BaseDatabaseWrapper,
        changed: Sequence[Changed],
        day: datetime,
        tally: Tally,
        *,
        is_last: bool = False,  # noqa: ARG002
    ) -> None:
        """Write locked rows, and count. Where it `is_last` in its transaction, that may be committed along.

        One statement a row: Django's `bulk_update` takes milliseconds to put its one together.
        """
        adapt = connection.ops.adapt_datetimefield_value
        with connection.cursor() as cursor:
            if changed:
                rows = [[adapt(value) if isinstance(value, datetime) else value for value in row] for row in changed]
                cursor.executemany(_SAVE, [(*values, row_id) for row_id, *values in rows])
            self.count(cursor, day, tally)

    def count(self, cursor: CursorWrapper, day: datetime, tally: Tally) -> None:
        """Add to the counters of that day, in this connection's row: the last row that a transaction locks."""
        if tally != Tally():
            self.count_in(cursor, day.date(), counter_slot(cursor.db), tally)

    @abstractmethod
    def count_in(self, cursor: CursorWrapper, day: date, slot: int, tally: Tally) -> None:
        """Add to one counter row, which is inserted if there is none."""


def marks(values: Collection[Any]) -> str:
    """A parameter's place for each value."""
    return ", ".join(["%s"] * len(values))


def holds(claimed_wid: str, claimed_attempt: int | None, wid: str, attempt: int) -> bool:
    """Whether a report comes from who holds the job: the same wid, or one has none; and attempt (W16)."""
    same_worker = not claimed_wid or not wid or claimed_wid == wid
    return same_worker and claimed_attempt in (None, attempt)
