"""Health checks that read the database. Each check returns "", or one line with the problem and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from django.db import Error, connections
from django.db.migrations.executor import MigrationExecutor

from .. import conf
from ..core.lifecycle import State
from ..errors import FaktoryError
from ..models import Job, WorkerProcess
from ..store.transactions import first_line
from ..store.workers import living

OVERDUE_S = 30.0
"""Seconds that a due job may wait for maintenance, which runs once a second."""


def alive(*, using: str) -> dict[str, str]:
    """Check that the database answers; return results by name."""
    return {"database": _tried(lambda: _database(using))}


def ready(*, using: str) -> dict[str, str]:
    """Check that jobs can be stored and that workers and maintenance run; return results by name.

    Reads what the loops of all nodes have written, so any node can answer. After a failed `alive` check no other one
    runs.
    """
    checks = alive(using=using)
    if any(checks.values()):
        return checks
    return checks | {
        "migrations": _tried(lambda: _migrations(using)),
        "workers": working(using=using),
        "maintenance": _tried(lambda: _maintenance(using)),
    }


def working(*, using: str) -> str:
    """Check that a worker process that fetches jobs lives, on any node."""
    return _tried(lambda: _workers(using))


def _tried(check: Callable[[], str]) -> str:
    # A check must not raise: the answer lists every check by name.
    try:
        return check()
    except (Error, FaktoryError) as error:
        return f"database unavailable: {first_line(error)}"


def _database(using: str) -> str:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT 1")
    return ""


def _migrations(using: str) -> str:
    executor = MigrationExecutor(connections[using])
    wanted = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "django_faktory"]
    missing = executor.migration_plan(wanted)
    return f"{len(missing)} not applied: run manage.py migrate django_faktory" if missing else ""


def _workers(using: str) -> str:
    # Quiet workers live too, but they fetch nothing.
    live = WorkerProcess.objects.using(using).filter(living(conf.get("WORKER_TIMEOUT")), state="running")
    return "" if live.exists() else "no worker process lives that takes jobs: start manage.py runfaktory"


def _maintenance(using: str) -> str:
    """Check that no due job waits: if it is not enqueued, maintenance runs on no node."""
    late = Job.objects.using(using).in_state(State.SCHEDULED, State.RETRIES).order_by("run_at")
    first = late.values_list("run_at", flat=True).first()
    overdue_s = (datetime.now(UTC) - first).total_seconds() if first else 0.0
    if overdue_s <= OVERDUE_S:
        return ""
    return f"a job is due since {overdue_s:.0f} s and no node has enqueued it: start manage.py runfaktory, read its log"
