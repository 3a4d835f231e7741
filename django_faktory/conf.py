"""Read `FAKTORY = {…}` from the project's settings: every key with its default and its meaning.

Imports no model and no broker. `checks` reports unknown keys and invalid values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.views.decorators.debug import sensitive_variables

DEFAULTS: dict[str, Any] = {
    # storage of jobs
    "BROKER": "orm",
    "DATABASE": "default",
    "OUTBOX": None,
    # server
    "BIND": "127.0.0.1:7419",
    "PASSWORD": "",
    "PASSWORD_TRIES": 20,
    "TLS_CERT": "",
    "TLS_KEY": "",
    "MAX_COMMAND_BYTES": 16 * 1024 * 1024,
    "MAX_CONNECTIONS": 2000,
    "READ_AHEAD": 16,
    "HELLO_TIMEOUT": 5.0,
    "COMMAND_TIMEOUT": 60.0,
    "ALLOW_FLUSH": None,
    "REFUSED_COMMANDS": [],
    "STRICT_WIDS": False,
    # worker
    "PROCESSES": None,
    "CONCURRENCY": 5,
    "QUEUES": None,
    "MAX_JOBS": None,
    "MAX_RSS": None,
    "SHUTDOWN_TIMEOUT": 25.0,
    "MAX_INTERRUPTIONS": None,
    "BEAT_INTERVAL": 15.0,
    "POLL_INTERVAL": 1.0,
    "UNKNOWN_JOBTYPE_GRACE": 600.0,
    "MIGRATIONS_WAIT": 300.0,
    # jobs
    "MAX_ATTEMPTS": 26,
    "RESERVE_FOR": 1800,
    "RESULT_TTL": 86_400,
    "MIDDLEWARE": [],
    "BATCH_COMMIT_WITHIN": 1800,
    "CRON": {},
    "LOCKET": {},
    "LIMITS": {},
    "REDACT": "",
    "ENCRYPT_ARGUMENTS": False,
    "ENCRYPTION_KEYS": [],
    # GearMonkey
    "GEARMONKEY_URL": "",
    "GEARMONKEY_MODE": "direct",
    "GEARMONKEY_FUNCTIONS": {},
    "GEARMONKEY_LEASE": 20.0,
    "GEARMONKEY_MAX_INPUT_BYTES": 1024 * 1024,
    "GEARMONKEY_AUDIT": False,
    # maintenance
    "WORKER_TIMEOUT": 60,
    "BEAT_KEEPS_JOBS": False,
    "DATABASE_TIMEOUT": 10.0,
    "DEAD_TTL": 180 * 86_400,
    "BATCH_TTL": 7 * 86_400,
    # metrics
    "METRICS_TTL": 86_400,
    "METRICS_TOKEN": "",
    "STATSD": "",
    # the REST API
    "API_READS": "1200/minute",
    "API_ACTS": "300/minute",
}

DOCS: dict[str, str] = {
    "BROKER": '`"orm"`: jobs are rows of this database; `"remote"`: they go to the Faktory server of `FAKTORY_URL`.',
    "DATABASE": "Alias of the database that holds the jobs.",
    "OUTBOX": "Aliases whose transactions enqueue tasks while jobs live elsewhere; `None`: `default`, where they do.",
    "BIND": "HOST:PORT the server listens on.",
    "PASSWORD": "What clients must know; a value that begins with `/` is a file with it. `FAKTORY_PASSWORD` wins.",
    "PASSWORD_TRIES": "Wrong passwords an address may send in a minute, to the server or to the REST API; then it is "
    "turned away there. 0: any number.",
    "TLS_CERT": "PEM file with the server's certificate and its chain; with it the server speaks TLS and nothing else.",
    "TLS_KEY": "PEM file with the certificate's private key; where it is empty, the key is in the file of `TLS_CERT`.",
    "MAX_COMMAND_BYTES": "Longest command line, in bytes.",
    "MAX_CONNECTIONS": "Most client connections at once.",
    "READ_AHEAD": "Most jobs of a queue that the server reserves ahead for a crowd of clients on PostgreSQL; 0: none.",
    "HELLO_TIMEOUT": "Seconds a new connection has to say HELLO; as many for the TLS handshake before it.",
    "COMMAND_TIMEOUT": "Seconds a command line may take from its first byte to its end.",
    "ALLOW_FLUSH": "Whether FLUSH, which forgets all jobs, is carried out; `None`: where `DEBUG` is true.",
    "REFUSED_COMMANDS": "Commands the server refuses: any of `MUTATE`, `QUEUE PAUSE`, `QUEUE RESUME`, `QUEUE REMOVE`.",
    "STRICT_WIDS": "Whether FETCH, ACK and FAIL are refused without a wid in HELLO, and a BEAT for another's wid.",
    "PROCESSES": "Worker processes; `None`: one for each CPU, at most 4 (1 on SQLite).",
    "CONCURRENCY": "Threads in each worker process.",
    "QUEUES": "Queues the workers serve, in order; `None`: all that the tasks use.",
    "MAX_JOBS": "Jobs after which a worker process is replaced by a fresh one; `None`: any number.",
    "MAX_RSS": "Memory in MB above which a worker process is replaced after a job; `None`: any.",
    "SHUTDOWN_TIMEOUT": "Seconds running jobs get to finish after SIGTERM.",
    "MAX_INTERRUPTIONS": "How often stopping workers give a job back; after that, it fails. `None`: without a bound.",
    "BEAT_INTERVAL": "Seconds between a worker's signs of life.",
    "POLL_INTERVAL": "Longest time in seconds between two looks for work; where hints come, five of them.",
    "UNKNOWN_JOBTYPE_GRACE": "Seconds jobs of a task a worker lacks are left for those with newer code; 0: they fail.",
    "MIGRATIONS_WAIT": "Seconds `runfaktory` waits for migrations that are not applied; 0: it ends without ours.",
    "MAX_ATTEMPTS": "How often a task is tried at most, unless it says otherwise.",
    "RESERVE_FOR": "Seconds an FWP client may hold a task's job, unless the task says otherwise.",
    "RESULT_TTL": "Seconds the result of a task stays readable, unless the task says otherwise.",
    "MIDDLEWARE": "Dotted paths of `django_faktory.middleware.Middleware` classes, the outermost first.",
    "BATCH_COMMIT_WITHIN": "Seconds a batch may stay uncommitted; then it expires, and its callbacks never run.",
    "CRON": "Jobs that come again, by name: `{schedule, task or jobtype, …}`, see [Cron](../cron.md).",
    "LOCKET": "Identical jobs run one at a time: `locket(queues)`, see [Locks](../locks.md).",
    "LIMITS": 'Limits of queues, tasks and keys: `{"queues": {"mail": 5}}`, see [Limits](../limits.md).',
    "REDACT": "Dotted path of a function `(jobtype, arguments)` that returns what people may see of them; empty: all.",
    "ENCRYPT_ARGUMENTS": "Whether arguments and results of tasks are encrypted, unless the task says otherwise.",
    "ENCRYPTION_KEYS": "Fernet keys of encrypted arguments: the first one encrypts, each of them decrypts.",
    "GEARMONKEY_URL": "Redis of the GearMonkey clients and workers; `GEARMONKEY_URL` of the environment wins.",
    "GEARMONKEY_MODE": '`"direct"`: jobs are run as they are taken; `"gateway"`: they become jobs of ours first.',
    "GEARMONKEY_FUNCTIONS": "Functions, and the names of the tasks that serve them, beside `@task(gearmonkey=…)`.",
    "GEARMONKEY_LEASE": "Seconds a GearMonkey worker may be silent before its jobs go to others.",
    "GEARMONKEY_MAX_INPUT_BYTES": "Longest input of a GearMonkey job; a longer one ends as an error.",
    "GEARMONKEY_AUDIT": "Whether idle GearMonkey jobs that are in no queue are found, and queued again.",
    "WORKER_TIMEOUT": "Seconds without a BEAT after which a worker counts as lost.",
    "BEAT_KEEPS_JOBS": "Whether the BEAT of an FWP client extends the reservations of the jobs delivered to its wid.",
    "DATABASE_TIMEOUT": "Seconds `runfaktory` waits for PostgreSQL's answer to a verb, and a command for a lock.",
    "DEAD_TTL": "Seconds a dead job is kept.",
    "BATCH_TTL": "Seconds a batch stays readable after its end.",
    "METRICS_TTL": "Seconds the sums of each minute are kept, for charts; totals until 14 days after the last job.",
    "METRICS_TOKEN": "What `/metrics`, `/healthz` and `/readyz` ask for as a bearer token; empty: nothing.",
    "STATSD": "HOST:PORT of a statsd server that is sent the numbers; empty: none.",
    "API_READS": "How often a user may read by the REST API, such as `20/second`; empty: without a limit.",
    "API_ACTS": "How often a user may change something by the REST API; empty: without a limit.",
}


SECRET = frozenset({"ENCRYPTION_KEYS", "GEARMONKEY_URL", "METRICS_TOKEN", "PASSWORD"})
"""Settings with values that are never displayed."""

REFUSABLE = ("MUTATE", "QUEUE PAUSE", "QUEUE RESUME", "QUEUE REMOVE")
"""Commands that `REFUSED_COMMANDS` may name; FLUSH has its own setting."""


def get(name: str) -> Any:
    """Return `FAKTORY[name]`, or its default.

    Read from the settings on each call, so that override_settings works.
    """
    return configured().get(name, DEFAULTS[name])


def configured() -> Mapping[str, Any]:
    """Return the project's FAKTORY setting, unchanged. Raises ImproperlyConfigured unless it is a mapping."""
    found = getattr(settings, "FAKTORY", {})
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured(f"FAKTORY: expected a dict, got {type(found).__name__}")
    return found


def outbox() -> list[str]:
    """Return the aliases of databases that enqueue through an outbox row; never the alias that stores the jobs."""
    if not apps.is_installed("django_faktory"):
        return []  # no table
    own = get("DATABASE") if get("BROKER") == "orm" else None
    wanted = get("OUTBOX")
    return [alias for alias in (["default"] if wanted is None else wanted) if alias != own]


def allows_flush() -> bool:
    """Return whether FLUSH, which deletes all jobs, is permitted (W25)."""
    allowed = get("ALLOW_FLUSH")
    return bool(settings.DEBUG if allowed is None else allowed)


@sensitive_variables()
def password() -> str:
    """Return the server's password: `FAKTORY_PASSWORD`, else the setting; "" means none.

    A value that begins with "/" is a path: the file is read and its line end removed. Raises ImproperlyConfigured, in
    one line without the password, if the file is unreadable or empty.
    """
    name, value = "FAKTORY_PASSWORD", os.environ.get("FAKTORY_PASSWORD")
    if not value:
        name, value = "FAKTORY['PASSWORD']", get("PASSWORD")
    if not value.startswith("/"):
        return str(value)
    try:
        with open(value, encoding="utf-8") as file:
            found = file.read().rstrip("\r\n")
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "what is no UTF-8 text"
    else:
        if found:
            return found
        reason = "an empty one"  # as a password it would disable authentication
    raise ImproperlyConfigured(
        f"{name}: expected a readable file with the password at {value}, got: {reason}; "
        "mend the path or give the password itself"
    )


@sensitive_variables()
def url() -> str:
    """Return the URL of the Faktory server for clients.

    Read from `FAKTORY_PROVIDER`, then `FAKTORY_URL`, then the local default.
    """
    provider = os.environ.get("FAKTORY_PROVIDER")
    if not provider:
        return os.environ.get("FAKTORY_URL") or "tcp://localhost:7419"
    if ":" in provider:
        raise ImproperlyConfigured(
            "FAKTORY_PROVIDER: expected the name of an environment variable that holds the URL, got a URL; "
            "set FAKTORY_URL instead"
        )
    found = os.environ.get(provider)
    if not found:
        raise ImproperlyConfigured(
            f"FAKTORY_PROVIDER: expected a Faktory URL in the environment variable {provider}, it is not set"
        )
    return found
