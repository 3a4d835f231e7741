"""Define the contents of a run: nodes, workers, clients, jobs, limit changes, faults. Uses no Django and no store."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

SETTINGS = {
    "POLL_INTERVAL": 0.2,
    "BEAT_INTERVAL": 0.5,
    "WORKER_TIMEOUT": 6,
    "SHUTDOWN_TIMEOUT": 1.5,
    "DATABASE_TIMEOUT": 3,
    "BATCH_COMMIT_WITHIN": 60,
    "LOCKET": {"HEARTBEAT_FREQUENCY": 1, "JOB_LOCK_DURATION": 6},
}
"""Settings of the nodes and workers."""

PRODUCER_SETTINGS = SETTINGS | {"RESERVE_FOR": 2}
"""Settings of the Django processes that enqueue.

`runfaktory` rejects a reservation below 60 s. Here it is 2 s, so that a job that outlives its reservation takes
seconds instead of minutes. A longer reservation only hides defects.
"""

LONG_S = 7.0
"""Seconds a long job runs: more than a reservation of RESERVE_FOR plus the 5 s within which its expiry is noticed."""

HOLD_S = 5.0
"""Seconds for which a transaction of the project holds a unique key: longer than DATABASE_TIMEOUT."""

HELD_KEY = 0
"""The unique key that the transaction holds; jobs with other keys must not be delayed."""

LOCK_KEYS, UNIQUE_KEYS, LIMIT_KEY = 4, 30, "shared"

STEADY_LIMIT = 3
"""Value of limits that never change, and of every limit at the end of a run."""

TASKS = "tests.outside.tasks"
WRITE, WORK, LONG = f"{TASKS}.write", f"{TASKS}.work", f"{TASKS}.long"


NOTHING: Mapping[str, int] = MappingProxyType({})


class Profile(NamedTuple):
    """Map each kind of job or fault to its relative frequency.

    Django processes enqueue `jobs`, and clients push `wire` over the protocol.
    """

    jobs: Mapping[str, int] = NOTHING
    wire: Mapping[str, int] = NOTHING
    faults: Mapping[str, int] = NOTHING
    limits: tuple[tuple[str, str], ...] = ()
    """Scope and name of each limit that changes."""
    is_limit_steady: bool = False
    """True if the limits are only set again, always to the same number."""
    limit_pause_s: tuple[float, float] = (0.3, 2.5)
    holds: bool = False
    """True if a transaction of the project holds a unique key from time to time.

    Then the first client sometimes pushes that key, and the second client pushes only plain jobs: the time until their
    answers shows whether they are delayed.
    """
    stutters: bool = False
    """True if one server at a time is suspended for some milliseconds, throughout the run."""
    nodes: int = 2
    pools: int = 1
    processes: int = 2
    concurrency: int = 4
    consumers: int = 2
    threads: int = 4
    """Threads per consumer; each thread is a separate worker."""
    pushers: int = 2
    enqueuers: int = 2
    long_s: float = LONG_S
    worker_timeout_s: int = 6
    most_ahead: int = 40
    """Producers pause while more jobs than this wait."""


MIX = Profile(
    jobs={"work": 8, "write": 8, "long": 1, "locked": 4, "unique": 4, "later": 3, "fails": 2, "many": 2, "batch": 2,
          "undone": 1, "stepped": 4},
    wire={"plain": 8, "bulk": 2, "lock": 4, "limit": 4, "both": 4, "unique": 6, "later": 2, "fails": 2, "batch": 2,
          "task": 3},
    faults={"kill_worker": 3, "stop_pool": 3, "kill_consumer": 2, "freeze_worker": 1, "freeze_consumer": 1,
            "kill_node": 2, "stop_node": 1, "freeze_node": 1, "end_sessions": 4},
    limits=(("task", WRITE), ("task", WORK), ("key", LIMIT_KEY)),
    holds=True,
)  # fmt: skip
"""All kinds of jobs, limits and faults at the same time."""

LIMITS_CHANGE = Profile(
    jobs={"write": 10, "work": 2, "many": 2},
    limits=(("task", WRITE), ("task", WORK)),
    limit_pause_s=(0.05, 0.4),
    nodes=1,
    consumers=0,
    pushers=0,
    concurrency=8,
    most_ahead=60,
)
"""Limits are set, changed, paused and removed while atomic tasks run."""

LIMITS_AND_LOCKS = Profile(
    wire={"both": 2, "limit": 1},
    limits=(("key", LIMIT_KEY),),
    is_limit_steady=True,
    stutters=False,
    limit_pause_s=(0.1, 0.3),
    nodes=2,
    pools=0,
    consumers=2,
    threads=8,
    pushers=2,
    enqueuers=0,
    most_ahead=30,
)
"""One limit and few locks, many clients on two nodes, while the limit's count is checked continuously."""

KEY_IS_HELD = Profile(
    jobs={"unique": 1},
    wire={"unique": 10, "plain": 6, "batch": 2},
    holds=True,
    nodes=1,
    consumers=1,
    pushers=4,
    enqueuers=0,
    most_ahead=20,
)
"""A transaction of the project holds a unique key while clients push unique jobs and batches."""

LONG_JOBS = Profile(
    jobs={"long": 3, "work": 4, "locked": 1},
    nodes=1,
    consumers=0,
    pushers=0,
    enqueuers=1,
    processes=2,
    worker_timeout_s=3,
    long_s=11.5,
    most_ahead=6,
)
"""Jobs that outlive their reservation (at least twice WORKER_TIMEOUT) on workers that stay alive."""

PROFILES = {
    "mix": MIX,
    "mix_on_three_nodes": MIX._replace(nodes=3),
    "limits_change": LIMITS_CHANGE,
    "limits_and_locks": LIMITS_AND_LOCKS,
    "key_is_held": KEY_IS_HELD,
    "long_jobs": LONG_JOBS,
}


def on(vendor, profile):
    """Return the profile with what this database can do."""
    if vendor == "mysql":
        # A transaction that reuses a unique key locks the gap next to it, so pushes of other keys wait for its end.
        return profile._replace(holds=False)
    return _on_sqlite(profile) if vendor == "sqlite" else profile


def _on_sqlite(profile):
    """Return the profile for one node and without session faults, because SQLite has no sessions."""
    faults = {name: times for name, times in profile.faults.items() if name != "end_sessions"}
    # A transaction that writes locks the whole file: other transactions wait for it whatever their keys are.
    return profile._replace(nodes=1, processes=1, holds=False, faults=faults, most_ahead=min(profile.most_ahead, 25))
