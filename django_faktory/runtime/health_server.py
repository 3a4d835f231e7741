"""Answer health probes of one `runfaktory` over HTTP, for `--health HOST:PORT` (`Probes`).

`/healthz` reports whether the loops and processes of this runfaktory run. It does not query the database, since a
restart would not repair it. `/readyz` reports whether the work of the loops succeeds. The views of `metrics` report on
all nodes, from the database. There is no heartbeat row for each node, so that an idle node writes nothing.
"""

from __future__ import annotations

import json
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from threading import BoundedSemaphore
from typing import Any, NamedTuple

from django.db import connections

from ..core.logs import get_logger
from ..errors import FaktoryError
from ..server.server import Server
from ..worker.worker import Worker
from . import health
from .background_loops import Loop
from .maintenance import Maintenance

logger = get_logger(__name__)

LOOP_S = 60.0
"""Maximum age of a maintenance loop's latest round: its steps are short, but the machine may be busy."""

SUCCESS_S = 30.0
"""Maximum age of the maintenance loop's latest success."""

SERVER_S = 5.0
"""Seconds within which the server's event loop must respond."""

CLIENT_S = 5.0
"""Socket timeout for a client of the probes."""

MAX_PROBES = 16
"""Clients of the probes that are served at a time, each in a thread and perhaps with a database connection."""

SLOT_S = 0.2
"""Seconds that a client waits for a thread before it is refused."""

BACKLOG = 1024
"""Clients that may wait to be accepted."""

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

STOP_CHECK_S = 0.25
"""Interval of the check whether the thread has to stop."""

Check = Callable[[], str]
"""A function that returns "", or one line with the problem."""


class Checks(NamedTuple):
    """The checks of `/healthz` (`alive`) and of `/readyz` (`ready`), by name."""

    alive: dict[str, Check]
    ready: dict[str, Check]


def check_processes(unresponsive_pipe: int) -> Checks:
    """Check that every process of this node responds to its supervisor.

    The supervisor makes the pipe readable while one does not. -1 means that the supervisor does not watch.
    """
    problem = "a process of this node does not respond: it will be killed and replaced; read the log"

    def check() -> str:
        return problem if unresponsive_pipe >= 0 and select.select([unresponsive_pipe], [], [], 0)[0] else ""

    return Checks({"processes": check}, {"processes": check})


def check_server(server: Server, *, timeout_s: float = SERVER_S) -> Checks:
    """Check that the server's event loop responds within `timeout_s`, for both paths."""
    problem = f"its event loop did not respond within {timeout_s:g} s: read the log, restart it"
    check = {"server": lambda: "" if server.is_responsive(timeout_s) else problem}
    return Checks(check, check)


def check_maintenance(maintenance: Maintenance) -> Checks:
    """Check that maintenance runs (`alive`) and that it reaches the database (`ready`)."""

    def alive() -> str:
        age_s = maintenance.since_round_s()
        return "" if age_s < LOOP_S else f"its last round was {age_s:.0f} s ago: read the log"

    def ready() -> str:
        age_s = maintenance.since_success_s()
        return "" if age_s < SUCCESS_S else f"it last reached the database {age_s:.0f} s ago: read the log"

    return Checks({"maintenance": alive}, {"maintenance": ready})


def check_worker(worker: Worker) -> Checks:
    """Check that the worker's threads live (`alive`) and that the broker answers its BEATs (`ready`)."""

    def alive() -> str:
        ended_loops = worker.broken_loops()
        return f"these loops have ended: {', '.join(ended_loops)}; read the log" if ended_loops else ""

    def ready() -> str:
        return alive() or ("" if worker.has_recent_beat() else "its latest BEATs were not answered: read the log")

    return Checks({"worker": alive}, {"worker": ready})


def check_database(alias: str, *, works: bool) -> Checks:
    """Check that the database answers and, with `works`, that a worker process lives (`ready` only)."""
    ready = {"database": lambda: health.check_alive(using=alias)["database"]}
    if works:
        ready["workers"] = lambda: health.check_working(using=alias)
    return Checks({}, ready)


class Probes(Loop):
    """A background loop that answers probes. Raises FaktoryError if it cannot listen on the address."""

    def __init__(self, address: tuple[str, int], *groups: Checks) -> None:
        super().__init__()
        checks = {
            "/healthz": {name: check for group in groups for name, check in group.alive.items()},
            "/readyz": {name: check for group in groups for name, check in group.ready.items()},
        }
        # `http.server` reads address family and checks from class attributes, so each Probes has classes of its own.
        family = AF_INET6 if ":" in address[0] else AF_INET
        server_class = type("Listening", (_ProbeServer,), {"address_family": family})
        try:
            self._server = server_class(address, type("Answer", (_ProbeHandler,), {"checks": checks}))
        except OSError as error:
            host, port = address
            raise FaktoryError(
                f"--health: cannot listen on {host}:{port}: {error.strerror or error}; choose another"
            ) from error
        # Bounds `handle_request`, so that `run` notices a stop within this time.
        self._server.timeout = STOP_CHECK_S
        self.address: tuple[str, int] = self._server.server_address[:2]

    def run(self) -> None:
        """Answer probes until stopped; each one in a thread of its own."""
        logger.info("probes are answered address=%s:%d", *self.address)
        while not self._stopping.is_set():
            self._server.handle_request()
        self._server.server_close()


class _ProbeServer(ThreadingHTTPServer):
    # A probe that waits for the database must not delay the end of the process.
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots = BoundedSemaphore(MAX_PROBES)
        self.silent: dict[Any, None] = {}
        """Sockets that have sent no request yet, the oldest first."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. If all are in use, close the oldest silent client, or else refuse this one."""
        if not self._slots.acquire(blocking=False):
            with suppress(StopIteration, OSError):  # it has just sent its request, or has gone
                next(iter(self.silent)).shutdown(SHUT_RDWR)
            if not self._slots.acquire(timeout=SLOT_S):
                with suppress(OSError):
                    request.send(_BUSY)
                self.shutdown_request(request)
                return
        self.silent[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client, then free its thread for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.silent.pop(request, None)
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection: the client has closed it."""


class _ProbeHandler(BaseHTTPRequestHandler):
    # Read by `socketserver`: a client that sends nothing must not keep a thread.
    timeout = CLIENT_S
    server: _ProbeServer
    checks: Mapping[str, Mapping[str, Check]]

    def do_GET(self) -> None:
        """Answer `/healthz` or `/readyz`, after a check of the token if one is set."""
        self.server.silent.pop(self.request, None)
        checks = self.checks.get(self.path.partition("?")[0])
        if not health.is_authorized(self.headers.get("Authorization", "")):
            self._respond(401, {"status": health.UNAUTHORIZED})
        elif checks is None:
            self._respond(404, {"status": "expected /healthz or /readyz"})
        else:
            try:
                problems = {name: check() for name, check in checks.items()}
            finally:
                connections.close_all()  # this thread ends with the request
            self._respond(*health.answer(problems))

    do_HEAD = do_GET  # noqa: N815  (a name of `http.server`)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name in `http.server`)
        """Log nothing: probes come every few seconds."""

    def _respond(self, code: int, document: object) -> None:
        body = json.dumps(document).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
