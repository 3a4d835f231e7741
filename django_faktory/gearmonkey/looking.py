"""How the functions of a server are doing: workers, queues, what is held, what looks lost. Changes nothing.

Knows no page; the admin shows it, and `health` says what somebody should look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis, RedisCluster, ResponseError

from . import scripts, wire
from .core import REDIS_ERRORS, unavailable

MOST = 200
"""Functions, workers of one, lost jobs of one that are shown."""

SCANS, KEYS_A_SCAN = 50, 1000
"""What one look at a node costs at most; the strings among its keys are looked at by name."""


@dataclass(frozen=True, slots=True)
class FunctionLook:
    """One function. `workers` are ours with the seconds until they count as dead; `count` has naive ones too."""

    fn: str
    count: str
    workers: list[tuple[str, int]]
    queues: dict[str, int]
    held: int
    bridged: int
    overdue: int
    lost: list[str]
    trouble: str = ""
    """Why nothing of it could be read: its keys are of other kinds."""

    @property
    def waiting(self) -> int:
        """Jobs in queues."""
        return sum(self.queues.values())


@dataclass(frozen=True, slots=True)
class Health:
    """What was seen, and what is wrong with it: a sentence each."""

    functions: list[FunctionLook]
    problems: list[str]
    is_whole: bool = True
    """False where there were too many keys, or functions, to look at all: naive peers' may be missing."""


def health(redis: Redis) -> Health:
    """Look at every function that a worker of ours has served, and at those that peers count. Raises
    BrokerUnavailable."""
    try:
        names, is_whole = _names(redis)
        functions = _look_at(redis, names)
        policies = {redis.info("memory", **node).get("maxmemory_policy", "noeviction") for node in _nodes(redis)}
    except REDIS_ERRORS as error:
        raise unavailable(error) from error
    problems = [f"Redis may evict jobs: its maxmemory-policy is {one}." for one in sorted(policies - {"noeviction"})]
    for seen in functions:
        if seen.trouble:
            problems.append(f"{seen.fn}: its keys are not those of GearMonkey: {seen.trouble}")
        if seen.waiting and not (seen.count.isdecimal() and seen.count.strip("0")):
            problems.append(f"{seen.fn}: {seen.waiting} jobs wait, and no worker is there.")
        if seen.overdue:
            problems.append(
                f"{seen.fn}: {seen.overdue} jobs of dead workers wait for a sweep: no process of ours is there."
            )
        if seen.lost:
            problems.append(f"{seen.fn}: {len(seen.lost)} jobs look lost: idle, and in no queue.")
    return Health(functions, problems, is_whole)


def look(redis: Redis) -> list[FunctionLook]:
    """The functions that a worker of ours has served, by name."""
    return _look_at(redis, sorted(_served(redis))[:MOST])


def _look_at(redis: Redis, fns: list[str]) -> list[FunctionLook]:
    now = redis.time(**_nodes(redis)[0])[0]
    return [_look_safely(redis, fn, now) for fn in fns]


def _look_safely(redis: Redis, fn: str, now: int) -> FunctionLook:
    try:
        return _look(redis, fn, now)
    except ResponseError as error:  # whoever writes to this Redis may write anything; the others are shown all the same
        return FunctionLook(fn, "–", [], {}, 0, 0, 0, [], trouble=str(error))


def _nodes(redis: Redis) -> list[dict[str, Any]]:
    """How to ask each node that has keys."""
    return [{"target_nodes": node} for node in redis.get_primaries()] if isinstance(redis, RedisCluster) else [{}]


def _served(redis: Redis) -> set[str]:
    return set(map(_text, redis.smembers(scripts.FUNCTIONS_KEY)))


def _names(redis: Redis) -> tuple[list[str], bool]:
    """Functions to show, and whether they are all. Ours come first; a peer tells of its own by the text's counters,
    of ids and of workers, which are the only strings that it writes."""
    ours, theirs, is_whole = _served(redis), set(), True
    for node in _nodes(redis):
        cursor: Any = 0
        for _ in range(SCANS):
            cursor, keys = redis.scan(cursor, count=KEYS_A_SCAN, _type="string", **node)
            if isinstance(cursor, dict):  # a cluster's answer, by node
                [cursor] = cursor.values()
            named = (_text(key).partition(":") for key in keys)
            theirs |= {fn for kind, _, fn in named if fn and kind in ("uid", "count")}
            if cursor == 0:
                break
        is_whole = is_whole and cursor == 0
    found = sorted(ours)[:MOST] + sorted(theirs - ours)
    return sorted(found[:MOST]), is_whole and len(found) <= MOST


def _look(redis: Redis, fn: str, now: int) -> FunctionLook:
    queues = {prio: _length(redis, scripts.queue_key(fn, prio)) for prio in (*wire.LISTS, wire.SCHEDULED)}
    workers: list[Any] = redis.zrangebyscore(scripts.registry_key(fn), now, "+inf", start=0, num=MOST, withscores=True)
    return FunctionLook(
        fn=fn,
        count=_text(redis.get(scripts.count_key(fn)) or b"0"),
        workers=[(_text(wid), int(until - now)) for wid, until in workers],
        queues=queues,
        held=redis.zcard(scripts.lease_key(fn)),
        bridged=redis.zcard(scripts.held_key(fn)),
        overdue=redis.zcount(scripts.lease_key(fn), "-inf", now - 10),
        lost=[_text(id_) for id_ in redis.zrange(scripts.audit_key(fn), 0, MOST)],
    )


def _length(redis: Redis, key: str) -> int:
    """-1 for what is no queue."""
    kind = redis.type(key)
    if kind == b"list":
        return int(redis.llen(key))
    if kind == b"zset":
        return int(redis.zcard(key))
    return 0 if kind == b"none" else -1


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
