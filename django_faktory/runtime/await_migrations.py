"""Check before the start that the database has the tables this code expects (`await_migrations`).

During the rollout of a new version, processes may start before `migrate` has ended, or before the database has: they
print a line and wait.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar

from django.core.management.base import CommandError
from django.db import DatabaseError, connections
from django.db.migrations.executor import MigrationExecutor

from ..store.database_errors import first_line, is_starting, lacks_connections
from ..store.dialects import triggers
from ..store.dialects.postgresql import functions

T = TypeVar("T")

CHECK_EVERY_S = 1.0
"""Seconds between two checks of the migrations or of the database."""

APP_LABEL = "django_faktory"
"""App label of this package."""


def await_migrations(alias: str, *, wait_s: float, write_line: Callable[[str], object]) -> None:
    """Return when all migrations of installed apps are applied, or after `wait_s` seconds.

    Raises CommandError if one of this package is missing by then. SIGTERM and SIGINT end the process while it waits,
    even as PID 1.
    """
    missing = _find_missing_in_new_session(alias)
    if missing and wait_s > 0:
        deadline = time.monotonic() + wait_s
        with _exit_on_signals():  # before `write_line`: a reader of that line may send a signal at once
            description = _describe_missing(missing, alias)
            write_line(f"{description}; waiting up to {wait_s:g} s for manage.py migrate (FAKTORY['MIGRATIONS_WAIT'])")
            while missing and time.monotonic() < deadline:
                time.sleep(CHECK_EVERY_S)
                missing = _find_missing_in_new_session(alias)
    if ours := [migration for migration in missing if migration[0] == APP_LABEL]:
        raise CommandError(
            f"the database {alias!r} lacks {len(ours)} {_kind(ours)} of django_faktory; run manage.py migrate"
        )
    if missing and wait_s > 0:
        write_line(f"{_describe_missing(missing, alias)}; starting without them, since none is of django_faktory")


def await_database(
    prepare: Callable[[], T], *, read_wait_s: Callable[[], float], write_line: Callable[[str], object]
) -> T:
    """Return the result of `prepare`, which is repeated while the database starts up or has no connection left.

    Raises the DatabaseError of `prepare` after `read_wait_s` seconds, and any other error of it at once.
    """
    deadline: float | None = None
    with ExitStack() as stack:
        while True:
            try:
                return prepare()
            except DatabaseError as error:
                if not (is_starting(error) or lacks_connections(error)):
                    raise
                if deadline is None:
                    wait_s = read_wait_s()
                    deadline = time.monotonic() + wait_s
                    stack.enter_context(_exit_on_signals())
                    write_line(f"{first_line(error)}; waiting up to {wait_s:g} s (FAKTORY['MIGRATIONS_WAIT'])")
                if time.monotonic() >= deadline:
                    raise
            time.sleep(CHECK_EVERY_S)


def find_missing(alias: str) -> list[tuple[str, str]]:
    """Return the migrations that are not applied, or functions and triggers that are not created, read at each call."""
    connection = connections[alias]
    # A new executor at each call, because it reads the applied migrations only once.
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    missing = [(migration.app_label, migration.name) for migration, _ in plan]
    if not missing:
        # `migrate` creates them after its last migration.
        stored = functions.find_outdated(connection) if connection.vendor == "postgresql" else []
        missing = [(APP_LABEL, name) for name in (*stored, *triggers.find_outdated(connection))]
    return missing


def _find_missing_in_new_session(alias: str) -> list[tuple[str, str]]:
    missing = find_missing(alias)
    connections[alias].close()  # an open transaction could block `migrate`, or show an old state
    return missing


def _describe_missing(missing: list[tuple[str, str]], alias: str) -> str:
    names = ", ".join(".".join(migration) for migration in missing[:3]) + (" …" if len(missing) > 3 else "")
    return f"the database {alias!r} lacks {len(missing)} {_kind(missing)}: {names}"


def _kind(missing: list[tuple[str, str]]) -> str:
    name = missing[0][1]
    return "functions" if name in functions.read() else "triggers" if name.startswith(f"{APP_LABEL}_") else "migrations"


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGINT inside the block; does nothing outside the main thread.

    The kernel ignores signals for PID 1 unless it has handlers, and only the main thread can install them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_process(*_: object) -> NoReturn:
        sys.exit(0)

    previous_handlers = {number: signal.signal(number, exit_process) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
