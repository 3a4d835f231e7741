"""Read the state of a server's functions: workers, queues, held jobs and jobs that look lost. Read-only.

`read_served_functions` feeds the admin page, `health` the health check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis, RedisCluster, ResponseError

from . import lua, protocol
from .requests import REDIS_ERRORS, unavailable

MAX_SHOWN = 200
"""Functions shown at most; also workers and lost jobs shown per function."""

SCANS, KEYS_A_SCAN = 50, 1000
"""Limits of one scan per node: SCAN calls and keys per call. Only string keys are inspected, by name."""


@dataclass(frozen=True, slots=True)
class FunctionStatus:
    """State of one function.

    `workers` are ours, each with the seconds until it counts as dead; `count` includes naive workers. `held` counts the
    jobs in our workers, `bridged` the jobs with a row, `overdue` the jobs with an expired lease. `lost` has the ids of
    idle jobs in no queue.
    """

    fn: str
    count: str
    workers: list[tuple[str, int]]
    queues: dict[str, int]
    held: int
    bridged: int
    overdue: int
    lost: list[str]
    trouble: str = ""
    """Why nothing could be read: the function's keys have other types."""

    @property
    def waiting(self) -> int:
        """Number of jobs in the queues, without keys that are no queue."""
        return sum(length for length in self.queues.values() if length > 0)


@dataclass(frozen=True, slots=True)
class Health:
    """State of all functions, and one sentence per problem."""

    functions: list[FunctionStatus]
    problems: list[str]
    is_complete: bool = True
    """False if there were too many keys or functions to read: functions of naive peers may be missing."""


def health(redis: Redis) -> Health:
    """Check every function served by our workers or counted by peers. Raises BrokerUnavailable."""
    try:
        names, is_complete = _function_names(redis)
        functions = _read_all(redis, names)
        policies = {redis.info("memory", **node).get("maxmemory_policy", "noeviction") for node in _nodes(redis)}
    except REDIS_ERRORS as error:
        raise unavailable(error) from error
    problems = [
        f"Redis may evict jobs: its maxmemory-policy is {policy}." for policy in sorted(policies - {"noeviction"})
    ]
    for function in functions:
        if function.trouble:
            problems.append(f"{function.fn}: its keys are not those of GearMonkey: {function.trouble}")
        # Peers count workers, and may write anything there.
        if function.waiting and not (function.count.isdecimal() and function.count.strip("0")):
            problems.append(f"{function.fn}: no running worker; jobs waiting: {function.waiting}.")
        if function.overdue:
            problems.append(
                f"{function.fn}: jobs of dead workers: {function.overdue}; no process of ours queues them again."
            )
        if function.lost:
            problems.append(f"{function.fn}: possibly lost jobs: {len(function.lost)}, idle and in no queue.")
    return Health(functions, problems, is_complete)


def read_served_functions(redis: Redis) -> list[FunctionStatus]:
    """Return the functions that our workers have served, by name."""
    return _read_all(redis, sorted(_served_names(redis))[:MAX_SHOWN])


def _read_all(redis: Redis, fns: list[str]) -> list[FunctionStatus]:
    now = redis.time(**_nodes(redis)[0])[0]
    functions = []
    for fn in fns:
        try:
            functions.append(_read_function(redis, fn, now))
        except ResponseError as error:  # another client wrote this key; show the other functions anyway
            functions.append(FunctionStatus(fn, "–", [], {}, 0, 0, 0, [], trouble=str(error)))
    return functions


def _nodes(redis: Redis) -> list[dict[str, Any]]:
    """Return the redis-py arguments that address each node with keys."""
    return [{"target_nodes": node} for node in redis.get_primaries()] if isinstance(redis, RedisCluster) else [{}]


def _served_names(redis: Redis) -> set[str]:
    return set(map(_text, redis.smembers(lua.FUNCTIONS_KEY)))


def _function_names(redis: Redis) -> tuple[list[str], bool]:
    """Return the functions to show by name, and whether the list is complete.

    Functions of peers are found by the specification's counters of ids and of workers, the only strings it writes.
    """
    own, others, is_complete = _served_names(redis), set(), True
    for node in _nodes(redis):
        cursor: Any = 0
        for _ in range(SCANS):
            cursor, keys = redis.scan(cursor, count=KEYS_A_SCAN, _type="string", **node)
            if isinstance(cursor, dict):  # the reply of a cluster, by node
                [cursor] = cursor.values()
            key_parts = (_text(key).partition(":") for key in keys)
            others |= {fn for prefix, _, fn in key_parts if fn and prefix in ("uid", "count")}
            if cursor == 0:
                break
        is_complete = is_complete and cursor == 0
    # Ours first: any client can create keys of this form, and they must not displace our functions.
    names = sorted(own)[:MAX_SHOWN] + sorted(others - own)
    return sorted(names[:MAX_SHOWN]), is_complete and len(names) <= MAX_SHOWN


def _read_function(redis: Redis, fn: str, now: int) -> FunctionStatus:
    queues = {prio: _length(redis, lua.queue_key(fn, prio)) for prio in (*protocol.LISTS, protocol.SCHEDULED)}
    # Members with lower scores are dead workers that are not removed yet.
    workers: list[Any] = redis.zrangebyscore(lua.registry_key(fn), now, "+inf", start=0, num=MAX_SHOWN, withscores=True)
    return FunctionStatus(
        fn=fn,
        count=_text(redis.get(lua.count_key(fn)) or b"0"),
        workers=[(_text(wid), int(until - now)) for wid, until in workers],
        queues=queues,
        held=redis.zcard(lua.lease_key(fn)),
        bridged=redis.zcard(lua.held_key(fn)),
        # Only leases expired for 10 s: a younger one is left to the next sweep and is no problem yet.
        overdue=redis.zcount(lua.lease_key(fn), "-inf", now - 10),
        lost=[_text(id_) for id_ in redis.zrange(lua.audit_key(fn), 0, MAX_SHOWN - 1)],
    )


def _length(redis: Redis, key: str) -> int:
    """Return the length, or -1 if the key is not a queue."""
    key_type = redis.type(key)
    if key_type == b"list":
        return int(redis.llen(key))
    if key_type == b"zset":
        return int(redis.zcard(key))
    return 0 if key_type == b"none" else -1


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
