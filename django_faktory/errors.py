"""The one exception tree: what may go wrong, whose fault it is, and its code on the wire.

Pure: no Django, no I/O. Every message is one line that says what was expected, what came
and what to do. `code` is the RESP error code (`-CODE message`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # the supervisor, which imports this, does without `typing` (ADR 0012)
if TYPE_CHECKING:
    from typing import Any


class FaktoryError(Exception):
    """Base of every error this package raises on purpose."""

    code = "ERR"


class InvalidPayload(FaktoryError):
    """A job, a command's argument or an answer does not have the shape the protocol asks for."""

    def __init__(self, message: str, *, jid: str = "") -> None:
        super().__init__(message)
        self.jid = jid


class ProtocolError(FaktoryError):
    """The peer broke the protocol; after this the connection cannot be trusted and is closed."""


class UnknownCommand(FaktoryError):
    """A verb this server does not know; the connection stays usable (W5)."""


class AuthenticationFailed(ProtocolError):
    """Wrong or missing password."""


class JobNotFound(FaktoryError):
    """No stored job has this jid."""

    def __init__(self, jid: str) -> None:
        super().__init__(f"Job not found {jid}")
        self.jid = jid


class InvalidCron(FaktoryError):
    """A cron entry's field is wrong; the message begins with its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotUnique(FaktoryError):
    """Another job with the same task, arguments and queue holds the lock that `unique_for` asks for (W27).

    `results` is set by `enqueue_many`: for each call its TaskResult, None for the refused ones.
    """

    code = "NOTUNIQUE"

    def __init__(self, jid: str = "") -> None:
        super().__init__("Job not unique")
        self.jid = jid
        self.results: list[Any] = []


class UnknownWorker(FaktoryError):
    """No worker with this wid is registered: it never said HELLO, or it was given up as lost."""

    def __init__(self, wid: str) -> None:
        super().__init__(f"unknown worker {wid}")
        self.wid = wid


class UnknownBatch(FaktoryError):
    """No batch with this id is stored: it never was, or it ended long ago."""

    def __init__(self, bid: str) -> None:
        super().__init__(f"no such batch {ascii(bid[:255])[1:-1]}")
        self.bid = bid


class BatchClosed(FaktoryError):
    """Nothing can be added to this batch, or not by who asks; the message says why."""

    def __init__(self, bid: str, reason: str) -> None:
        super().__init__(f"batch {bid}: {reason}")
        self.bid = bid


class BrokerUnavailable(FaktoryError):
    """The database or the Faktory server cannot be reached just now; nothing was changed."""


class LockTimeout(BrokerUnavailable):
    """Another transaction held a lock that the verb needs, for longer than the caller waits; nothing was changed."""


class CommandRefused(FaktoryError):
    """The Faktory server answered `-CODE message` to a command."""

    def __init__(self, message: str, *, code: str = "ERR") -> None:
        super().__init__(message)
        self.code = code


class InvalidQuery(FaktoryError):
    """A query for jobs cannot be read (`docs/queries.md`)."""

    at: int | None = None
    """Where in the text, in characters from 0: the beginning of what is wrong."""
    field = "query"
    """What the text was given as."""


class UnknownJobType(FaktoryError):
    """No task is registered under this jobtype; nothing is ever imported because a job named it."""


class ReservationExpired(FaktoryError):
    """How results tell, by this name, that a job was held longer than its `reserve_for` (W19). Never raised."""


class JobExpired(FaktoryError):
    """How results tell, by this name, that no worker took a job in time (W27). Never raised."""


class WorkerLost(FaktoryError):
    """How results tell, by this name, that a job's worker process was lost (W20). Never raised."""


class ReservationLost(FaktoryError):
    """An atomic task ended after its job had been given to another worker: what it wrote was rolled back."""


class TaskTimeout(FaktoryError):
    """A task ran longer than its `timeout`: stopped, and the job failed."""


class WorkerShutdown(FaktoryError):
    """The worker stopped before the task ended: its job goes back to its queue, and no attempt is used up."""


class MissingObject(FaktoryError):
    """A model instance that is an argument of the task does not exist any more."""


class CannotEncrypt(FaktoryError):
    """Arguments or a result should be encrypted, and cannot be; the message says what is missing."""


class CannotDecrypt(FaktoryError):
    """What was encrypted cannot be read here: a key or a package is missing. The job runs again later."""


class InvalidTransition(FaktoryError):
    """A job in this state cannot undergo this event (see `lifecycle.TRANSITIONS`)."""


class TaskControl(FaktoryError):
    """Raised by a task to say what becomes of its job; not a failure of the worker."""


class Retry(TaskControl):
    """Run this job again `in_s` seconds from now; it counts as a failed attempt.

    `in_s=None` keeps the usual backoff. When no attempts are left the job goes to dead.
    """

    def __init__(self, reason: str = "the task asked for a retry", *, in_s: float | None = None) -> None:
        if in_s is not None and in_s < 0:
            raise ValueError(f"Retry: in_s must be 0 or more seconds, got {in_s!r}")
        super().__init__(reason)
        self.in_s = in_s


class Discard(TaskControl):
    """Drop this job without a retry: it failed, and nobody needs to look at it."""


class Kill(TaskControl):
    """Send this job to the dead set at once, whatever attempts are left."""


class InvalidArgument(Kill):
    """An argument's reference cannot be read (`docs/arguments.md`): no retry can mend what is written."""


class Cancelled(Discard):
    """Somebody cancelled this job while it ran."""
