"""All exceptions of this package, with their RESP error codes.

Pure: no Django, no I/O. Every message is one line that states the expected value, the actual value and the remedy.
`code` is the RESP error code (`-CODE message`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any


class FaktoryError(Exception):
    """Base of all exceptions that this package defines."""

    code = "ERR"  # as in the original server, except for NotUnique


class TranslatableError(FaktoryError):
    """An error that a page shows in its user's language; as a string it is English.

    `template` has placeholders for `values`, such as "expected a number, got %(value)s". A value may be an error too.
    """

    def __init__(self, template: str, **values: object) -> None:
        super().__init__(template % values if values else template)
        self.template, self.values = template, values


def translatable(text: str) -> str:
    """Mark a text for `scripts/translations.py`, like Django's `gettext_noop`, and return it unchanged."""
    return text


def quoted(value: object) -> str:
    """Return the repr of a value, cut to 80 characters for a message."""
    return f"{value!r:.80}"


class InvalidPayload(TranslatableError):
    """A job, a command's argument or a reply does not have the form the protocol requires."""

    def __init__(self, template: str, *, jid: str = "", **values: object) -> None:
        super().__init__(template, **values)
        self.jid = jid


class ProtocolError(FaktoryError):
    """The peer violated the protocol. The connection cannot be trusted any more and is closed."""


class UnknownCommand(FaktoryError):
    """The server does not know this command; the connection stays usable (W5)."""


# A protocol error, because the server closes the connection after it (W2).
class AuthenticationFailed(ProtocolError):
    """The password is wrong or missing."""


class JobNotFound(FaktoryError):
    """No stored job has this jid."""

    def __init__(self, jid: str) -> None:
        # The text of the original server, by which clients recognize it (W17).
        super().__init__(f"Job not found {jid}")
        self.jid = jid


class InvalidCron(TranslatableError):
    """A field of a cron entry is invalid; the message begins with the field's name, `template` does not."""

    def __init__(self, field: str, template: str, **values: object) -> None:
        super().__init__(template, **values)
        self.field, self.problem = field, str(self)
        self.args = (f"{field}: {self.problem}",)


class NotUnique(TranslatableError):
    """Another job has the unique key: the same task, arguments and queue, within its `unique_for`.

    `enqueue_many` sets `results`: the TaskResult of each call, None for the rejected ones. `jid` is that of the job
    that was rejected.
    """

    code = "NOTUNIQUE"

    def __init__(self, jid: str = "") -> None:
        # The original server's text, as in JobNotFound.
        super().__init__(translatable("Job not unique"))
        self.jid = jid
        self.results: list[Any] = []


class UnknownWorker(FaktoryError):
    """No worker with this wid is registered: it never sent HELLO, or it was declared lost."""

    def __init__(self, wid: str) -> None:
        super().__init__(f"unknown worker {wid}")
        self.wid = wid


class UnknownBatch(FaktoryError):
    """No batch with this id is stored: it never existed, or it ended more than BATCH_TTL seconds ago."""

    def __init__(self, bid: str) -> None:
        # The bid is client input: escaped and cut, so that the message stays one short line.
        super().__init__(f"no such batch {ascii(bid[:255])[1:-1]}")
        self.bid = bid


class BatchClosed(FaktoryError):
    """The caller cannot add jobs to this batch; the message gives the reason."""

    def __init__(self, bid: str, reason: str) -> None:
        super().__init__(f"batch {bid}: {reason}")
        self.bid = bid


class BrokerUnavailable(FaktoryError):
    """The database or the Faktory server is unreachable at the moment.

    Nothing was changed, unless the connection was lost during the commit. A job may be pushed again with the same jid.
    """


# A subclass, so that callers that repeat a command after an outage repeat this one too (ADR 0024).
class LockTimeout(BrokerUnavailable):
    """Another transaction held a required lock for longer than the caller waits; nothing was changed."""


class FunctionsMissing(FaktoryError):
    """The database lacks a stored function or a trigger of this version, or `migrate` could not create it.

    Nothing was changed.
    """


class CommandRefused(FaktoryError):
    """The Faktory server replied `-CODE message` to a command."""

    def __init__(self, message: str, *, code: str = "ERR") -> None:
        super().__init__(message)
        self.code = code


class InvalidQuery(TranslatableError):
    """A query for jobs cannot be parsed (`docs/queries.md`)."""

    at: int | None = None
    """Position of the error in the text, in characters from 0."""
    field = "query"
    """The parameter in which the query was given."""


class UnknownJobType(FaktoryError):
    """No task is registered under this jobtype. The name in a job never causes an import."""


class ReservationExpired(FaktoryError):
    """A job was held longer than its `reserve_for` (W19). Never raised: only its name appears in results."""


class JobExpired(FaktoryError):
    """A job waited past its `expires_in` (W27). Never raised: only its name appears in results."""

    REASON = "it waited past its expires_in, for its first attempt or for a retry"


class WorkerLost(FaktoryError):
    """A job's worker process was lost (W20). Never raised: only its name appears in results."""


class ReservationLost(FaktoryError):
    """The job was given to another worker before its atomic task, or a step of it, had ended: nothing is committed."""


class WorkerTrouble(FaktoryError):
    """Base of the errors that interrupt a job: its task has done nothing wrong, so no attempt is used (ADR 0025)."""

    summary = ""
    """Text for the job's history."""


class EndRolledBack(WorkerTrouble):
    """The database rolled back an atomic task because of another transaction (a deadlock or a lock timeout)."""

    summary = "rolled back by the database"


class CannotBegin(WorkerTrouble):
    """The worker could not run the first line of a task, for example because it got no database connection."""

    summary = "not begun: its worker had no database connection"


class ConnectionLost(WorkerTrouble):
    """A database refused a task a connection, or ended that of an atomic task and so rolled back what it wrote."""

    summary = "it lost its database connection, or got none"


class TaskTimeout(FaktoryError):
    """The failure of a job that ran longer than its `timeout` and was stopped; for `retry_on` and `discard_on`."""


class ResultTimeout(FaktoryError, TimeoutError):
    """A job did not end while `result.wait` waited for it. The job itself is not affected."""


class WorkerShutdown(FaktoryError):
    """The worker stopped before the task ended. The job returns to its queue and no attempt is used up."""


class MissingObject(FaktoryError):
    """The failure of a job with an argument that refers to a deleted row; for `retry_on` and `discard_on`."""


class CannotEncrypt(FaktoryError):
    """Arguments or a result must be encrypted, but cannot be; the message names the missing part."""


class CannotDecrypt(FaktoryError):
    """Encrypted data cannot be read here: a key or a package is missing. The job runs again later."""


class InvalidTransition(TranslatableError):
    """A job in this state cannot undergo this event (see `lifecycle.TRANSITIONS`)."""


class TaskControl(FaktoryError):
    """Base of the exceptions by which a task decides the outcome of its job. Not a failure of the worker."""


class Retry(TaskControl):
    """Run this job again `in_s` seconds from now, 0 or more; it counts as a failed attempt, with this `reason`.

    Without `in_s`, after the usual backoff. If no attempts are left, the job is dead.
    """

    def __init__(self, reason: str = "the task asked for a retry", *, in_s: float | None = None) -> None:
        if in_s is not None and in_s < 0:
            raise ValueError(f"Retry: in_s must be 0 or more seconds, got {in_s!r}")
        super().__init__(reason)
        self.in_s = in_s


class Discard(TaskControl):
    """Drop this job without a retry: it has failed and needs no attention. The text is kept as the reason."""


class Kill(TaskControl):
    """Make this job dead at once, even if attempts are left. The text is kept as the reason."""


LONGEST_WAIT_S = 10 * 365 * 86_400
"""Longest time for which a task may defer its job (10 years): dates have a maximum."""


class Later(BaseException):
    """End this run, and run the job again after this time, in the units of `timedelta`: `raise Later(minutes=5)`.

    It uses no attempt. Not an Exception, so that `except Exception` of the task does not catch it.
    """

    pause: tuple[str, str] | None = None
    waits_for: str | None = None

    def __init__(self, **duration: float) -> None:
        self.in_s: float | None = wait_s(timedelta(**duration))
        super().__init__(f"runs again after {self.in_s:g} s")


def wait_s(duration: timedelta | float) -> float:
    """Return how many seconds a job is deferred. Raises ValueError."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not 0 <= seconds <= LONGEST_WAIT_S:
        raise ValueError(f"expected a time of 0 seconds to 10 years, got {duration!r}")
    return seconds


class WaitTimedOut(FaktoryError, TimeoutError):
    """No signal came before the time-out of `wait_for`. Each later run raises it again."""


class InvalidStep(Kill):
    """A step is used in a way that cannot work (`docs/long-jobs.md`). A retry would fail the same way."""


class InvalidArgument(Kill):
    """An argument's reference cannot be decoded (`docs/arguments.md`). A retry would fail the same way."""


class InvalidResult(Kill):
    """The database refuses a task's result. A retry would fail the same way."""


# A kind of discard: a job that a person cancelled is neither retried nor kept among the dead.
class Cancelled(Discard):
    """The job was cancelled while it ran."""
