"""Whether all is well, seen from the database: each check is "" or, in one line, what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from django.db import Error, connections
from django.db.migrations.executor import MigrationExecutor

from .. import conf
from ..errors import FaktoryError
from ..lifecycle import State
from ..models import Job, WorkerProcess
from ..store.transactions import first_line
from ..store.workers import living

OVERDUE_S = 30.0
"""How long a due job may wait for maintenance, which looks once a second."""


def alive(*, using: str) -> dict[str, str]:
    """Whether the database answers."""
    return {"database": _tried(lambda: _database(using))}


def ready(*, using: str) -> dict[str, str]:
    """Whether jobs can be stored, and are worked on: by what the loops of all nodes have left in the database."""
    checks = alive(using=using)
    if any(checks.values()):
        return checks
    return checks | {
        "migrations": _tried(lambda: _migrations(using)),
        "workers": working(using=using),
        "maintenance": _tried(lambda: _maintenance(using)),
    }


def working(*, using: str) -> str:
    """Whether a worker process lives that takes jobs, on whatever node."""
    return _tried(lambda: _workers(using))


def _tried(check: Callable[[], str]) -> str:
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
    live = WorkerProcess.objects.using(using).filter(living(conf.get("WORKER_TIMEOUT")), state="running")
    return "" if live.exists() else "no worker process lives that takes jobs: start manage.py runfaktory"


def _maintenance(using: str) -> str:
    """A due job that nobody has enqueued tells that no node's loop goes round."""
    late = Job.objects.using(using).in_state(State.SCHEDULED, State.RETRIES).order_by("run_at")
    first = late.values_list("run_at", flat=True).first()
    overdue_s = (datetime.now(UTC) - first).total_seconds() if first else 0.0
    if overdue_s <= OVERDUE_S:
        return ""
    return f"a job is due since {overdue_s:.0f} s and no node has enqueued it: start manage.py runfaktory, read its log"
