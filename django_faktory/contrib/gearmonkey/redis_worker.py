"""Operations of a worker at the server, one script each: register, take, extend, finish, release, sweep, audit.

A `RedisWorker` is shared by the threads of one process and knows no task. Redis' clock is the only clock. Raises
BrokerUnavailable if the server is unreachable or out of memory: the operation then changed nothing or may be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis import Redis, RedisCluster
from redis.exceptions import NoScriptError, OutOfMemoryError

from ...core.logs import get_logger
from . import lua, protocol
from .address import examine
from .client import run_steps
from .errors import GearMonkeyError
from .lua import Script
from .protocol import Status
from .requests import REDIS_ERRORS, UNREACHABLE_ERRORS, run_script, unavailable

logger = get_logger(__name__)

LEASE_S = 20.0
"""Seconds without a heartbeat after which a worker loses its jobs and is no longer counted."""
BEATS_A_LEASE = 4
"""Heartbeats in the time of one lease."""
MAX_DEATHS = 5
"""A job is given up after this many of its workers have died."""

AUDIT_AFTER_S = 60
LOG_WRONG_TYPE_EVERY_S = 60.0


class ReservedJob(NamedTuple):
    """A job held by this worker. `id` is as the peer wrote it; wid and attempt fence it."""

    fn: str
    id: str
    attempt: int
    input: bytes
    token: str


class SweepResult(NamedTuple):
    """Ids of the jobs that a sweep put back and of those it gave up."""

    requeued: list[str]
    given_up: list[str]


class RedisWorker:
    """Operations of worker `wid` on the functions `fns`."""

    def __init__(self, redis: Redis, fns: Collection[str], *, wid: str, lease_s: float = LEASE_S) -> None:
        self.fns = [protocol.function_name(fn) for fn in fns]
        self.redis = redis
        self.wid = wid
        self.lease_s = lease_s
        self._is_cluster = isinstance(redis, RedisCluster)
        self._turn = 0
        self._next_log_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Check the server and load the scripts, including the specification's. Raises UnusableServer."""
        examine(self.redis, self.fns)
        with _translate_errors():
            # Naive peers call this script by its digest only and fail if a restart of Redis removed it.
            digest = _text(self.redis.script_load(lua.DUE))
            if digest != lua.DUE_SHA1:
                logger.warning("the specification's script has the digest %s here, expected %s", digest, lua.DUE_SHA1)
            for script in _PRELOADED:
                script.digest = _text(self.redis.script_load(script.text))
            if self.fns:
                # The admin page and the health check find our functions there.
                self.redis.sadd(lua.FUNCTIONS_KEY, *self.fns)

    def register(self) -> None:
        """Register this worker for the length of a lease, or renew it. Restores the counters after FLUSHALL."""
        for fn in self.fns:
            self._call(lua.REGISTER, _registry_keys(fn), self.wid, self.lease_s)

    def unregister(self) -> None:
        """Remove this worker from the registry and the counters."""
        for fn in self.fns:
            self._call(lua.UNREGISTER, _registry_keys(fn), self.wid)

    def dismiss(self, wids: Iterable[str], *, have_died: bool = False) -> None:
        """Unregister these workers and put their jobs back, or expire their leases if they died."""
        for wid in wids:
            for fn in self.fns:
                self._call(lua.UNREGISTER, _registry_keys(fn), wid)
                self._call(lua.DISMISS, [lua.lease_key(fn)], fn, wid, int(have_died))

    def take(self, limit: int) -> list[ReservedJob]:
        """Take up to `limit` jobs: due scheduled ones first, then high, normal, low. Functions take turns."""
        with self._lock:
            # Rotate the functions, so that one with many jobs does not starve the next ones.
            self._turn += 1
            turn = self._turn % len(self.fns)
        fns = self.fns[turn:] + self.fns[:turn]
        jobs: list[ReservedJob] = []
        # The keys of different functions are on different nodes of a cluster: one script per function there.
        for group in [[fn] for fn in fns] if self._is_cluster else [fns]:
            if len(jobs) < limit:
                keys = [key for fn in group for key in (*_queue_keys(fn), lua.lease_key(fn))]
                jobs += self._parse_reserved(
                    self._call(lua.RESERVE, keys, self.wid, self.lease_s, limit - len(jobs), *group)
                )
        return jobs

    def extend(
        self, jobs: Iterable[ReservedJob], *, are_handed_over: bool = False, for_s: float | None = None
    ) -> list[ReservedJob]:
        """Extend the leases, by `for_s` seconds if given; return the jobs that are no longer this worker's."""
        lost: list[ReservedJob] = []
        by_fn: dict[str, list[ReservedJob]] = {}
        for job in jobs:
            by_fn.setdefault(job.fn, []).append(job)
        for_s = self.lease_s if for_s is None else for_s
        for fn, group in by_fn.items():
            id_attempt_pairs = [part for job in group for part in (job.id, job.attempt)]
            key = lua.held_key(fn) if are_handed_over else lua.lease_key(fn)
            kept_ids = {_text(id_) for id_ in self._call(lua.EXTEND, [key], fn, self.wid, for_s, *id_attempt_pairs)}
            lost += [job for job in group if job.id not in kept_ids]
        return lost

    def finish(self, job: ReservedJob, status: Status, output: bytes) -> bool:
        """End a job. Returns False, without changes, if it is no longer this worker's."""
        return self.finish_many([(job, status, output)])[0]

    def finish_many(self, ends: Sequence[tuple[ReservedJob, Status, bytes]]) -> list[bool]:
        """End several jobs in one round trip; the result is like that of `finish` for each."""
        calls = [
            (
                [lua.lease_key(job.fn), lua.meta_key(job.fn, job.id), lua.held_key(job.fn)],
                (job.fn, job.id, self.wid, job.attempt, str(status), output),
            )
            for job, status, output in ends
        ]
        return [bool(reply) for reply in self._call_many(lua.FINISH, calls)]

    def update(self, job: ReservedJob, dividend: int, divisor: int, *, is_handed_over: bool = False) -> bool:
        """Store a job's progress. Returns False if the job is no longer this worker's."""
        lease = lua.held_key(job.fn) if is_handed_over else lua.lease_key(job.fn)
        keys = [lease, lua.meta_key(job.fn, job.id), lua.job_key(job.fn, job.id)]
        return bool(self._call(lua.UPDATE, keys, job.id, self.wid, job.attempt, dividend, divisor))

    def release(self, job: ReservedJob) -> bool:
        """Put a job back at the head of its queue. Returns False if it is no longer this worker's."""
        keys = [lua.lease_key(job.fn), lua.meta_key(job.fn, job.id), lua.job_key(job.fn, job.id)]
        return bool(self._call(lua.RELEASE, keys, job.fn, job.id, self.wid, job.attempt))

    def sweep(self) -> SweepResult:
        """Put back jobs with an expired lease, and unregister workers without a heartbeat."""
        swept = SweepResult([], [])
        for fn in self.fns:
            self._call(lua.ROLL_CALL, _registry_keys(fn))
            # A script handles at most 100 jobs per call, so that it does not block Redis.
            while True:
                requeued, given_up = self._call(lua.SWEEP, [lua.lease_key(fn)], fn, MAX_DEATHS)
                swept.requeued.extend(f"{fn}:{_text(id_)}" for id_ in requeued)
                swept.given_up.extend(f"{fn}:{_text(id_)}" for id_ in given_up)
                if len(requeued) + len(given_up) < 100:
                    break
        return swept

    def hand_over(self, job: ReservedJob) -> bool:
        """Mark the job as represented by a row. Returns False if it is no longer this worker's."""
        keys = [lua.lease_key(job.fn), lua.held_key(job.fn), lua.meta_key(job.fn, job.id)]
        return bool(self._call(lua.HAND_OVER, keys, job.id, self.wid, job.attempt, self.lease_s))

    def adopt(self, limit: int) -> list[ReservedJob]:
        """Take over up to `limit` jobs that have a row and no live gateway."""
        jobs: list[ReservedJob] = []
        for fn in self.fns:
            jobs += self._parse_reserved(
                self._call(lua.ADOPT, [lua.held_key(fn)], fn, self.wid, self.lease_s, limit - len(jobs))
            )
        return jobs

    def audit(self, *, after_s: float = AUDIT_AFTER_S) -> list[str]:
        """Queue again each job found idle and in no queue twice, at least `after_s` seconds apart.

        Looks at every job of these functions.
        """
        requeued = []
        with _translate_errors():
            for fn in self.fns:
                prefix = lua.job_key(fn, "")
                for key in self.redis.scan_iter(match=_escape_pattern(prefix) + "*", count=500):
                    id_ = _text(key)[len(prefix) :]
                    keys = [lua.audit_key(fn), lua.lease_key(fn), *_queue_keys(fn)]
                    if self._call(lua.AUDIT, keys, fn, id_, after_s) == 2:
                        requeued.append(f"{fn}:{id_}")
        return requeued

    def _parse_reserved(self, reply: Any) -> list[ReservedJob]:
        entries, wrong_keys = reply
        for key in wrong_keys:
            self._log_wrong_type(_text(key))
        jobs = []
        for fn, id_, attempt, *data in entries:
            # Attempt 0 marks a job without data; the script has ended it as an error.
            if attempt:
                jobs.append(ReservedJob(_text(fn), _text(id_), attempt, data[0], _text(data[1])))
            else:
                logger.error("job has no data, it ended as an error job=%s:%s", _text(fn), _text(id_))
        return jobs

    def _log_wrong_type(self, key: str) -> None:
        # At most one message a minute per key: the key is read in every round.
        if time.monotonic() >= self._next_log_at.get(key, 0.0):
            self._next_log_at[key] = time.monotonic() + LOG_WRONG_TYPE_EVERY_S
            logger.error("%s is not a queue: its key has another type; other queues are not affected", key)

    def _call(self, script: Script, keys: Iterable[str], *args: Any) -> Any:
        with _translate_errors():
            return run_steps(self.redis, run_script(script, keys, *args))

    def _call_many(self, script: Script, calls: Sequence[tuple[list[str], tuple[Any, ...]]]) -> list[Any]:
        if len(calls) == 1 or self._is_cluster:
            return [self._call(script, keys, *args) for keys, args in calls]
        with _translate_errors():
            # No transaction: each script is atomic, and the failure of one must not affect the next.
            pipeline = self.redis.pipeline(transaction=False)
            for keys, args in calls:
                pipeline.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
            replies = pipeline.execute(raise_on_error=False)
        for index, reply in enumerate(replies):
            # Redis was restarted or its scripts flushed: send the text once.
            if isinstance(reply, NoScriptError):
                keys, args = calls[index]
                replies[index] = self._call(script, keys, *args)
            elif isinstance(reply, Exception):
                with _translate_errors():
                    raise reply
        return replies


# Loaded at start; the other scripts are sent when they are first used.
_PRELOADED = (lua.REGISTER, lua.RESERVE, lua.EXTEND, lua.FINISH, lua.UPDATE, lua.SWEEP)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (*UNREACHABLE_ERRORS, OutOfMemoryError) as error:
        raise unavailable(error) from error
    except REDIS_ERRORS as error:
        raise GearMonkeyError(f"Redis: {error}") from error


def _registry_keys(fn: str) -> list[str]:
    return [lua.registry_key(fn), lua.count_key(fn)]


def _queue_keys(fn: str) -> list[str]:
    return [lua.queue_key(fn, prio) for prio in (protocol.SCHEDULED, *protocol.LISTS)]


def _text(raw: bytes | str) -> str:
    # A peer may push any bytes as id; invalid UTF-8 must be sent back as the same bytes.
    return raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")


def _escape_pattern(prefix: str) -> str:
    """Return the prefix with the wildcards of SCAN patterns escaped."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in prefix)
