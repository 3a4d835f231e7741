"""The Redis of the original server: find the keys with jobs, read them in windows, remove and add single jobs.

Up to 1.9 a queue's list has the queue's name; from 1.10 the prefix `q:` is added. The source of 1.10 has a rename and a
key `v` to record it, but does not call it at start: old lists are still there and their jobs are not fetched. This
module neither parses jobs nor reads rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from ...errors import FaktoryError
from ..gearmonkey.address import PLAIN, check_url, close, connect
from ..gearmonkey.requests import UNREACHABLE_ERRORS, unavailable

SCHEDULED, RETRIES, DEAD, WORKING = "scheduled", "retries", "dead", "working"
SETS = (SCHEDULED, RETRIES, DEAD, WORKING)
OLD, NEW = "1.9", "1.10"
PREFIX = "q:"
EXPORTED = "django_faktory:exported"
"""Jids of exported jobs that may still have a row: see `export_jobs`."""

_OTHER_KEYS = frozenset({"v", EXPORTED})
_counter = re.compile(r"(processed|failures)(:\d{4}-\d\d-\d\d)?")
_queue_name = re.compile(r"[A-Za-z0-9._-]+")
# In layout 1.9 the list of a queue with such a name would be a key with another meaning.
_RESERVED = frozenset({*SETS, "queues", "paused", "v", "processed", "failures"})


class UnusableRedis(FaktoryError):
    """The contents of this Redis, or its other clients, do not allow a transfer."""


class Place(NamedTuple):
    """A key that contains jobs."""

    kind: str
    """`queue`, or the name of a set."""
    name: str
    """Name of the queue; equal to `kind` for a set."""
    key: str


class Entry(NamedTuple):
    """One job as stored in Redis."""

    raw: bytes
    score: float


class Contents(NamedTuple):
    """Keys of a Redis, by meaning."""

    layout: str
    """Layout of the queues' lists: `1.9`, `1.10`, both joined by "and", or empty if there are no lists."""
    places: list[Place]
    queues: set[str]
    """Known queue names, with or without waiting jobs."""
    paused: set[str]
    counters: int
    """Number of keys with totals and daily counts."""
    unknown: list[str]
    """Keys that do not belong to Faktory, with their types."""


class FaktoryRedis:
    """A Redis used by a Faktory server."""

    def __init__(self, url: str) -> None:
        """Create the client without sending a command. Raises FaktoryError for a URL that cannot be used."""
        if check_url(url) not in PLAIN:
            raise UnusableRedis("expected redis://, rediss:// or unix://: a Faktory's Redis is one server")
        self._redis: Redis = connect(url)

    def close(self) -> None:
        close(self._redis)

    def refuse_other_clients(self) -> None:
        """Raise UnusableRedis if other clients use this database: one of them may be Faktory itself."""
        with _translate_errors():
            try:
                own_id, clients = self._redis.client_id(), self._redis.client_list()
            except ResponseError as error:
                raise UnusableRedis(
                    f"this Redis does not list its clients ({error}): stop Faktory, and add --while-connected"
                ) from error
        # Databases of one Redis have separate keys: clients of another database do no harm.
        database = str(self._redis.connection_pool.connection_kwargs.get("db") or 0)
        other_clients = [
            client for client in clients if str(client.get("id")) != str(own_id) and str(client.get("db")) == database
        ]
        if other_clients:
            raise UnusableRedis(
                f"{len(other_clients)} other clients are connected to database {database} of this Redis: stop Faktory "
                "and start its Redis alone; if none of them is Faktory, add --while-connected"
            )

    def read_contents(self) -> Contents:
        lists: list[Place] = []
        sets: dict[str, Place] = {}
        counters, unknown, name_sets = 0, [], set()
        for key, key_type in self._scan_keys():
            name = key.removeprefix(PREFIX)
            if key_type == "zset" and key in SETS:
                sets[key] = Place(key, key, key)
            elif key_type == "list" and _queue_name.fullmatch(name):
                lists.append(Place("queue", name, key))
            elif _counter.fullmatch(key) and key_type == "string":
                counters += 1
            # SMEMBERS would fail for a key of another type, which is reported as unknown instead.
            elif key in ("queues", "paused") and key_type == "set":
                name_sets.add(key)
            elif key not in _OTHER_KEYS:
                unknown.append(f"{key} ({key_type})")
        # If a queue has both lists, the old one first: its jobs are older, because 1.10 uses the new list only.
        lists.sort(key=lambda place: (place.name, place.key.startswith(PREFIX)))
        return Contents(
            layout=" and ".join(
                sorted({NEW if place.key.startswith(PREFIX) else OLD for place in lists}, reverse=True)
            ),
            places=[*lists, *(sets[name] for name in SETS if name in sets)],
            queues=self._read_names("queues") if "queues" in name_sets else set(),
            paused=self._read_names("paused") if "paused" in name_sets else set(),
            counters=counters,
            unknown=sorted(unknown),
        )

    def count_jobs(self, place: Place) -> int:
        """Return the number of jobs at this key."""
        with _translate_errors():
            return int(self._redis.llen(place.key) if place.kind == "queue" else self._redis.zcard(place.key))

    def window(self, place: Place, skip: int, count: int) -> list[Entry]:
        """Return up to `count` jobs in fetch order, after the first `skip`."""
        with _translate_errors():
            # Faktory fetches from the tail of a list: negative indexes count from the first job to be fetched.
            if place.kind == "queue":
                last = -1 - skip
                raws: Any = self._redis.lrange(place.key, last - count + 1, last)
                return [Entry(raw, 0.0) for raw in reversed(raws)]
            rows: Any = self._redis.zrange(place.key, skip, skip + count - 1, withscores=True)
            return [Entry(raw, float(score)) for raw, score in rows]

    def drop(self, place: Place, entries: Sequence[Entry]) -> int:
        """Remove these entries; return how many were still there."""
        with _translate_errors(), self._redis.pipeline(transaction=True) as pipe:
            for entry in entries:
                if place.kind == "queue":
                    # -1: the last equal entry, because Faktory fetches from the tail.
                    pipe.lrem(place.key, -1, entry.raw)  # type: ignore[arg-type]
                else:
                    pipe.zrem(place.key, entry.raw)
            return sum(map(int, pipe.execute()))

    def read_exported(self) -> set[str]:
        """Return the jids of the last step of an interrupted export; usually none."""
        return self._read_names(EXPORTED)

    def add(self, queues: Mapping[str, Sequence[bytes]], sets: Mapping[str, Sequence[Entry]], jids: Iterable[str],
            *, layout: str) -> None:  # fmt: skip
        """Add jobs and record their jids, atomically. The job to be fetched first comes first."""
        # One MULTI: a jid in EXPORTED means that its job was written, and the reverse (ADR 0018).
        prefix = PREFIX if layout == NEW else ""
        exported_jids = list(jids)
        with _translate_errors(), self._redis.pipeline(transaction=True) as pipe:
            for name, raws in queues.items():
                pipe.sadd("queues", name)
                # LPUSH inserts one after another: the first job ends at the tail, which is fetched first.
                pipe.lpush(prefix + name, *raws)
            for key, entries in sets.items():
                pipe.zadd(key, {entry.raw: entry.score for entry in entries})
            if exported_jids:
                pipe.sadd(EXPORTED, *exported_jids)
            pipe.execute()

    def forget_exported(self, jids: Iterable[str]) -> None:
        """Delete the jids of jobs after their rows were deleted."""
        if removed_jids := list(jids):
            with _translate_errors():
                self._redis.srem(EXPORTED, *removed_jids)

    def add_queues(self, names: Iterable[str], *, paused: bool = False) -> None:
        if name_list := list(names):
            with _translate_errors():
                self._redis.sadd("paused" if paused else "queues", *name_list)

    def _scan_keys(self) -> Iterator[tuple[str, str]]:
        with _translate_errors():
            # Keys of other programs may be any bytes; they are only listed.
            keys = [key.decode("utf-8", "backslashreplace") for key in self._redis.scan_iter(count=1000)]
            for start in range(0, len(keys), 1000):
                # SCAN may return a key more than once.
                batch = sorted(set(keys[start : start + 1000]))
                with self._redis.pipeline(transaction=False) as pipe:
                    for key in batch:
                        pipe.type(key)
                    key_types = pipe.execute()
                yield from ((key, key_type.decode()) for key, key_type in zip(batch, key_types, strict=True))

    def _read_names(self, key: str) -> set[str]:
        with _translate_errors():
            try:
                names: Any = self._redis.smembers(key)
            except ResponseError as error:
                raise UnusableRedis(f"this is not a Faktory's Redis: the key {key} is no set ({error})") from error
            return {name.decode("utf-8", "backslashreplace") for name in names}


def has_own_key(queue: str, layout: str) -> bool:
    """Return whether a queue of this name has its own key in this layout."""
    return layout == NEW or queue not in _RESERVED


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except UNREACHABLE_ERRORS as error:
        raise unavailable(error) from error
    except RedisError as error:
        raise UnusableRedis(f"Redis refused a command: {error}") from error
