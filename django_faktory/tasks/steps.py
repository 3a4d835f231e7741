"""Steps of a running job: each commits what its block writes together with a record, and is skipped from then on.

`Steps` are those of one run; `JobContext` offers them to tasks. Contract: `docs/long-jobs.md`, ADR 0051.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, Protocol
from uuid import UUID, uuid5

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db.transaction import TransactionManagementError
from django.utils.asyncio import async_unsafe

from .. import conf
from ..brokers.base import Transaction, WorkerBroker
from ..core.job_control import Control
from ..core.json import jsontext
from ..core.json.fields import rfc3339
from ..core.lifecycle import count_claims
from ..core.logs import get_logger
from ..core.payloads import Reservation
from ..core.steps import MAX_STEP_BYTES, MAX_STEP_NAME, StepRecord, is_step_name
from ..errors import (
    BrokerUnavailable,
    CannotBegin,
    ConnectionLost,
    FaktoryError,
    InvalidPayload,
    InvalidStep,
    Later,
    ReservationLost,
)
from . import encryption
from .arguments import ENCODING_ERRORS
from .json_values import encode_json, normalize_result
from .skipping import Skipper, find_block

logger = get_logger(__name__)

MAX_STEPS = 10_000
"""Maximum number of steps of a job."""
MAX_KEY = 255
"""Maximum characters of a step's key."""

_NAMESPACE = UUID("6f1c0a5e-93a1-4d1c-8f0e-5b0c4f6f7a51")


class Block(Protocol):
    """What a run enters by a name: a step, a walk over rows, a sleep or a wait."""

    kind: str
    name: str
    key: str


class Steps:
    """The steps of one run of a job, and its walks over rows."""

    def __init__(
        self, broker: WorkerBroker, job: Reservation, control: Control, *, is_encrypted: bool, is_atomic: bool
    ) -> None:
        self._broker, self._job, self.control = broker, job, control
        self._is_encrypted, self._is_atomic = is_encrypted, is_atomic
        # A job that was never claimed before has none, so its first step needs no query.
        self._committed: dict[tuple[str, str], StepRecord] | None = {} if count_claims(job.attempt) == 1 else None
        self._entered: set[tuple[str, str]] = set()
        self._open: Block | None = None
        self._ended: FaktoryError | Later | None = None

    async def call(self, step: Step, function: Callable[[], Any]) -> Any:
        """Run the function as a step, in the thread that the ORM uses for coroutines, and return its result."""

        def call() -> Any:
            if self.enter(step) is None:
                with self.committing(step, step.build_record):
                    step.result = function()
            else:
                step.result = self.result_of(step)
            return step.result

        # In one call: all coroutines share the connection of that thread, and must not see the transaction.
        return await sync_to_async(call)()

    def once_key(self, step: Step) -> str:
        """Return the text of `Step.once_key`."""
        # Not by the id of the row, which counts from 1 in each database.
        created_at = rfc3339(self._job.created_at) if self._job.created_at else ""
        return str(uuid5(_NAMESPACE, jsontext.encode([self._job.jid, created_at, step.name, step.key])))

    def enter(self, block: Block) -> StepRecord | None:
        """Check that the block may run now, and return what earlier runs have committed of it. Raises InvalidStep."""
        if self._ended is not None:  # the task has caught it
            self.end(self._ended)
        place = block.name, block.key
        if self._is_atomic:
            raise InvalidStep(f"{block}: a task with atomic=True is one transaction; leave it out to use steps")
        if self._open is not None:
            raise InvalidStep(
                f"{block}: {self._open} is open, and cannot contain another block with a commit of its own"
            )
        if place in self._entered:
            raise InvalidStep(f"{block}: this run had it already; give steps in a loop a key=, others another name")
        if conf.outbox():
            raise InvalidStep(
                f"{block}: the jobs are not in the database of {conf.outbox()[0]!r}, so nothing commits both"
            )
        if self._committed is None:
            with self._ending_if_lost(), _as_connection_lost():
                self._committed = self._broker.read_steps(self._job)
        record = self._committed.get(place)
        if record is None and len(self._committed) >= MAX_STEPS:
            raise InvalidStep(f"{block}: expected at most {MAX_STEPS:,} steps in a job")
        if record is not None and record.kind != block.kind:
            raise InvalidStep(f"{block}: an earlier run had a block of another kind with this name; choose another one")
        self._entered.add(place)
        return record

    @contextmanager
    def opened(self, block: Block) -> Iterator[None]:
        """Refuse other blocks until this one has ended."""
        self._open = block
        try:
            yield
        finally:
            self._open = None

    def end(self, reason: FaktoryError | Later) -> NoReturn:
        """End the run; each later block ends it again."""
        self._ended = reason
        if isinstance(reason, Later):
            raise reason
        self.control.end(reason)

    def refuse_transaction(self, block: Block) -> None:
        """Raise InvalidStep in a transaction, and FaktoryError if the jobs are elsewhere."""
        with _as_connection_lost(), self._broker.atomic() as transaction:
            _refuse_outer(transaction, block)

    def find_signal(self, block: Block) -> tuple[int, str] | None:
        """Return id and payload of the oldest signal with the name of this wait. Raises as `refuse_transaction`."""
        with _as_connection_lost(), self._broker.atomic() as transaction:
            _refuse_outer(transaction, block)
            return self._broker.find_signal(self._job, block.name)

    def take_signal(self, signal_id: int) -> None:
        """Delete a signal inside `committing`."""
        self._broker.take_signal(signal_id)

    def result_of(self, step: Step) -> Any:
        """Return the result of a committed step."""
        text = self.read_result(step)
        return None if text is None else self.unseal(text)

    def read_result(self, block: Block) -> str | None:
        """Return what was recorded of a step or wait, as `seal` wrote it."""
        with self._ending_if_lost(), _as_connection_lost():
            return self._broker.read_step_result(self._job, block.name, block.key)

    @contextmanager
    def committing(self, block: Block, build_record: Callable[[], StepRecord]) -> Iterator[None]:
        """Commit what the `with` block writes and the record together, or neither."""
        transaction = Transaction()
        try:
            with self._ending_if_lost(), _as_connection_lost(), self._broker.atomic() as transaction:
                _refuse_outer(transaction, block)
                yield
                record = build_record()
                self._broker.record_step(self._job, record)
        except Exception:
            # Once committed, the error came from an on_commit hook, and the step is done.
            if not transaction.is_committed:
                raise
            logger.exception(
                "step is done, but a hook that ran after its commit failed jid=%s %s", self._job.jid, block
            )
        if not (transaction.is_committed or transaction.is_nested):
            raise TransactionManagementError(
                f"{block} was not committed: its block left a transaction open, or autocommit is off"
            )
        self.conclude(record)

    @contextmanager
    def _ending_if_lost(self) -> Iterator[None]:
        """End the run if the job is no longer this worker's, now and at each further step."""
        try:
            yield
        except ReservationLost as error:
            self.end(error)

    def conclude(self, record: StepRecord) -> None:
        """Note that this is committed."""
        self.control.has_progressed = True
        if self._committed is not None:
            self._committed[record.name, record.key] = record

    def seal(self, value: Any) -> str:
        """Return the JSON of a value, encrypted if the arguments of the job are."""
        return encode_json(encryption.encrypt_value(value) if self._is_encrypted else value)

    def unseal(self, text: str) -> Any:
        """Return the value of `seal`."""
        value = jsontext.decode(text)
        return encryption.decrypt_value(value) if self._is_encrypted else value


@contextmanager
def _as_connection_lost() -> Iterator[None]:
    """Raise ConnectionLost for a database that is not available: CannotBegin would mean that the job has not begun."""
    try:
        yield
    except (BrokerUnavailable, CannotBegin) as error:
        raise ConnectionLost(str(error)) from error


def _refuse_outer(transaction: Transaction, block: Block) -> None:
    if transaction.is_nested and not transaction.is_in_test:
        raise InvalidStep(f"{block}: a transaction is open; expected none, because a step commits")


def check_name(kind: str, name: object) -> str:
    """Return the name of a step or walk. Raises InvalidStep."""
    if not is_step_name(name):
        raise InvalidStep(f"{kind}: expected a name of 1 to {MAX_STEP_NAME} printable characters, got {name!r:.80}")
    return name


def check_place(kind: str, name: object, key: object) -> tuple[str, str]:
    """Return the name and the key of a block. Raises InvalidStep."""
    text = "" if key is None else str(key)
    if len(text) > MAX_KEY or not text.isprintable():
        raise InvalidStep(f"{kind} {name!r}: expected a key of at most {MAX_KEY} printable characters, got {key!r:.80}")
    return check_name(kind, name), text


def encode_payload(value: Any, *, is_encrypted: bool) -> str:
    """Return the JSON of a signal's payload, encrypted if the arguments of its job are. Raises InvalidPayload."""
    try:
        payload = normalize_result(value)
    except (TypeError, *ENCODING_ERRORS) as error:
        raise InvalidPayload(f"payload: {error}") from error
    return encode_json(encryption.encrypt_value(payload) if is_encrypted else payload)


def refuse_coroutine(block: Block, instead: str) -> None:
    """Raise InvalidStep in a thread with a running event loop."""
    try:
        async_unsafe(lambda: None)()
    except SynchronousOnlyOperation:
        raise InvalidStep(f"{block}: a coroutine cannot query the database; {instead}") from None


class Step:
    """A step, for `with context.step("name") as step:`. The block is skipped if an earlier run has committed it."""

    kind = "step"

    def __init__(self, steps: Steps, name: str, key: object) -> None:
        self.name, self.key = check_place("step", name, key)
        self.result: Any = None
        """What the step returns, now and in later runs: a value that JSON can represent, at most 1 MB."""
        self._steps = steps
        self._began_at = time.monotonic()
        self._skipper: Skipper | None = None
        self._stack = ExitStack()

    def __str__(self) -> str:
        return f"step {self.name!r}" + (f" with key {self.key!r:.80}" if self.key else "")

    @property
    def once_key(self) -> str:
        """A text that is the same in each run of the job, and differs for each other step: for payment providers."""
        return self._steps.once_key(self)

    def build_record(self) -> StepRecord:
        """Return what to record at the end of its transaction. Raises InvalidStep."""
        return StepRecord(
            name=self.name, key=self.key, result=self._encode_result(), ran_s=time.monotonic() - self._began_at
        )

    def _encode_result(self) -> str | None:
        if self.result is None:
            return None
        try:
            # What a later run gets, so that both runs continue with the same.
            self.result = normalize_result(self.result)
            size = len(encode_json(self.result).encode("utf-8", "surrogatepass"))
        except (TypeError, InvalidPayload, *ENCODING_ERRORS) as error:
            raise InvalidStep(f"{self}: result: {error}") from error
        if size > MAX_STEP_BYTES:
            raise InvalidStep(f"{self}: result: expected at most {MAX_STEP_BYTES:,} bytes of JSON, got {size:,}")
        return self._steps.seal(self.result)

    def __enter__(self) -> Step:
        refuse_coroutine(self, f"write `await context.astep({self.name!r}, function, …)`")
        frame = sys._getframe(1)  # noqa: SLF001  (documented)
        block = find_block(frame)
        if block is None:
            raise InvalidStep(
                f"{self}: a later run could not skip its block: write it as `with context.step(…) as step:` alone, and "
                "begin the block on the next line, not with `try:` or `pass`"
            )
        if self._steps.enter(self) is not None:
            self.result = self._steps.result_of(self)
            self._skipper = Skipper(frame, block)
            self._skipper.begin()
        else:
            self._began_at = time.monotonic()
            self._stack.enter_context(self._steps.opened(self))
            self._stack.enter_context(self._steps.committing(self, self.build_record))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._skipper is None:
            return bool(self._stack.__exit__(kind, error, trace))
        if self._skipper.end(kind):
            return True
        raise InvalidStep(f"{self}: it is recorded, and its block was not skipped") from error
