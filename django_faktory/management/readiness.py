"""Before anything runs: the database has the tables this code expects, or will have them soon.

While a new version is rolled out its processes may start before `migrate` has ended: they wait for it, and say so.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from django.core.management.base import CommandError
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

LOOK_S = 1.0
OURS = "django_faktory"


def await_migrations(alias: str, *, wait_s: float, say: Callable[[str], object]) -> None:
    """Return when no migration of an installed app is missing in this database, or, but for ours, after `wait_s`.

    Raises CommandError where ours are missing by then. SIGTERM and SIGINT end the process while it waits, as PID 1 too.
    """
    missing = _missing(alias)
    if missing and wait_s > 0:
        deadline = time.monotonic() + wait_s
        with _ended_by_signals():  # before it is said: who reads it may tell us to end
            told = _told(missing, alias)
            say(f"{told}; waiting up to {wait_s:g} s for manage.py migrate (FAKTORY['MIGRATIONS_WAIT'])")
            while missing and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                missing = _missing(alias)
    if any(app == OURS for app, _ in missing):
        count = sum(app == OURS for app, _ in missing)
        raise CommandError(f"the database {alias!r} lacks {count} migrations of ours; run manage.py migrate")
    if missing and wait_s > 0:
        say(f"{_told(missing, alias)}; going on without, since none of them is ours")


def _missing(alias: str) -> list[tuple[str, str]]:
    """Those that are not applied; asked with a fresh look at what is."""
    connection = connections[alias]
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    connection.close()  # no transaction of ours may be in the way of migrate, and none may show the past
    return [(migration.app_label, migration.name) for migration, _ in plan]


def _told(missing: list[tuple[str, str]], alias: str) -> str:
    names = ", ".join(".".join(one) for one in missing[:3]) + (" …" if len(missing) > 3 else "")
    return f"the database {alias!r} lacks {len(missing)} migrations: {names}"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The system ignores signals for PID 1 that have no handler. Other threads than the main one cannot have any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        sys.exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
