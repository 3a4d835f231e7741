"""Gateway mode: GearMonkey jobs become rows, and the outcome of the rows is written back.

A `Gateway` takes a job, stores its row, then hands its lease over, in this order. If a gateway dies in between, its
jobs are taken again, and the new gateway finds the rows by the token that the first take left at the server. A job with
a row is never put back into a queue. Single-threaded (ADR 0013).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from django.db import connections, transaction

from ... import conf
from ...backend import FaktoryBackend
from ...brokers import Broker
from ...core.logs import get_logger
from ...core.payloads import JobPayload
from ...errors import BrokerUnavailable, FaktoryError, InvalidPayload
from ...store.jobs.results import JobStatus, read_statuses
from ...store.transactions import run_each
from ...tasks.base import FaktoryTask
from .errors import UnusableServer
from .notifications import ChannelListener
from .protocol import JOB_TTL_S, Status
from .redis_worker import BEATS_A_LEASE, RedisWorker, ReservedJob
from .registry import call_of, output_of

logger = get_logger(__name__)

MAX_OPEN_JOBS = 500
"""Jobs that one gateway follows at once; further jobs stay in Redis."""

FOLLOW_S = 0.05
"""Seconds between two queries for the outcome of open rows."""

POLL_S = 1.0
RETRY_DELAY_S = 1.0


class Gateway:
    """Store GearMonkey jobs as rows and report their outcomes; `run` is the loop. `tasks` maps functions to tasks."""

    def __init__(
        self, redis_worker: RedisWorker, broker: Broker, alias: str, tasks: Mapping[str, FaktoryTask[..., Any]]
    ) -> None:
        self._redis_worker = redis_worker
        self._broker = broker
        self._alias = alias
        # The row must live as long as the job's hash: a gateway that takes the job again has to see that it ran.
        self._tasks = {fn: replace(task, result_ttl=max(_result_ttl(task), JOB_TTL_S)) for fn, task in tasks.items()}
        # By jid: the jobs that have a row, and whose outcome is not written back yet.
        self._open_jobs: dict[str, ReservedJob] = {}
        self._reported_percents: dict[str, int] = {}
        self._beat_at = 0.0
        self._stopping = threading.Event()
        self._listener = ChannelListener(redis_worker.redis, redis_worker.fns)

    def run(self) -> None:
        """Take, store and follow jobs until stopped. Raises UnusableServer at start.

        Waits while Redis is unreachable or out of memory.
        """
        # The outcome of a row is read after its end, so the row has to be kept until then.
        if not self._broker.keeps_results:
            raise UnusableServer('GEARMONKEY_MODE "gateway" needs jobs in this project\'s database: FAKTORY["BROKER"]')
        is_open = False
        while not self._stopping.is_set():
            try:
                if not is_open:
                    self._redis_worker.open()
                    is_open = True
                pause_s = self.round()
            except BrokerUnavailable as error:
                logger.warning("the GearMonkey gateway waits error=%s", error)
                self._stopping.wait(RETRY_DELAY_S)
            except UnusableServer:
                raise
            except Exception:  # log and continue
                logger.exception("a round of the GearMonkey gateway failed")
                # The connection may be broken or inside a failed transaction; the next round opens another.
                connections[self._alias].close()
                self._stopping.wait(RETRY_DELAY_S)
            else:
                self._listener.wait(pause_s)
        self._listener.close()
        self._shut_down()

    def stop(self) -> None:
        """Stop after the current round. May be called from any thread."""
        self._stopping.set()
        self._listener.close()

    def round(self) -> float:
        """Run one round and return the seconds to pause before the next one."""
        if time.monotonic() >= self._beat_at:
            self._beat()
        room = MAX_OPEN_JOBS - len(self._open_jobs)
        jobs = self._redis_worker.take(min(room, 100)) if room > 0 else []
        if jobs:
            self._store_jobs(jobs)
        ended_count = self._write_outcomes() if self._open_jobs else 0
        if jobs or ended_count:
            return 0.0
        return FOLLOW_S if self._open_jobs else POLL_S

    def _beat(self) -> None:
        """Renew the registration and the leases, and adopt jobs that another gateway left."""
        self._redis_worker.register()
        # Another gateway adopted the job and reports its outcome, or Redis has lost it.
        for job in self._redis_worker.extend(self._open_jobs.values(), are_handed_over=True):
            logger.warning("job is no longer this gateway's job=%s:%s", job.fn, job.id)
            self._forget(job)
        adopted = self._redis_worker.adopt(MAX_OPEN_JOBS - len(self._open_jobs))
        self._open_jobs.update((_jid(job), job) for job in adopted)
        self._beat_at = time.monotonic() + self._redis_worker.lease_s / BEATS_A_LEASE

    def _store_jobs(self, jobs: Iterable[ReservedJob]) -> None:
        """Store rows for the jobs, then hand their leases over.

        A job that has a row already was stored by an earlier attempt.
        """
        payloads: dict[str, tuple[ReservedJob, JobPayload]] = {}
        for job in jobs:
            try:
                payloads[_jid(job)] = job, self._build_payload(job)
            except (FaktoryError, TypeError, ValueError) as error:
                self._redis_worker.finish(job, Status.ERROR, f"InvalidInput: {error}".encode("utf-8", "replace"))
        if payloads:
            run_each(self._alias, self._store_payloads, list(payloads.items()), self._refuse)

    def _refuse(self, item: tuple[str, tuple[ReservedJob, JobPayload]], error: FaktoryError) -> None:
        job = item[1][0]
        self._redis_worker.finish(job, Status.ERROR, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))

    def _store_payloads(self, items: Sequence[tuple[str, tuple[ReservedJob, JobPayload]]]) -> list[None]:
        payloads = dict(items)
        try:
            with transaction.atomic(using=self._alias):
                stored_jids = {outcome.jid for outcome in read_statuses(payloads, using=self._alias)}
                new_jobs = [(job, payload) for jid, (job, payload) in payloads.items() if jid not in stored_jids]
                refusals = self._broker.push([payload for _, payload in new_jobs]) if new_jobs else []
        except InvalidPayload:
            raise  # `run_each` stores the others, and refuses the job at fault
        except Exception:
            # An expired lease would count as a dead worker, and five of them end a job. If the commit did happen, the
            # token leads the next take to the row.
            for job, _ in payloads.values():
                self._redis_worker.release(job)
            raise
        # After the commit only: no sweep puts back a job that was handed over, so its row must exist (ADR 0013).
        refused = {_jid(job): refusal for (job, _), refusal in zip(new_jobs, refusals, strict=True) if refusal}
        for jid, (job, _) in payloads.items():
            if jid in refused:
                self._refuse((jid, payloads[jid]), refused[jid])
            elif self._redis_worker.hand_over(job):
                self._open_jobs[jid] = job
        return [None] * len(items)

    def _build_payload(self, job: ReservedJob) -> JobPayload:
        args, kwargs = call_of(job.input, max_bytes=conf.get("GEARMONKEY_MAX_INPUT_BYTES"))
        task = self._tasks[job.fn]
        backend = task.get_backend()
        assert isinstance(backend, FaktoryBackend)  # noqa: S101  (tasks of this package have no other)
        payload = backend.callback_job(task, args, kwargs)
        jid = _jid(job)
        # The jid is derived from the token, so that a second take of the job finds this row.
        return msgspec.structs.replace(payload, jid=jid, text=payload.text.replace(payload.jid, jid, 1))

    def _write_outcomes(self) -> int:
        """Write the outcome of finished rows back; return how many have ended."""
        outcomes = {outcome.jid: outcome for outcome in read_statuses(self._open_jobs, using=self._alias)}
        ends = []
        for jid, job in self._open_jobs.items():
            # Without an outcome for a removed row the client would wait until its timeout.
            outcome = outcomes.get(jid, JobStatus(jid, True, None, "JobRemoved: its row was removed", None))
            if outcome.is_over:
                status = Status.ERROR if outcome.error else Status.SUCCESS
                output = outcome.error.encode("utf-8", "replace") if outcome.error else output_of(outcome.result)
                ends.append((job, status, output))
            elif outcome.percent is not None and outcome.percent != self._reported_percents.get(jid):
                self._reported_percents[jid] = outcome.percent
                self._redis_worker.update(job, outcome.percent, 100, is_handed_over=True)
        for (job, _, _), was_held in zip(ends, self._redis_worker.finish_many(ends), strict=True):
            if not was_held:
                logger.warning("job ended too late, it is no longer this gateway's job=%s:%s", job.fn, job.id)
            self._forget(job)
        return len(ends)

    def _forget(self, job: ReservedJob) -> None:
        self._open_jobs.pop(_jid(job), None)
        self._reported_percents.pop(_jid(job), None)

    def _shut_down(self) -> None:
        """Release leases and registration, so that another gateway can take over at once."""
        try:
            # Expired leases are adopted at the next beat of another gateway.
            self._redis_worker.extend(self._open_jobs.values(), are_handed_over=True, for_s=0.0)
            self._redis_worker.unregister()
        except FaktoryError as error:
            logger.warning("could not unregister the gateway; its jobs wait until their leases end error=%s", error)
        connections[self._alias].close()


def _jid(job: ReservedJob) -> str:
    return f"gearmonkey-{job.token}"


def _result_ttl(task: FaktoryTask[..., Any]) -> int:
    return int(conf.get("RESULT_TTL") if task.result_ttl is None else task.result_ttl)
