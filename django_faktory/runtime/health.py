"""Health checks that read the database, and what probes have in common: their token and the form of the answer.

The result of a check is "", or one line with the problem and its remedy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from django.db import Error, connections

from .. import conf
from ..core.lifecycle import State
from ..errors import BrokerUnavailable, FaktoryError
from ..models import Job, WorkerProcess
from ..operations import alarms
from ..store.database_errors import first_line
from ..store.workers import living
from .await_migrations import APP_LABEL, find_missing

OVERDUE_S = 30.0
"""Seconds that a due job may wait for maintenance, which runs once a second."""

UNAUTHORIZED = "expected the header Authorization: Bearer <METRICS_TOKEN>"


def is_authorized(authorization: str) -> bool:
    """Return whether this `Authorization` header has METRICS_TOKEN, or no token is set."""
    token = str(conf.get("METRICS_TOKEN"))
    # In constant time: the duration of `==` depends on how much of the token is right.
    return not token or secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode())


def answer(checks: Mapping[str, str]) -> tuple[int, dict[str, object]]:
    """Return the HTTP status and the document of a probe with these results."""
    is_ok = not any(checks.values())
    results = {name: problem or "ok" for name, problem in checks.items()}
    return (200 if is_ok else 503), {"status": "ok" if is_ok else "failing", "checks": results}


def check_alive(*, using: str) -> dict[str, str]:
    """Check that the database answers; return results by name."""
    return {"database": _run_check(lambda: _check_database(using))}


def check_ready(*, using: str) -> dict[str, str]:
    """Check that jobs can be stored and that workers and maintenance run; return results by name.

    Reads what the loops of all nodes have written, so any node can answer. After a failed `check_alive` no other check
    runs.
    """
    checks = check_alive(using=using)
    if any(checks.values()):
        return checks
    return checks | {
        "migrations": _run_check(lambda: _check_migrations(using)),
        "workers": check_working(using=using),
        "maintenance": _run_check(lambda: _check_maintenance(using)),
    }


def check_alarms(*, using: str) -> dict[str, str]:
    """Check that there is no critical alarm; return the first critical alarm of each kind as a result by kind."""
    problems: dict[str, str] = {}
    try:
        for alarm in alarms.read(using=using):
            if alarm.is_critical:
                problems.setdefault(alarm.kind, alarm.text)
    except (Error, FaktoryError) as error:
        return {"alarms": _describe_outage(error)}
    return problems or {"alarms": ""}


def check_working(*, using: str) -> str:
    """Check that some node has a live worker process that fetches jobs."""
    return _run_check(lambda: _check_workers(using))


def _run_check(check: Callable[[], str]) -> str:
    # A check must not raise: the answer lists every check by name.
    try:
        return check()
    except (Error, FaktoryError) as error:
        return _describe_outage(error)


def _describe_outage(error: Exception) -> str:
    # The broker's error says so itself.
    return first_line(error) if isinstance(error, BrokerUnavailable) else f"database unavailable: {first_line(error)}"


def _check_database(using: str) -> str:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT 1")
    return ""


def _check_migrations(using: str) -> str:
    # Of this package only: pending migrations of the project stop no worker.
    missing = [name for label, name in find_missing(using) if label == APP_LABEL]
    return f"{len(missing)} not applied: run manage.py migrate django_faktory" if missing else ""


def _check_workers(using: str) -> str:
    # Quiet workers live too, but they fetch nothing.
    running = WorkerProcess.objects.using(using).filter(living(conf.get("WORKER_TIMEOUT")), state="running")
    return "" if running.exists() else "no live worker process takes jobs: start manage.py runfaktory"


def _check_maintenance(using: str) -> str:
    """Check that no job is overdue: if one is, no node runs maintenance."""
    due_jobs = Job.objects.using(using).in_state(State.SCHEDULED, State.RETRIES).order_by("run_at")
    earliest_run_at = due_jobs.values_list("run_at", flat=True).first()
    overdue_s = (datetime.now(UTC) - earliest_run_at).total_seconds() if earliest_run_at else 0.0
    if overdue_s <= OVERDUE_S:
        return ""
    return f"no node has enqueued a job due {overdue_s:.0f} s ago: start manage.py runfaktory, read its log"
