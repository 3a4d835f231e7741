"""Combine the options of one `runfaktory` with the settings, and validate them (`make_run_config`).

Starts nothing. The options are documented in `docs/reference/commands.md`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from .. import conf
from ..backend import registered_queues
from ..brokers import tls
from ..brokers.client import parse_url
from ..checks.security import is_loopback
from ..core.suggestions import find_closest
from ..errors import FaktoryError, InvalidPayload
from ..store import sharing
from ..store.dialects import dialect_of
from ..tasks import base
from ..worker.queue_order import QueueOrder

SERVER_CONNECTIONS = 15
"""Maximum of the database connections of a server process, whatever the number of its clients."""

WORKER_CONNECTIONS = 9
"""Maximum of the database connections of a worker process beyond one for each thread: for fetching, reporting, BEATs,
locks, cancellations, progress, notifications, metrics and async tasks."""

MAX_DEFAULT_PROCESSES = 4
"""Maximum of the default number of worker processes: the operator should decide on more."""

MAX_PARALLEL = 1024
"""Maximum of the options `--processes`, `--concurrency` and `--servers`."""

MAX_JOBS_LIMIT = 2**31 - 1
"""Maximum of the option `--max-jobs`."""

MAX_RSS_LIMIT_MB = 2**20
"""Maximum of the option `--max-rss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Which processes to run, and how. `alias` is None if the jobs are on another Faktory server.

    `tls` has the paths of the server's certificate and key.
    """

    serves: bool
    works: bool
    address: tuple[str, int]
    alias: str | None
    # repr=False: the URL may contain a password, and it appears in tracebacks.
    url: str = field(repr=False)
    tls: tuple[str, str] | None
    queues: tuple[str, ...]
    processes: int
    concurrency: int
    drain: bool
    servers: int = 1
    """Server processes, which share the port of `address`."""
    health: tuple[str, int] | None = None
    """Address where probes are answered; None for no probes."""
    max_jobs: int | None = None
    max_rss: int | None = None
    """A worker process is replaced after `max_jobs` jobs, or when it takes more than `max_rss` MB after a job."""
    gearmonkey: str = field(default="", repr=False)
    """Redis URL of the GearMonkey clients to serve; "" for none."""

    def __str__(self) -> str:
        suffix = " with TLS" if self.tls else ""
        servers = "server" if self.servers == 1 else f"{self.servers} servers"
        parts = [f"{servers} on {self.address[0]}:{self.address[1]}{suffix}"] if self.serves else []
        if self.alias is None:
            server = parse_url(self.url)
            parts.append(f"jobs of the Faktory server {server.host}:{server.port}")
        else:
            parts.append(f"database {self.alias} ({connections[self.alias].vendor})")
        if self.works:
            parts.append(f"workers {self.processes} × {self.concurrency} threads")
            parts.append(f"queues {','.join(self.queues)}")
        if self.health:
            parts.append(f"probes on {self.health[0]}:{self.health[1]}")
        return ", ".join(parts)


def make_run_config(options: dict[str, Any], *, gearmonkey: str = "") -> RunConfig:
    """Build the configuration from the command's options. Raises CommandError with the expected and the given value.

    `gearmonkey` is the Redis URL of GearMonkey clients to serve.
    """
    serves, works = not options["worker_only"], not options["server_only"]
    _check_combination(options, serves=serves, works=works)
    is_remote = bool(options["url"]) or conf.get("BROKER") == "remote"
    alias = None if is_remote else conf.get("DATABASE")
    if alias:
        _check_database(alias)
    processes = _parse_number("--processes", options["processes"]) or conf.get("PROCESSES")
    address = _parse_address(options["address"] or conf.get("BIND"))
    servers = _parse_number("--servers", options["servers"]) or 1
    if servers > 1:
        _check_servers(address, alias, serves=serves)
    return RunConfig(
        serves=serves,
        works=works,
        address=address,
        alias=alias,
        url=_check_url(options["url"] or conf.url()) if is_remote else "",
        tls=_choose_tls_files(options) if serves else None,
        queues=_parse_queues(options["queues"]),
        processes=processes or _count_default_processes(alias),
        concurrency=_parse_number("--concurrency", options["concurrency"]) or conf.get("CONCURRENCY"),
        drain=options["drain"],
        servers=servers,
        health=_parse_address(options["health"], "--health") if options["health"] else None,
        max_jobs=_parse_number("--max-jobs", options["max_jobs"], limit=MAX_JOBS_LIMIT) or conf.get("MAX_JOBS"),
        max_rss=_parse_number("--max-rss", options["max_rss"], limit=MAX_RSS_LIMIT_MB) or conf.get("MAX_RSS"),
        gearmonkey=gearmonkey,
    )


def security_warnings(run_config: RunConfig, *, shows_url: bool) -> Iterator[str]:
    """Yield one line for each security risk of a run configuration."""
    host, port = run_config.address
    if run_config.serves and not is_loopback(host) and not conf.password():
        yield (
            f"{host}:{port} can be reached from other machines, and there is no password: any client can add, "
            "fetch and delete jobs; set FAKTORY_PASSWORD"
        )
    if shows_url and parse_url(run_config.url).password:
        yield "--url: `ps` shows its password to every user of this machine; give the URL in FAKTORY_URL instead"


def config_warnings(run_config: RunConfig) -> Iterator[str]:
    """Yield one line for each sign that the workers would find no jobs."""
    if not run_config.works:
        return
    names_in_use = registered_queues()
    if not base.registered():
        yield "no task is known: workers look in the tasks.py of each app of INSTALLED_APPS"
    for spec in run_config.queues:
        name = spec.partition(":")[0]
        # Only a likely typo is reported: clients outside this project may push to other queues.
        if name not in names_in_use and (closest := find_closest(name, names_in_use)):
            yield f"queue {name!r}: no task of this project uses it; did you mean {closest!r}?"


def connection_warnings(run_config: RunConfig) -> Iterator[str]:
    """Yield one line if the database allows fewer connections than these processes may need; then they share them."""
    assert run_config.alias is not None  # noqa: S101  (the caller checks it)
    servers = run_config.servers if run_config.serves else 0
    workers = run_config.processes if run_config.works else 0
    needed = servers * SERVER_CONNECTIONS + workers * (run_config.concurrency + WORKER_CONNECTIONS)
    connection = connections[run_config.alias]
    with connection.cursor() as cursor:
        free_by_limit = dialect_of(connection).free_connections(cursor)
    limit = min(free_by_limit, key=free_by_limit.__getitem__, default=None)
    if limit is not None and free_by_limit[limit] < needed:
        sharing.record_shortage()
        free = max(0, free_by_limit[limit])
        yield (
            f"up to {needed} connections needed, {free} to be had ({limit}): raise it, or lower --processes "
            "or --concurrency; while the database refuses connections, threads share them, which is slower"
        )


def _check_database(alias: str) -> None:
    connection = connections[alias]
    if connection.vendor == "sqlite" and connection.is_in_memory_db():  # type: ignore[attr-defined]  # SQLite's has it
        raise CommandError(
            f"DATABASES[{alias!r}]: expected a file, got one in memory: each process would have a database of its own"
        )
    # django-tenants' `tenant_command` sets the schema of this thread's connection only.
    schema = getattr(connection, "schema_name", None)
    initial_schema = getattr(connections.create_connection(alias), "schema_name", None)
    if schema != initial_schema:
        raise CommandError(
            f"DATABASES[{alias!r}]: the schema {schema!r} is set on one connection only, other processes and threads "
            f"would begin in {initial_schema!r}; use a backend that begins in it, see docs/howto/multi-tenant.md"
        )


def _check_combination(options: dict[str, Any], *, serves: bool, works: bool) -> None:
    if not serves and not works:
        raise CommandError("expected --server-only or --worker-only, got both; leave both out to run both")
    if not serves and options["address"]:
        raise CommandError(f"expected no address with --worker-only, got {options['address']!r}: it does not listen")
    if not serves and (options["tls_cert"] or options["tls_key"]):
        raise CommandError("expected no --tls-cert and --tls-key with --worker-only: it does not listen")
    if serves and options["url"]:
        raise CommandError("--url: expected --worker-only with it; a server keeps its jobs in this project's database")
    if serves and conf.get("BROKER") == "remote":
        raise CommandError(
            'FAKTORY["BROKER"] is "remote", so there is no server to run here; add --worker-only, or set it to "orm"'
        )
    if options["drain"] and not works:
        raise CommandError("--drain: expected workers with it, got --server-only")
    if options["drain"] and options["reload"]:
        raise CommandError("expected --drain or --reload, got both")


def _check_servers(address: tuple[str, int], alias: str | None, *, serves: bool) -> None:
    """Check that several servers can share the port. Raises CommandError."""
    if not serves:
        raise CommandError("expected no --servers with --worker-only: it does not listen")
    if not hasattr(socket, "SO_REUSEPORT"):
        raise CommandError("--servers: expected 1, because processes cannot share a port on this system")
    if address[1] == 0:
        raise CommandError("--servers: expected an address with a port, got 0: each server would take another one")
    if alias is not None and connections[alias].vendor == "sqlite":
        raise CommandError("--servers: expected 1 on SQLite, which allows one writer at a time")


def _parse_address(text: str, option: str = "address") -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    # `isdigit` alone is true for digits such as "²" too, which `int` rejects.
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise CommandError(f"{option}: expected HOST:PORT, such as 127.0.0.1:7419, got {text!r}")
    # IPv6 addresses are in brackets, as in URLs.
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_url(text: str) -> str:
    try:
        address = parse_url(text)
        if address.is_tls:
            # As in `_choose_tls_files`: an unusable file must end the command instead of its children.
            tls.client_context(address.ca)
    except FaktoryError as error:
        raise CommandError(f"--url: {error}") from error
    return text


def _choose_tls_files(options: dict[str, Any]) -> tuple[str, str] | None:
    """Return the files of the options, or else of the settings; never one file from each."""
    certificate, key = options["tls_cert"] or "", options["tls_key"] or ""
    if not certificate:
        if key:
            raise CommandError("--tls-key: expected --tls-cert with it, got none")
        certificate, key = str(conf.get("TLS_CERT")), str(conf.get("TLS_KEY"))
    if not certificate:
        return None
    try:
        # Loaded here already, so that an unusable file ends the command instead of its children.
        tls.server_context(certificate, key)
    except tls.UnusableFile as error:
        raise CommandError(str(error)) from error
    return certificate, key


def _parse_queues(text: str | None) -> tuple[str, ...]:
    specs: Sequence[str] = (
        [spec.strip() for spec in text.split(",")] if text is not None else conf.get("QUEUES") or registered_queues()
    )
    try:
        # Validated here already, so that an invalid name ends the command instead of its children.
        QueueOrder(specs)
    except InvalidPayload as error:
        raise CommandError(f"--queues: {error}") from error
    return tuple(specs)


def _parse_number(option: str, text: str | None, *, limit: int = MAX_PARALLEL) -> int | None:
    if text is None:
        return None
    # The length is checked before `int`, which raises for more than 4,300 digits.
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(limit)) or not 1 <= int(text) <= limit:
        raise CommandError(f"{option}: expected a whole number from 1 to {limit}, got {text!r:.80}")
    return int(text)


def _count_default_processes(alias: str | None) -> int:
    if alias is not None and connections[alias].vendor == "sqlite":
        return 1  # SQLite allows one writer at a time: more processes would wait for each other
    # In a container the affinity mask may be smaller than the number of processors.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_DEFAULT_PROCESSES, usable)
