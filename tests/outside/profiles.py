"""What a run consists of: nodes, workers, clients, jobs, changes of limits, and faults. Knows no Django, no store."""

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
"""Of nodes and workers."""

PRODUCER_SETTINGS = SETTINGS | {"RESERVE_FOR": 2}
"""Of the Django processes that enqueue. `runfaktory` accepts no reservation below 60 s: here it is shorter, so that a
job which outlives its reservation takes seconds and not minutes. A longer reservation only hides defects."""

LONG_S = 7.0
"""Longer than a reservation of RESERVE_FOR, plus the 5 s within which its end is noticed."""

HOLD_S = 5.0
"""For which a transaction of the project holds a unique key: longer than DATABASE_TIMEOUT."""

HELD_KEY = 0
"""The unique key that the transaction holds; other keys must not notice it."""

LOCK_KEYS, UNIQUE_KEYS, LIMIT_KEY = 4, 30, "shared"

STEADY_LIMIT = 3
"""Of limits that are only set again, and of all at the end."""

TASKS = "tests.outside.tasks"
WRITE, WORK, LONG = f"{TASKS}.write", f"{TASKS}.work", f"{TASKS}.long"


NOTHING: Mapping[str, int] = MappingProxyType({})


class Profile(NamedTuple):
    """`jobs` and `wire` are kinds of jobs and how often each is chosen, by Django processes and by clients over the
    wire; `faults` are kinds of faults and how often each is chosen."""

    jobs: Mapping[str, int] = NOTHING
    wire: Mapping[str, int] = NOTHING
    faults: Mapping[str, int] = NOTHING
    limits: tuple[tuple[str, str], ...] = ()
    """Scopes and names of the limits that change."""
    is_limit_steady: bool = False
    """Whether the limits are only set again and again, always to the same number."""
    limit_pause_s: tuple[float, float] = (0.3, 2.5)
    holds: bool = False
    """Whether a transaction of the project holds a unique key now and then. Then the first client pushes that key now
    and then, and the second one only plain jobs: their answers meanwhile show whether others are held up."""
    stutters: bool = False
    """Whether the servers stand still for some milliseconds, all the time."""
    nodes: int = 2
    pools: int = 1
    processes: int = 2
    concurrency: int = 4
    consumers: int = 2
    threads: int = 4
    """Of each consumer; each thread is a worker of its own."""
    pushers: int = 2
    enqueuers: int = 2
    long_s: float = LONG_S
    worker_timeout_s: int = 6
    most_ahead: int = 40
    """Producers pause while more jobs wait."""


MIX = Profile(
    jobs={"work": 8, "write": 8, "long": 1, "locked": 4, "unique": 4, "later": 3, "fails": 2, "many": 2, "batch": 2,
          "undone": 1},
    wire={"plain": 8, "bulk": 2, "lock": 4, "limit": 4, "both": 4, "unique": 6, "later": 2, "fails": 2, "batch": 2,
          "task": 3},
    faults={"kill_worker": 3, "stop_pool": 3, "kill_consumer": 2, "freeze_worker": 1, "freeze_consumer": 1,
            "kill_node": 2, "stop_node": 1, "freeze_node": 1, "end_sessions": 4},
    limits=(("task", WRITE), ("task", WORK), ("key", LIMIT_KEY)),
    holds=True,
)  # fmt: skip
"""Everything at once."""

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
"""Limits are set, changed, paused and removed under atomic tasks that run."""

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
"""One limit and few locks, many clients on two nodes, while the count of the limit is checked all the time."""

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
"""A transaction of the project holds a unique key while others push unique jobs and batches."""

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
"""Jobs that outlive their reservation, which is twice WORKER_TIMEOUT at least, on workers that live."""

PROFILES = {
    "mix": MIX,
    "mix_on_three_nodes": MIX._replace(nodes=3),
    "limits_change": LIMITS_CHANGE,
    "limits_and_locks": LIMITS_AND_LOCKS,
    "key_is_held": KEY_IS_HELD,
    "long_jobs": LONG_JOBS,
}


def on_sqlite(profile):
    """The same on one node, without faults of sessions: SQLite has none."""
    faults = {name: times for name, times in profile.faults.items() if name != "end_sessions"}
    # A transaction that writes holds the whole file: others wait for it, whatever their keys.
    return profile._replace(nodes=1, processes=1, holds=False, faults=faults, most_ahead=min(profile.most_ahead, 25))
