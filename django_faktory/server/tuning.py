"""Times and sizes of a server that are no settings: no project has to change them, but a test needs smaller ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Times in seconds and sizes of one `Server`."""

    # --- connections ---

    write_buffer_bytes: int = 4 * 1024 * 1024
    """Unsent bytes above which no further command of the client is executed."""

    slow_reader_s: float = 30.0
    """Time without progress of the client in reading its replies before the connection is aborted."""

    half_closed_s: float = 1.0
    """Time that a connection stays half open so that its client can read the last reply."""

    spare_handshakes: int = 100
    """TLS handshakes beyond MAX_CONNECTIONS, so that rejected clients can read the error (W8) over TLS."""

    long_lines_bytes: int = 4 * 1024 * 1024
    """Bytes of lines above 64 KiB that are parsed and executed at a time, or one longer line."""

    # --- FETCH ---

    fetch_wait_s: float = 2.0
    """Time after which a FETCH without a job is answered with null (W13)."""

    hold_s: float = 0.05
    """Time that a job stays in the prefetch buffer before it is released to its old place in the queue."""

    low_watermark: int = 1
    """Refill the prefetch buffer when it has this number of jobs of a queue."""

    trust_s: float = 0.1
    """Time that a worker may take prefetched jobs after the database reported that it is neither quiet nor ending."""

    confirm_s: float = 0.25
    """Time (up to 1.5 times this) until a prefetched job is confirmed; until then its row does not name its worker."""

    confirm_claimed_s: float = 2.0
    """Time (up to 1.5 times this) until a job that was claimed for its client is confirmed.

    Most jobs have ended by then and need no statement. A job delivered less than this before its node is killed runs
    again when its lease ends, unless its worker sends a BEAT to another node."""

    # --- commits and the end of the server ---

    bulk_pause: float = 4.0
    """Pause of the bulk queue as a multiple of the time that the set took."""

    max_bulk_pause_s: float = 2.0
    """Maximum pause of the bulk queue. On a slow disk a set takes long too, and longer pauses would help no client."""

    release_again_s: float = 1.0
    """Time between attempts to release jobs while the database is unavailable."""

    last_replies_s: float = 3.0
    """Time that a stopping server waits for clients to read their last replies."""


DEFAULT_TUNING = Tuning()
