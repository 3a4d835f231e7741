"""Errors of GearMonkey, in addition to the package's own errors."""

from __future__ import annotations

from ...errors import FaktoryError


class GearMonkeyError(FaktoryError):
    """Base of the errors of GearMonkey."""


class NoWorkers(GearMonkeyError):
    """The roll call found no worker for this function; no job was created."""

    def __init__(self, fn: str, reply: str) -> None:
        super().__init__(f"roll call for {fn!r}: expected one worker or more, got {reply}; no job was created")
        self.fn = fn


class JobCreationFailed(GearMonkeyError):
    """The server did not reply with a job id. If only the reply was lost, the job may exist nevertheless."""


class JobTimeout(GearMonkeyError):
    """A blocking run did not end in time. The job continues: `Client.get(fn, id)` returns its state."""

    def __init__(self, fn: str, id: int, timeout_s: float) -> None:
        super().__init__(f"job {fn}:{id} did not end within {timeout_s:g} s; it continues")
        self.fn = fn
        self.id = id


class UnusableServer(GearMonkeyError):
    """This Redis, or its URL, cannot be used for GearMonkey; the message says what to change."""


class RemoteFailure(GearMonkeyError):
    """A job executed by a remote worker ended with an error; the message is its output."""
