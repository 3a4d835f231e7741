"""Write jobs for another store as rows in the caller's transaction, and relay them after the commit (ADR 0008).

The target is another database or a Faktory server. A transaction that is rolled back leaves no job, and a committed one
loses none. Delivery is at least once, in the order of the rows. `Outbox` is the main class.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from django.db import connections

from ..core.logs import get_logger
from ..core.payloads import JobPayload
from ..errors import AuthenticationFailed, BrokerUnavailable, FaktoryError, NotUnique
from ..store import outbox
from ..store.transactions import after_commit
from .base import Broker

logger = get_logger(__name__)

PAUSE_S = 5.0
"""Seconds after a failure during which callers do not relay, so that no request waits; the background relay retries."""


TARGET_FAILURES = BrokerUnavailable, AuthenticationFailed
"""Errors of the target as a whole: the jobs stay and are pushed again later. Any other error concerns a job."""


class Outbox:
    """Target of pushes that writes rows in the transactions of `aliases`.

    `own_alias` is the alias of the database in which the target stores jobs, if any: pushes in its transactions need no
    row.
    """

    def __init__(self, target: Broker, aliases: Sequence[str], *, own_alias: str | None) -> None:
        self.target = target
        self.aliases = tuple(aliases)
        self._own_alias = own_alias
        self._paused_until = 0.0

    def push(self, jobs: Sequence[JobPayload]) -> Sequence[FaktoryError | None]:
        """Store jobs as `Broker.push` does; jobs stored as rows are answered with None, and may be refused later.

        Outside any transaction, jobs are pushed to the target at once, and stored as rows only if it is unavailable.
        """
        if self._own_alias and connections[self._own_alias].in_atomic_block:
            # The target's own transaction already makes the push atomic with the caller's changes.
            return self.target.push(jobs)
        for alias in self.aliases:
            if connections[alias].in_atomic_block:
                return self._store_entries(jobs, alias)
        try:
            return self.target.push(jobs)
        except BrokerUnavailable as error:
            logger.warning("jobs wait in the outbox count=%d error=%s", len(jobs), error)
            return self._store_entries(jobs, self.aliases[0])

    def has_waiting(self, jid: str) -> bool:
        """Return whether this job waits in a row. A row is deleted only after the target has stored its job."""
        return any(outbox.has_waiting(jid, using=alias) for alias in self.aliases)

    def relay(self, alias: str) -> int:
        """Push the rows that wait in one database to the target; return how many were settled.

        Raises `TARGET_FAILURES`.
        """
        settled = 0
        # One set at a time: the lease of a set must not end while earlier sets are sent.
        while leased := outbox.lease(using=alias):
            self._push_leased(leased, alias)
            settled += len(leased)
        return settled

    def _store_entries(self, jobs: Sequence[JobPayload], alias: str) -> list[FaktoryError | None]:
        outbox.add(jobs, using=alias)
        after_commit(alias, self._relay_after_commit, alias)
        return [None] * len(jobs)

    def _relay_after_commit(self, alias: str) -> None:
        # This runs in the request's thread: while the target is down, each commit would wait for its timeout.
        if time.monotonic() < self._paused_until:
            return
        try:
            self.relay(alias)
        except FaktoryError as error:
            self._paused_until = time.monotonic() + PAUSE_S
            logger.warning("the outbox waits for its target alias=%s error=%s", alias, error)

    def _push_leased(self, leased: Sequence[outbox.LeasedEntry], alias: str) -> None:
        refused = {entry.id: "cannot be read: it is no job's JSON" for entry in leased if entry.job is None}
        jobs = {entry.id: entry.job for entry in leased if entry.job is not None}
        try:
            answers = self._push_or_refuse(list(jobs.values()))
        except TARGET_FAILURES:
            # Free the leased rows at once, so that the next relay need not wait for the end of their lease.
            _settle(alias, free=jobs.keys(), refused=refused)
            raise
        unsent: set[int] = set()
        failure: FaktoryError | None = None
        for row_id, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, TARGET_FAILURES):
                unsent.add(row_id)
                failure = answer
            elif answer is not None and answer.code == NotUnique.code:
                # No error: the caller asked for at most one such job, and one is stored.
                logger.info("job is not unique, it was not enqueued jid=%s", jobs[row_id].jid)
            elif answer is not None:
                refused[row_id] = str(answer)
        _settle(alias, done=jobs.keys() - refused.keys() - unsent, free=unsent, refused=refused)
        if failure is not None:
            raise failure  # the next relay pushes these jobs again

    def _push_or_refuse(self, jobs: list[JobPayload]) -> Sequence[FaktoryError | None]:
        """Return the target's answers.

        If the set fails, each job is pushed alone, so that one bad job does not block the others.
        """
        if not jobs:
            return []
        try:
            return self.target.push(jobs)
        except TARGET_FAILURES:
            raise
        except Exception as error:
            # Repeating is safe: a jid that is stored already is accepted and changes nothing (W10).
            if len(jobs) > 1:
                return [answer for job in jobs for answer in self._push_or_refuse([job])]
            logger.exception("the target cannot take this job jid=%s", jobs[0].jid)
            return [FaktoryError(f"{type(error).__name__}: {error}")]


def _settle(alias: str, *, refused: Mapping[int, str], **settled: Collection[int]) -> None:
    for row_id, error in refused.items():
        logger.error("job in the outbox was refused alias=%s id=%d error=%s", alias, row_id, error)
    outbox.settle(using=alias, refused=refused, **settled)
