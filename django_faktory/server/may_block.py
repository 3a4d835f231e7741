"""Execute commands that may meet another transaction's lock; each gets an answer of its own.

A set waits for locks for `SET_WAIT_S` only. If it meets one, its commands are tried one by one, so that only the
commands that need the lock fail: their answer is LockTimeout, and `lock_waits` retries them (ADR 0024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from ..brokers.base import Broker
from ..core.logs import get_logger
from ..core.payloads import Ack, Beat, Failure, JobPayload, WorkerIdentity
from ..errors import BrokerUnavailable, FaktoryError, LockTimeout
from .exchange_set import weight

logger = get_logger(__name__)

SET_WAIT_S = 0.1
"""Lock wait of a set. Longer than a commit on a loaded disk: two nodes that change one batch rarely exceed it."""

ALONE_WAIT_S = 0.02
"""Lock wait of a single command of a set that met a lock."""

SET_BUDGET_S = 0.3
"""Total lock wait of a set, after which its remaining commands are left to `lock_waits` without an attempt."""

WAITING_S = 0.5
"""Lock wait of one attempt of a command that has met a lock before."""

LAST_BUDGET_S = 5.0
"""Total lock wait of the last attempt of a PUSHB, which stores the jobs that meet no lock."""

LOST_IN_A_ROW = 2
"""Lost connections in a row after which the remaining commands of a set fail without an attempt."""

# The jobs of a PUSH or PUSHB, one report, one heartbeat or registration, or any other call.
Work = list[JobPayload] | Ack | Failure | Beat | WorkerIdentity | Callable[[], Any]

WAITED_TOO_LONG = LockTimeout(
    "database unavailable: another transaction holds a lock that this command needs; nothing was changed"
)


class MayBlock:
    """One command. `subjects` name the rows it may wait for: `bid:…`, `key:…`, `jid:…`, `wid:…`, `queues`.

    An `is_repeatable` call is idempotent, so it may run again after a lost connection.
    """

    def __init__(self, work: Work, subjects: Iterable[str] = (), *, is_repeatable: bool = False) -> None:
        self.work, self.is_repeatable = work, is_repeatable
        self.is_last = False
        """Whether the next attempt is the last one, in which each job gets its own answer."""
        self._subjects = frozenset(subjects)

    @cached_property
    def subjects(self) -> frozenset[str]:
        """The given subjects; for jobs also their batches and unique keys."""
        # Computed on demand: most commands meet no lock, and a PUSHB may have thousands of jobs.
        return self._subjects | frozenset(_subjects_of(self.work)) if isinstance(self.work, list) else self._subjects

    @property
    def has_several_jobs(self) -> bool:
        """Whether its jobs can have different outcomes."""
        return isinstance(self.work, list) and len(self.work) > 1

    def __repr__(self) -> str:
        """Return type and jid only: it appears in logs, and arguments may be confidential."""
        return f"MayBlock({type(self.work).__name__} {getattr(self.work, 'jid', '')})"


def _subjects_of(jobs: Sequence[JobPayload]) -> Iterable[str]:
    for job in jobs:
        if job.options is not None and job.options.bid:
            yield f"bid:{job.options.bid}"
        if job.options is not None and job.options.unique_key:
            yield f"key:{job.options.unique_key}"


def weight_of(command: MayBlock) -> int:
    """Return the weight of a command within a set (see `exchange_set.weight`)."""
    return weight(command.work)


def execute_set(broker: Broker, commands: Sequence[MayBlock]) -> list[Any]:
    """Execute the commands of each kind together, and calls alone; return an answer or an error for each."""
    attempts = _Attempts(broker)
    answers: dict[int, Any] = {}
    for group in _groups(commands):
        answers.update(zip(map(id, group), attempts.together(group), strict=True))
    return [answers[id(command)] for command in commands]


def execute_waiting(broker: Broker, commands: Sequence[MayBlock]) -> list[Any]:
    """Try one command that met a lock again; its last attempt stores each job that meets no lock."""
    [command] = commands  # the commit queue weighs each command as a whole set
    if command.is_last and isinstance(command.work, list):
        return [_Attempts(broker, budget_s=LAST_BUDGET_S).one_by_one(command.work)]
    return _Attempts(broker).attempt([command], WAITING_S)


def execute_each(broker: Broker, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Execute calls that wait for no locks; return an answer or an error for each."""
    attempts = _Attempts(broker)
    return [attempts.attempt([MayBlock(call)], None)[0] for call in calls]


def _groups(commands: Sequence[MayBlock]) -> list[list[MayBlock]]:
    # Calls are opaque, so each is a group of its own; equal kinds of data are one statement.
    sets = [[command for command in commands if isinstance(command.work, work_type)] for work_type in _IN_SETS]
    calls = [[command] for command in commands if callable(command.work)]
    return [group for group in (*sets, *calls) if group]


class _Attempts:
    """The attempts to execute one set. They share a lock wait budget and a count of lost connections."""

    def __init__(self, broker: Broker, *, budget_s: float = SET_BUDGET_S) -> None:
        self._broker, self._budget_s = broker, budget_s
        self._lost: BrokerUnavailable | None = None
        self._lost_in_a_row = 0

    def together(self, group: Sequence[MayBlock]) -> list[Any]:
        """Execute commands of one kind as one set; if that fails, one by one."""
        if len(group) == 1:
            return [self._alone(group[0], SET_WAIT_S)]
        answers = self.attempt(group, SET_WAIT_S)  # one command that fails rolls back the whole set
        return [
            self._alone(command, ALONE_WAIT_S) if _may_succeed_alone(answer) else answer
            for command, answer in zip(group, answers, strict=True)
        ]

    def one_by_one(self, jobs: list[JobPayload]) -> list[Any]:
        """Store the jobs that meet no lock, each alone. Return an answer for each job."""
        answers: list[Any] = []
        for job in jobs:
            answer = self._alone(MayBlock([job]), ALONE_WAIT_S)
            answers += answer if isinstance(answer, list) else [answer]
        if self._lost is not None:
            logger.warning("database unavailable commands=%d error=%s", len(jobs), self._lost)
        return list(map(_without_details, answers))

    def attempt(self, group: Sequence[MayBlock], wait_s: float | None) -> list[Any]:
        """Execute a set as one; an exception becomes the answer of every command."""
        if self._lost is not None and self._lost_in_a_row >= LOST_IN_A_ROW:
            return [self._lost] * len(group)
        try:
            answers = self._execute(group, wait_s)
        except LockTimeout as error:
            self._budget_s -= wait_s or 0.0
            return [error] * len(group)
        except BrokerUnavailable as error:
            self._broker.close()
            self._lost, self._lost_in_a_row = error, self._lost_in_a_row + 1
            # The commit may have happened: only a repeatable command may run again.
            may_repeat = len(group) == 1 and group[0].is_repeatable
            return self.attempt(group, wait_s) if may_repeat else [error] * len(group)
        except FaktoryError as error:  # a refusal by the broker: the connection is usable
            return [error] * len(group)
        except Exception:
            self._broker.close()  # the state of the connection is unknown
            if len(group) == 1:  # in a larger set each command is tried alone next, and the one at fault is logged
                logger.exception("command failed item=%r", group[0])
            return [FaktoryError("internal error")] * len(group)
        self._lost_in_a_row = 0
        return answers

    def _alone(self, command: MayBlock, wait_s: float) -> Any:
        # Not tried: with many locks in one set the short waits would add up to seconds.
        if self._budget_s <= 0:
            return WAITED_TOO_LONG
        return self.attempt([command], wait_s)[0]

    def _execute(self, group: Sequence[MayBlock], wait_s: float | None) -> list[Any]:
        execute = _IN_SETS.get(type(group[0].work))
        with nullcontext() if wait_s is None else self._broker.limited_lock_wait(wait_s):
            if execute is None:
                return [command.work() for command in group if callable(command.work)]
            return [*execute(self._broker, [command.work for command in group])]


def _push_sets(broker: Broker, sets: Sequence[list[JobPayload]]) -> list[Any]:
    answers = iter(broker.push([job for jobs in sets for job in jobs]))
    return [[next(answers) for _ in jobs] for jobs in sets]


_IN_SETS: dict[type, Callable[[Broker, list[Any]], Sequence[Any]]] = {
    WorkerIdentity: lambda broker, identities: broker.register(identities),
    Beat: lambda broker, beats: broker.beat(beats),
    Ack: lambda broker, acks: broker.exchange([], acks, []).acked,
    Failure: lambda broker, failures: broker.fail(failures),
    list: _push_sets,
}
"""How commands of each kind are executed together, in this order: a HELLO must be stored before a BEAT of its wid."""


def _may_succeed_alone(answer: Any) -> bool:
    """Return whether a command may succeed alone: it failed with its set, but not because of a lost connection."""
    if isinstance(answer, BrokerUnavailable):
        return isinstance(answer, LockTimeout)
    return isinstance(answer, FaktoryError)


def _without_details(answer: Any) -> Any:
    """Replace the driver's message, which `CommitQueue` hides only in the answer of a whole command."""
    if isinstance(answer, LockTimeout):
        return WAITED_TOO_LONG
    return BrokerUnavailable("database unavailable") if isinstance(answer, BrokerUnavailable) else answer
