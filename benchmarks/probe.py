"""Measure how long a lone FETCH takes while another load runs."""

import json
import threading
import time
import uuid

from benchmarks.client import Client
from benchmarks.peers.arithmetic import median, percentile


class Probe(threading.Thread):
    """Fetches and acknowledges one job at a time, and records the duration of each FETCH in milliseconds.

    With `pushes` it pushes its own jobs, so that there is always one.
    """

    def __init__(self, port, queue, *, pushes):
        super().__init__(daemon=True)
        self._client = Client.worker(port, f"probe-{queue}")
        self._queue, self._pushes = queue, pushes
        self._took_ms, self._error, self._is_over = [], None, threading.Event()

    def run(self):
        try:
            while not self._is_over.is_set():
                self._take_one()
        except Exception as error:  # noqa: BLE001 (the main thread reports it)
            self._error = error

    def _take_one(self):
        pushed = uuid.uuid4().hex if self._pushes else None
        if pushed:
            self._client.ask(f'PUSH {{"jid":"{pushed}","jobtype":"probe","args":[],"queue":"{self._queue}"}}')
        began = time.perf_counter()
        job = self._client.ask(f"FETCH {self._queue}")
        self._took_ms.append((time.perf_counter() - began) * 1000)
        if job is None:
            raise RuntimeError(f"expected a job in queue {self._queue}, got none")
        jid = json.loads(job)["jid"]
        if pushed and jid != pushed:
            raise RuntimeError(f"expected the job {pushed} of queue {self._queue}, got {jid}")
        self._client.ask(f'ACK {{"jid":"{jid}"}}')

    def taken(self):
        """Return the figures since the last call; they are None if no FETCH was answered."""
        if self._error:
            raise self._error
        times, self._took_ms = self._took_ms, []
        if not times:
            return {"fetches": 0, "p50_ms": None, "p99_ms": None, "max_ms": None}
        found = {"p50_ms": median(times), "p99_ms": percentile(times, 99), "max_ms": max(times)}
        return {"fetches": len(times)} | {name: round(value, 2) for name, value in found.items()}

    def stop(self):
        self._is_over.set()
        self.join(10)
