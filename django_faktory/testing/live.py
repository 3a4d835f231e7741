"""Run a real server and worker during a test, for behaviour that needs other threads or other languages.

They see committed data only: use TransactionTestCase or pytest's `transactional_db`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from django.db import connections

from ..backend import registered_queues
from ..brokers import get_broker
from ..brokers.orm import OrmBroker
from ..core.lifecycle import State
from ..errors import FaktoryError
from ..models import Job
from ..runtime.maintenance import Maintenance
from ..server.server import Server
from ..store import notifier
from ..tasks.base import autodiscover
from ..tasks.compat import TaskResult
from ..worker.worker import Worker

POLL_S = 0.02
START_TIMEOUT_S = 10.0


class LiveFaktory:
    """Inside `with LiveFaktory() as live:`, a server runs on a free port of the loopback interface, and a worker.

    `queues` are the worker's, by default all that tasks use. `concurrency` is the number of its threads; 0: no worker.
    Raises FaktoryError inside a transaction, because its threads see committed jobs only.
    """

    def __init__(self, *, queues: Sequence[str] | None = None, concurrency: int = 2) -> None:
        broker = get_broker()
        if not isinstance(broker, OrmBroker):
            raise FaktoryError('a live server keeps its jobs in this database: expected FAKTORY["BROKER"] = "orm"')
        self._broker = broker
        self._queues = queues
        self._concurrency = concurrency
        self._running: list[tuple[threading.Thread, Callable[[], None]]] = []
        self.url = ""

    def __enter__(self) -> LiveFaktory:
        """Start the threads; clients can connect when this returns."""
        connection = connections[self._broker.alias]
        if connection.in_atomic_block:
            raise FaktoryError(
                "a live server sees committed jobs only, and this test runs in a transaction: use TransactionTestCase, "
                "or pytest's transactional_db"
            )
        if connection.vendor == "sqlite" and "mode=memory" in str(connection.settings_dict["NAME"]):
            raise FaktoryError(
                "a live server needs a database that several threads can use, and SQLite's in memory is none: "
                f'DATABASES[{connection.alias!r}]["TEST"] = {{"NAME": BASE_DIR / "test.sqlite3"}}'
            )
        try:
            self._start()
        # Also for KeyboardInterrupt: threads left running would block the end of the test process.
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads, see `stop`."""
        self.stop()

    def stop(self) -> None:
        """Stop as SIGTERM does: running jobs have 5 seconds to end. Idempotent."""
        while self._running:
            thread, stop = self._running.pop()
            stop()
            thread.join(30)
            if thread.is_alive():
                raise FaktoryError(f"{thread.name} did not stop within 30 s")

    def wait(self, *results: TaskResult[..., Any], timeout_s: float = 10.0) -> None:
        """Wait until these tasks are finished, and refresh them; without arguments, until no job is ready or running.

        Raises TimeoutError after `timeout_s` seconds, with the states of the unfinished jobs.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_done(results):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout_s:g} s: {self._describe(results)}")
            time.sleep(POLL_S)

    def _is_done(self, results: Sequence[TaskResult[..., Any]]) -> bool:
        for result in results:
            result.refresh()
        return all(result.is_finished for result in results) if results else not self._unfinished_jobs().exists()

    def _describe(self, results: Sequence[TaskResult[..., Any]]) -> str:
        if results:
            return ", ".join(f"{result.task.module_path} {result.id} is {result.status}" for result in results)
        return ", ".join(f"{job.jobtype} {job.jid} is {job.state}" for job in self._unfinished_jobs()[:10])

    def _unfinished_jobs(self) -> Any:
        return Job.objects.using(self._broker.alias).in_state(State.ENQUEUED, State.BLOCKED, State.WORKING)

    def _start(self) -> None:
        autodiscover()
        alias = self._broker.alias
        # Port 0: the system chooses a free one, so that parallel test runs do not collide.
        server = Server(self._broker, port=0, listen=partial(notifier.listen, alias))
        self._start_thread("server", server.run, server.stop)
        if not server.started.wait(START_TIMEOUT_S):
            raise FaktoryError(f"the server did not start within {START_TIMEOUT_S:g} s")
        host, port = server.address
        self.url = f"tcp://{host}:{port}"
        # Scheduled jobs and retries need the same loop as in production.
        maintenance = Maintenance(alias, on_lost=server.drop, on_work=server.wake)
        server.on_scheduled = maintenance.wake_by
        self._start_thread("maintenance", maintenance.run, maintenance.stop)
        if self._concurrency:
            queues = tuple(self._queues or registered_queues())
            worker = Worker(
                self._broker,
                queues=queues,
                concurrency=self._concurrency,
                listen=partial(notifier.listen, alias, [name.partition(":")[0] for name in queues]),
                # Short times, because a test waits for them.
                poll_interval=0.1,
                shutdown_timeout=5.0,
            )
            self._start_thread("worker", worker.run, worker.stop)

    def _start_thread(self, name: str, run: Callable[[], object], stop: Callable[[], None]) -> None:
        alias = self._broker.alias

        def main() -> None:
            try:
                run()
            finally:
                connections[alias].close()  # an open connection would prevent the test database from being dropped

        # A daemon: a thread that hangs must not keep the test process alive.
        thread = threading.Thread(target=main, name=f"live-faktory-{name}", daemon=True)
        thread.start()
        self._running.append((thread, stop))


class LiveFaktoryMixin:
    """Mixin for unittest: `class MyTest(LiveFaktoryMixin, TransactionTestCase)` has `self.live_faktory`."""

    live_faktory: LiveFaktory
    live_faktory_options: ClassVar[dict[str, Any]] = {}
    """Keyword arguments for `LiveFaktory`, set by subclasses."""

    def setUp(self) -> None:
        """Start the server and the worker, and register their stop."""
        super().setUp()  # type: ignore[misc]  # defined by TestCase, the next base class
        self.live_faktory = LiveFaktory(**self.live_faktory_options)
        self.live_faktory.__enter__()
        self.addCleanup(self.live_faktory.stop)  # type: ignore[attr-defined]  # defined by TestCase
