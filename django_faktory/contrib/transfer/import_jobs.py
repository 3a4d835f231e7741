"""Import the jobs of a Faktory from its Redis, window by window: stored here first, then removed there.

An import may be interrupted at any point and repeated. A job remains in Redis until its row is committed. A receipt in
the same transaction lists the stored jobs: a repeated import only removes them from Redis (`store.transfer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

from django.db import transaction

from ...brokers.base import Broker
from ...core.payloads import JobPayload
from ...errors import FaktoryError, InvalidPayload
from ...store import queues
from ...store import transfer as store
from ...store.store import Store
from ...store.transactions import run
from .job_format import Arrival, parse_arrival
from .redis_layout import WORKING, Contents, Entry, FaktoryRedis, Place
from .report import Counts, Report

DUPLICATE = "is in this Redis twice: the first one was moved"
ALREADY_STORED = "is stored here already"
ELSEWHERE = "was removed by another client meanwhile, and may run there too"


class _RolledBack(Exception):
    """Raised to roll back the transaction of a dry run, of which only the results are needed."""


class Import:
    """One import; call `run`."""

    def __init__(
        self, redis: FaktoryRedis, broker: Broker, alias: str, *, is_dry: bool = False, chunk_size: int = store.CHUNK
    ) -> None:
        self._redis, self._broker, self._alias, self._is_dry = redis, broker, alias, is_dry
        self._chunk_size = chunk_size
        self._seen_jids: set[str] = set()
        self._receipts = store.read_receipts(using=alias)
        self._stored_before = {jid for jids in self._receipts.values() for jid in jids}
        self._contents: Contents = redis.read_contents()
        self.report = Report(self._contents.layout, is_dry)
        for place in self._contents.places:
            self.report.counts.append(Counts(place.kind, place.name, redis.count_jobs(place)))

    def run(self, advance: Callable[[int], object]) -> Report:
        """Import all jobs; `advance` is called with the number of jobs examined."""
        self._import_queues()
        self._add_notes()
        for place, counts in zip(self._contents.places, self.report.counts, strict=True):
            self._import_place(place, counts, advance)
        if not self._is_dry:
            # Receipts of interrupted runs: their entries have been removed from Redis by now.
            store.delete_receipts(list(self._receipts), using=self._alias)
        return self.report

    def _import_queues(self) -> None:
        """Import queue names and pauses. Pauses come before the jobs, so that no job of a paused queue starts."""
        names = {name for name in self._contents.queues if _is_queue_name(name)}
        paused = sorted(name for name in self._contents.paused if _is_queue_name(name))
        if not self._is_dry:
            queues.pause(Store(self._alias), paused)
            queues.add(names, using=self._alias)
        self.report.paused = paused

    def _add_notes(self) -> None:
        notes = self.report.notes
        if self._contents.counters:
            notes.append(f"totals and daily numbers stay where they are: {self._contents.counters} keys")
        if unknown := self._contents.unknown:
            suffix = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            notes.append(f"keys that the open Faktory does not use stay: {', '.join(unknown[:10])}{suffix}")
        if any(place.kind == WORKING for place in self._contents.places):
            notes.append("running jobs are scheduled for the end of their reservations")

    def _import_place(self, place: Place, counts: Counts, advance: Callable[[int], object]) -> None:
        skip = 0
        while entries := self._redis.window(place, skip, self._chunk_size):
            # Entries that stay in Redis are skipped; removed ones move the next window forward.
            skip += len(entries) - self._import_window(place, counts, entries)
            advance(len(entries))
        remaining = self._redis.count_jobs(place)
        expected = counts.found if self._is_dry else counts.left
        # Only this import should change the key: a difference means that another client changed it.
        if remaining != expected:
            reason = f"{place.key} was changed by another client meanwhile: expected {expected} left, found {remaining}"
            self.report.add_problem(reason, count=abs(remaining - expected))

    def _import_window(self, place: Place, counts: Counts, entries: Sequence[Entry]) -> int:
        """Import a window of entries; return the number of entries removed from Redis."""
        arrivals_by_jid: dict[str, tuple[Entry, Arrival]] = {}
        stored_before: list[Entry] = []
        for entry in entries:
            if (arrival := self._read(place, entry)) is None:
                continue
            jid = arrival.job.jid
            if jid in self._seen_jids:
                self.report.add_problem(DUPLICATE, [jid])
            # Stored by an interrupted run that did not remove the entry from Redis.
            elif jid in self._stored_before:
                stored_before.append(entry)
                self._seen_jids.add(jid)
            else:
                self._seen_jids.add(jid)
                arrivals_by_jid[jid] = entry, arrival
        arrivals = [arrival for _, arrival in arrivals_by_jid.values()]
        refused, receipt = store_arrivals(arrivals, self._broker, self._alias, is_dry=self._is_dry)
        for jid, reason in refused.items():
            self.report.add_problem(reason, [jid])
        stored = [entry for jid, (entry, _) in arrivals_by_jid.items() if jid not in refused]
        counts.moved += len(stored)
        counts.moved_before += len(stored_before)
        if self._is_dry or not (stored or stored_before):
            return 0
        if missing := len(stored) + len(stored_before) - self._redis.drop(place, [*stored_before, *stored]):
            self.report.add_problem(ELSEWHERE, count=missing)
        # Last: without the receipt a repeated import would report these jobs as stored already.
        if receipt is not None:
            store.delete_receipts([receipt], using=self._alias)
        return len(stored) + len(stored_before)

    def _read(self, place: Place, entry: Entry) -> Arrival | None:
        try:
            return parse_arrival(place.kind, place.name, entry.raw, entry.score)
        except InvalidPayload as error:
            self.report.add_problem(f"cannot be stored as a job: {error}", [error.jid])
            return None


def store_arrivals(
    arrivals: Sequence[Arrival], broker: Broker, alias: str, *, is_dry: bool = False
) -> tuple[dict[str, str], int | None]:
    """Store jobs in one transaction; return the refusals by jid and the receipt, None if no job was stored."""
    if not arrivals:
        return {}, None
    refused: dict[str, str] = {}
    receipt: list[int] = []

    def verb(_: object) -> None:
        # The verb may run again after a conflict: discard the results of the attempt that was rolled back.
        refused.clear()
        receipt.clear()
        refused.update(_push(arrivals, broker, alias))
        histories = {
            one.job.jid: store.JobHistory(one.state, one.ends_at, one.failures, one.failure, one.errtype)
            for one in arrivals
            if one.job.jid not in refused
        }
        store.write_history(histories, using=alias)
        stored = store.find_stored(list(histories), using=alias)
        refused.update(dict.fromkeys(histories.keys() - stored, "was not found after it was stored"))
        if is_dry:
            raise _RolledBack
        if stored:
            receipt.append(store.insert_receipt(sorted(stored), using=alias))

    try:
        # A block of its own: a dry run must roll back its own changes only, not those of an outer transaction.
        with transaction.atomic(using=alias) if is_dry else nullcontext():
            run(alias, verb)
    except _RolledBack:
        return refused, None
    return refused, receipt[0] if receipt else None


def _push(arrivals: Sequence[Arrival], broker: Broker, alias: str) -> dict[str, str]:
    # A push accepts a jid that is stored already without an error, so the import must look first.
    known = store.find_stored([arrival.job.jid for arrival in arrivals], using=alias)
    new_jobs: list[JobPayload] = [arrival.job for arrival in arrivals if arrival.job.jid not in known]
    results: Iterable[FaktoryError | None] = broker.push(new_jobs)
    refused = {job.jid: str(error) for job, error in zip(new_jobs, results, strict=True) if error is not None}
    return {**dict.fromkeys(known, ALREADY_STORED), **refused}


def _is_queue_name(name: str) -> bool:
    return 0 < len(name) <= 255 and name.isprintable()
