"""`manage.py runfaktory`: check the options and start server, workers and maintenance (`runtime.roles`)."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.conf import settings
from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db import DatabaseError, connections
from django.utils import autoreload

from ... import conf
from ...checks.tasks import broken_modules, remedy_for
from ...contrib.gearmonkey import command as gearmonkey
from ...runtime.await_migrations import await_database, await_migrations
from ...runtime.config import RunConfig, config_warnings, connection_warnings, make_run_config, security_warnings
from ...runtime.log_handler import LogHandler
from ...runtime.roles import supervise
from ...store.database_errors import first_line
from ...tasks import base
from ...worker.job_log import NAMES_OF_TASKS
from ...worker.process import CANNOT_START
from ..usage import report

PARENT_VARIABLE = "DJANGO_FAKTORY_STOP_WITHOUT"
"""Environment variable of the child command: the pid of the process that it must not outlive."""

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


class Command(BaseCommand):
    """Run the Faktory server and workers of this project."""

    help = "Runs the Faktory server, workers and maintenance of this project."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options, which `make docs` writes into docs/reference/commands.md."""
        parser.error = partial(report, parser)  # type: ignore[method-assign]  # Django creates the parser
        parser.add_argument(
            "address", nargs="?", metavar="HOST:PORT", help="Where the server listens; default: FAKTORY['BIND']."
        )
        parser.add_argument("--server-only", action="store_true", help="The server and maintenance, no workers.")
        parser.add_argument(
            "--worker-only", action="store_true", help="Workers, no server; maintenance if jobs are in this database."
        )
        parser.add_argument(
            "--queues",
            metavar="A,B,C",
            help="Queues of the workers, in this order; NAME:WEIGHT draws one by weight. Default: FAKTORY['QUEUES'], "
            "or all that tasks use.",
        )
        parser.add_argument(
            "--processes",
            metavar="N",
            help="Worker processes; default: FAKTORY['PROCESSES'], or one for each CPU, at most 4 (1 on SQLite).",
        )
        parser.add_argument(
            "--servers",
            metavar="N",
            help="Server processes that share the port, for more than two cores; default: 1; SQLite allows no more.",
        )
        parser.add_argument(
            "--concurrency", metavar="N", help="Threads of each worker process; default: FAKTORY['CONCURRENCY']."
        )
        parser.add_argument(
            "--max-jobs",
            metavar="N",
            help="Replace a worker process after N jobs; default: FAKTORY['MAX_JOBS'], no limit.",
        )
        parser.add_argument(
            "--max-rss",
            metavar="MB",
            help="Replace a worker process that uses more memory after a job; default: FAKTORY['MAX_RSS'], no limit.",
        )
        parser.add_argument(
            "--url",
            metavar="URL",
            help="With --worker-only: the Faktory server to work for, tcp://:PASSWORD@HOST:PORT, or tcp+tls://….",
        )
        parser.add_argument(
            "--tls-cert",
            metavar="FILE",
            help="The server's certificate (PEM), with which it speaks TLS only; default: FAKTORY['TLS_CERT'].",
        )
        parser.add_argument(
            "--tls-key",
            metavar="FILE",
            help="Its private key; default: FAKTORY['TLS_KEY'], or that in the certificate's file.",
        )
        parser.add_argument(
            "--gearmonkey",
            metavar="URL",
            nargs="?",
            const="",
            help="Serve GearMonkey clients of this Redis too; default: GEARMONKEY_URL of environment or FAKTORY.",
        )
        parser.add_argument(
            "--migrations-wait",
            metavar="SECONDS",
            help="How long to wait for migrations that are not applied yet; default: FAKTORY['MIGRATIONS_WAIT'].",
        )
        parser.add_argument(
            "--health", metavar="HOST:PORT", help="Answer probes there: /healthz and /readyz of this runfaktory."
        )
        parser.add_argument("--drain", action="store_true", help="Work until nothing is ready, then exit.")
        parser.add_argument(
            "--reload",
            action=argparse.BooleanOptionalAction,
            help="Restart when code changes; default: while DEBUG is on.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Reopen closed standard streams first: a file that a job opens must not get their numbers."""
        if _reopen_closed_streams():
            # Django has wrapped the closed streams when it created this command.
            self.stdout, self.stderr = OutputWrapper(sys.stdout), OutputWrapper(sys.stderr)
        super().run_from_argv(argv)

    def _write_line(self, text: str) -> None:
        self.stdout.write(f"runfaktory: {text}")
        # Into a pipe Python writes in blocks, and this may be the last line for minutes.
        self.stdout.flush()

    def handle(self, **options: Any) -> None:
        """Check options, settings and database, print the run configuration, and run it."""
        _refuse_open_transaction()
        # A drain exits when no job is ready, so it is not restarted.
        if options["reload"] is None:
            options["reload"] = settings.DEBUG and not options["drain"]
        _configure_logging(options["verbosity"])
        if options["reload"]:
            autoreload.run_with_reloader(_run_in_child, base.autodiscover)
            return
        # Before the fork: the children share the memory of the imported project (ADR 0038).
        for module in broken_modules():
            # A worker that lacks a task would leave its jobs to other workers, and fail them after a while.
            raise CommandError(f"{module}; no worker starts without it: {remedy_for(module)}") from module.error
        with _shorten_database_errors():
            run_config, warnings = await_database(
                lambda: self._prepare(options),
                read_wait_s=lambda: _parse_wait_s(options["migrations_wait"]),
                write_line=self._write_line,
            )
        _disconnect()
        for warning in warnings:
            self.stderr.write(self.style.WARNING(f"runfaktory: {warning}"))
        self.stdout.write(f"runfaktory: {', '.join([str(run_config), *gearmonkey.describe(run_config)])}")
        if code := supervise(run_config, gearmonkey.roles, parent=_get_reloader_pid()):
            sys.exit(code)

    def _prepare(self, options: dict[str, Any]) -> tuple[RunConfig, list[str]]:
        """Check settings and database; return the run configuration and its warnings."""
        self.check()  # from Django 6.1 on it queries the database's features
        run_config = make_run_config(options, gearmonkey=gearmonkey.url_in(options))
        warnings = [*security_warnings(run_config, shows_url=bool(options["url"])), *config_warnings(run_config)]
        if run_config.alias:
            await_migrations(
                run_config.alias, wait_s=_parse_wait_s(options["migrations_wait"]), write_line=self._write_line
            )
            self.check(tags=[Tags.database], databases=[run_config.alias])
            warnings += connection_warnings(run_config)
        return run_config, warnings


def _configure_logging(verbosity: int) -> None:
    """Log to stderr unless the project has configured logging for this package.

    `-v` sets the level: 0 WARNING, 1 INFO, more DEBUG. 1 is the default and leaves the level of the project.
    """
    logger = logging.getLogger("django_faktory")
    is_configured = logger.hasHandlers()
    if not is_configured or verbosity != 1:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    if not is_configured:
        logger.addHandler(LogHandler())
    # Django's Tasks log RUNNING and SUCCESSFUL, which repeat our lines: drop them unless LOGGING names their logger.
    loggers = getattr(settings, "LOGGING", {}).get("loggers", {})
    for logger in map(logging.getLogger, NAMES_OF_TASKS):
        if logger.name not in loggers and logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
        if not logger.hasHandlers():  # Python's last-resort handler would print its failures a second time
            logger.addHandler(logging.NullHandler())


@contextmanager
def _shorten_database_errors() -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        message = f"the database {conf.get('DATABASE')!r} cannot be used: {first_line(error)}; see DATABASES"
        raise CommandError(message, returncode=CANNOT_START) from error


def _parse_wait_s(option: str | None) -> float:
    if option is None:
        return float(conf.get("MIGRATIONS_WAIT"))
    if not (option.isascii() and option.isdigit()):
        raise CommandError(f"--migrations-wait: expected whole seconds, 0 or more, got {option!r}")
    return float(option)


def _refuse_open_transaction() -> None:
    """Raise CommandError in a transaction, as in a TestCase: it would end, and no other process would see its jobs."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            raise CommandError(
                f"expected no open transaction of {connection.alias!r}, got one; in a TestCase, run jobs "
                "with django_faktory.testing.drain()"
            )


def _disconnect() -> None:
    """Close all connections and pools: forked processes must share none, nor the threads of a pool."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()


def _get_reloader_pid() -> int | None:
    """Return the pid of the reloader that started this process; None without one."""
    pid = os.environ.get(PARENT_VARIABLE)
    return int(pid) if pid else None


def _run_in_child(load: Callable[[], None]) -> None:
    """Run the command without `--reload` in a child process, under Django's autoreloader.

    The reloader watches files in threads, and a process that forks must not have threads. The child has ended before
    the reloader restarts. `load` imports the modules to watch.
    """
    load()
    child = subprocess.Popen(  # noqa: S603  (our own command line)
        # Explicit, because reloading is the default while DEBUG is on.
        [*autoreload.get_child_arguments(), "--no-reload"],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches only the reloader, which sends one TERM
    )
    reloading = threading.Event()
    # After a change, Django's reloader exits this process with code 3, which runs `_stop`.
    atexit.register(_stop, child, reloading)
    code = child.wait()
    if not reloading.is_set():
        # The child ended without a change of code. Exit code 3 would make Django's reloader run it again.
        os._exit(1 if code else 0)


def _stop(child: subprocess.Popen[bytes], reloading: threading.Event) -> None:
    reloading.set()
    child.terminate()
    child.wait()


def _reopen_closed_streams() -> bool:
    """Open the null device for each closed standard stream; return whether one was closed.

    Python has None in place of a closed stream, which cannot be written to. Also, the next socket or file would get the
    stream's file descriptor, and child processes would use it as their standard stream.
    """
    closed = [stream for stream in _STREAMS if getattr(sys, stream[1]) is None]
    for number, name, mode in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null == number:
            os.set_inheritable(number, True)  # for child programs
        setattr(sys, name, open(os.dup(null), mode))  # noqa: SIM115  (open until the process ends)
        if null != number:
            os.close(null)
    return bool(closed)
