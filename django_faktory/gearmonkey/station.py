"""What a worker does at the server, one script each: register, take, lengthen, end, give back, sweep, audit.

Knows no task and no thread; a station is shared by those of one process. Redis' clock is the only clock.
Raises BrokerUnavailable where the server is away, or its memory is out: then nothing was changed, or may be done again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis import Redis, RedisCluster
from redis.exceptions import NoScriptError, OutOfMemoryError

from ..logs import get_logger
from . import scripts, wire
from .address import examine
from .client import carry_out
from .core import AWAY, REDIS_ERRORS, scripted, unavailable
from .errors import GearMonkeyError
from .scripts import Script
from .wire import Status

logger = get_logger(__name__)

LEASE_S = 20.0
"""How long a worker may be silent: then its jobs go to others, and it is no longer counted."""
BEATS_A_LEASE = 4
MAX_DEATHS = 5
"""A job that cost so many workers their lives is not tried again."""

AUDIT_AFTER_S = 60
TELL_WRONG_EVERY_S = 60.0


class Taken(NamedTuple):
    """A job this worker has. `id` is as the peer wrote it; wid and attempt fence it."""

    fn: str
    id: str
    attempt: int
    input: bytes
    token: str


class Swept(NamedTuple):
    """Which jobs a sweep put back, and which it gave up."""

    back: list[str]
    given_up: list[str]


class Station:
    """The verbs, for `fns`, as worker `wid`."""

    def __init__(self, redis: Redis, fns: Collection[str], *, wid: str, lease_s: float = LEASE_S) -> None:
        self.fns = [wire.function_name(fn) for fn in fns]
        self.redis = redis
        self.wid = wid
        self.lease_s = lease_s
        self._is_cluster = isinstance(redis, RedisCluster)
        self._turn = 0
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Look whether this server will do, and load the scripts: the text's too, for peers that lost theirs.

        Raises UnusableServer.
        """
        examine(self.redis, self.fns)
        with _translated():
            digest = _text(self.redis.script_load(scripts.DUE))
            if digest != scripts.DUE_SHA1:
                logger.warning("this server names the text's script %s, expected %s", digest, scripts.DUE_SHA1)
            for script in _OFTEN:
                script.digest = _text(self.redis.script_load(script.text))
            if self.fns:
                self.redis.sadd(scripts.FUNCTIONS_KEY, *self.fns)

    def register(self) -> None:
        """Be counted, or stay so, for a lease's length. What was flushed is there again."""
        for fn in self.fns:
            self._call(scripts.REGISTER, _registry(fn), self.wid, self.lease_s)

    def unregister(self) -> None:
        """Be counted no longer."""
        for fn in self.fns:
            self._call(scripts.UNREGISTER, _registry(fn), self.wid)

    def dismiss(self, wids: Iterable[str], *, have_died: bool = False) -> None:
        """These workers are gone: they are not counted, and what they hold goes back, or to the next sweep."""
        for wid in wids:
            for fn in self.fns:
                self._call(scripts.UNREGISTER, _registry(fn), wid)
                self._call(scripts.DISMISS, [scripts.lease_key(fn)], fn, wid, int(have_died))

    def take(self, most: int) -> list[Taken]:
        """Up to so many jobs: scheduled ones that are due, then high, normal, low; functions take turns."""
        with self._lock:
            self._turn += 1
            turn = self._turn % len(self.fns)
        fns = self.fns[turn:] + self.fns[:turn]
        found: list[Taken] = []
        for group in [[fn] for fn in fns] if self._is_cluster else [fns]:
            if len(found) < most:
                keys = [key for fn in group for key in _taking(fn)]
                found += self._taken(
                    self._call(scripts.RESERVE, keys, self.wid, self.lease_s, most - len(found), *group)
                )
        return found

    def extend(
        self, jobs: Iterable[Taken], *, are_handed_over: bool = False, for_s: float | None = None
    ) -> list[Taken]:
        """Lengthen the leases, or give them so long; returns those that are no longer this worker's."""
        lost: list[Taken] = []
        by_fn: dict[str, list[Taken]] = {}
        for job in jobs:
            by_fn.setdefault(job.fn, []).append(job)
        for_s = self.lease_s if for_s is None else for_s
        for fn, group in by_fn.items():
            flat = [part for job in group for part in (job.id, job.attempt)]
            key = scripts.held_key(fn) if are_handed_over else scripts.lease_key(fn)
            kept = {_text(id_) for id_ in self._call(scripts.EXTEND, [key], fn, self.wid, for_s, *flat)}
            lost += [job for job in group if job.id not in kept]
        return lost

    def finish(self, job: Taken, status: Status, output: bytes) -> bool:
        """End a job; False where it is no longer this worker's: then nothing was changed."""
        return self.finish_many([(job, status, output)])[0]

    def finish_many(self, ends: Sequence[tuple[Taken, Status, bytes]]) -> list[bool]:
        """End jobs, in one round trip."""
        calls = [
            (
                [scripts.lease_key(job.fn), scripts.meta_key(job.fn, job.id), scripts.held_key(job.fn)],
                (job.fn, job.id, self.wid, job.attempt, str(status), output),
            )
            for job, status, output in ends
        ]
        return [bool(answer) for answer in self._call_many(scripts.FINISH, calls)]

    def update(self, job: Taken, dividend: int, divisor: int, *, is_handed_over: bool = False) -> bool:
        """Tell how far a job is; False where it is no longer this worker's."""
        lease = scripts.held_key(job.fn) if is_handed_over else scripts.lease_key(job.fn)
        keys = [lease, scripts.meta_key(job.fn, job.id), scripts.job_key(job.fn, job.id)]
        return bool(self._call(scripts.UPDATE, keys, job.id, self.wid, job.attempt, dividend, divisor))

    def release(self, job: Taken) -> bool:
        """Give a job back to the head of its queue; False where it is no longer this worker's."""
        keys = [scripts.lease_key(job.fn), scripts.meta_key(job.fn, job.id), scripts.job_key(job.fn, job.id)]
        return bool(self._call(scripts.RELEASE, keys, job.fn, job.id, self.wid, job.attempt))

    def sweep(self) -> Swept:
        """Put back what workers of ours did not end in time, and count those no longer that are silent."""
        swept = Swept([], [])
        for fn in self.fns:
            self._call(scripts.ROLL_CALL, _registry(fn))
            while True:
                back, given_up = self._call(scripts.SWEEP, [scripts.lease_key(fn)], fn, MAX_DEATHS)
                swept.back.extend(f"{fn}:{_text(id_)}" for id_ in back)
                swept.given_up.extend(f"{fn}:{_text(id_)}" for id_ in given_up)
                if len(back) + len(given_up) < 100:
                    break
        return swept

    def hand_over(self, job: Taken) -> bool:
        """From now on a row stands for the job; False where it is no longer this worker's."""
        keys = [scripts.lease_key(job.fn), scripts.held_key(job.fn), scripts.meta_key(job.fn, job.id)]
        return bool(self._call(scripts.HAND_OVER, keys, job.id, self.wid, job.attempt, self.lease_s))

    def adopt(self, most: int) -> list[Taken]:
        """Jobs that have a row, and whose bridge is gone."""
        found: list[Taken] = []
        for fn in self.fns:
            found += self._taken(
                self._call(scripts.ADOPT, [scripts.held_key(fn)], fn, self.wid, self.lease_s, most - len(found))
            )
        return found

    def audit(self, *, after_s: float = AUDIT_AFTER_S) -> list[str]:
        """Look at every job of these functions; queue again what two looks so far apart found idle and in no queue."""
        again = []
        with _translated():
            for fn in self.fns:
                prefix = scripts.job_key(fn, "")
                for key in self.redis.scan_iter(match=_escaped(prefix) + "*", count=500):
                    id_ = _text(key)[len(prefix) :]
                    keys = [scripts.audit_key(fn), scripts.lease_key(fn)]
                    keys += [scripts.queue_key(fn, prio) for prio in (wire.SCHEDULED, *wire.LISTS)]
                    if self._call(scripts.AUDIT, keys, fn, id_, after_s) == 2:
                        again.append(f"{fn}:{id_}")
        return again

    def _taken(self, reply: Any) -> list[Taken]:
        found, wrong = reply
        for key in wrong:
            self._tell_wrong(_text(key))
        taken = []
        for fn, id_, attempt, *rest in found:
            if attempt:
                taken.append(Taken(_text(fn), _text(id_), attempt, rest[0], _text(rest[1])))
            else:
                logger.error("job has no data, it ended as an error job=%s:%s", _text(fn), _text(id_))
        return taken

    def _tell_wrong(self, key: str) -> None:
        if time.monotonic() >= self._told_at.get(key, 0.0):
            self._told_at[key] = time.monotonic() + TELL_WRONG_EVERY_S
            logger.error("%s is no queue: its type is another one; jobs of other queues go on", key)

    def _call(self, script: Script, keys: Iterable[str], *args: Any) -> Any:
        with _translated():
            return carry_out(self.redis, scripted(script, keys, *args))

    def _call_many(self, script: Script, calls: Sequence[tuple[list[str], tuple[Any, ...]]]) -> list[Any]:
        if len(calls) == 1 or self._is_cluster:
            return [self._call(script, keys, *args) for keys, args in calls]
        with _translated():
            pipeline = self.redis.pipeline(transaction=False)
            for keys, args in calls:
                pipeline.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
            answers = pipeline.execute(raise_on_error=False)
        for place, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                keys, args = calls[place]
                answers[place] = self._call(script, keys, *args)
            elif isinstance(answer, Exception):
                with _translated():
                    raise answer
        return answers


_OFTEN = (scripts.REGISTER, scripts.RESERVE, scripts.EXTEND, scripts.FINISH, scripts.UPDATE, scripts.SWEEP)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (*AWAY, OutOfMemoryError) as error:
        raise unavailable(error) from error
    except REDIS_ERRORS as error:
        raise GearMonkeyError(f"Redis: {error}") from error


def _registry(fn: str) -> list[str]:
    return [scripts.registry_key(fn), scripts.count_key(fn)]


def _taking(fn: str) -> list[str]:
    queues = [scripts.queue_key(fn, prio) for prio in (wire.SCHEDULED, *wire.LISTS)]
    return [*queues, scripts.lease_key(fn)]


def _text(raw: bytes | str) -> str:
    # An id may be anything a peer pushed; what is no UTF-8 must come back as the same bytes.
    return raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")


def _escaped(prefix: str) -> str:
    """For SCAN's patterns."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in prefix)
