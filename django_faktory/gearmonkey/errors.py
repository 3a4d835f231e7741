"""What may go wrong between us and a GearMonkey server, beside the package's own errors."""

from __future__ import annotations

from ..errors import FaktoryError


class GearMonkeyError(FaktoryError):
    """Base of the errors of GearMonkey."""


class NoWorkers(GearMonkeyError):
    """The roll call found no worker for this function; no job was made."""

    def __init__(self, fn: str, answer: str) -> None:
        super().__init__(f"roll call for {fn!r}: expected one worker or more, got {answer}; no job was made")
        self.fn = fn


class JobCreationFailed(GearMonkeyError):
    """The server did not answer with a job's id. Where its answer was lost, the job may be there all the same."""


class JobTimeout(GearMonkeyError):
    """A blocking run did not end in time. The job goes on: `Client.get(fn, id)` tells how."""

    def __init__(self, fn: str, id: int, timeout_s: float) -> None:
        super().__init__(f"job {fn}:{id} did not end within {timeout_s:g} s; it goes on")
        self.fn = fn
        self.id = id


class UnusableServer(GearMonkeyError):
    """This Redis, or the way to it, cannot be used for GearMonkey; the message says what to change."""


class RemoteFailure(GearMonkeyError):
    """A job that a worker elsewhere carried out ended with an error; the message is its output."""
