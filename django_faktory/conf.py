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
    "PREFETCH": 16,
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

RENAMED = {"READ_AHEAD": "PREFETCH"}
"""Old names of settings, with their present ones."""

DOCS: dict[str, str] = {
    "BROKER": '`"orm"`: jobs are rows of this database; `"remote"`: they go to the Faktory server of `FAKTORY_URL`.',
    "DATABASE": "Alias of the database that holds the jobs.",
    "OUTBOX": "Aliases of the databases with an outbox: a task that is enqueued in a transaction there is stored "
    "with it. `None`: `default`, unless jobs are stored there.",
    "BIND": "`HOST:PORT` on which the server listens.",
    "PASSWORD": "Password of the server. A value that begins with `/` is the path of a file with it. The "
    "environment variable `FAKTORY_PASSWORD` takes precedence.",
    "PASSWORD_TRIES": "Wrong passwords per minute and address, counted separately for the server and the REST "
    "API; further attempts are rejected. 0: no limit.",
    "TLS_CERT": "PEM file with the server's certificate and its chain. If set, the server accepts TLS only.",
    "TLS_KEY": "PEM file with the private key of the certificate. Empty: the key is in the file of `TLS_CERT`.",
    "MAX_COMMAND_BYTES": "Maximum length of a command line in bytes.",
    "MAX_CONNECTIONS": "Maximum number of client connections.",
    "PREFETCH": "Maximum number of jobs per queue that the server prefetches if many clients fetch (PostgreSQL only). "
    "0: none.",
    "HELLO_TIMEOUT": "Seconds in which a new connection must send HELLO; the TLS handshake before it has the "
    "same time.",
    "COMMAND_TIMEOUT": "Seconds from the first byte of a command line to its end.",
    "ALLOW_FLUSH": "Whether the server executes FLUSH, which deletes all jobs. `None`: only if `DEBUG` is on.",
    "REFUSED_COMMANDS": "Commands that the server rejects: any of `MUTATE`, `QUEUE PAUSE`, `QUEUE RESUME`, "
    "`QUEUE REMOVE`.",
    "STRICT_WIDS": "Whether to reject FETCH, ACK and FAIL from a connection without a wid, and a BEAT for the "
    "wid of another one.",
    "PROCESSES": "Number of worker processes. `None`: one per CPU, at most 4 (1 on SQLite).",
    "CONCURRENCY": "Number of threads in each worker process.",
    "QUEUES": "Queues that the workers serve, in this order. `None`: all queues that the tasks use.",
    "MAX_JOBS": "Number of jobs after which a worker process is replaced. `None`: no limit.",
    "MAX_RSS": "Memory in MB above which a worker process is replaced after a job. `None`: no limit.",
    "SHUTDOWN_TIMEOUT": "Seconds that running jobs have to finish after SIGTERM.",
    "MAX_INTERRUPTIONS": "How often the shutdown of a worker returns a job to its queue; after that, it fails. "
    "`None`: no limit.",
    "BEAT_INTERVAL": "Seconds between two heartbeats of a worker.",
    "POLL_INTERVAL": "Maximum number of seconds between two polls for work; five times as many where "
    "notifications arrive.",
    "UNKNOWN_JOBTYPE_GRACE": "Seconds that jobs of an unknown task are left to workers with newer code, before "
    "they fail. 0: they fail at once.",
    "MIGRATIONS_WAIT": "Seconds that `runfaktory` waits if migrations are not applied. 0: it ends if migrations "
    "of this package are missing.",
    "MAX_ATTEMPTS": "Default of the task option `max_attempts`: attempts of a job, including the first.",
    "RESERVE_FOR": "Default of the task option `reserve_for`: seconds that an FWP client may keep a job.",
    "RESULT_TTL": "Default of the task option `result_ttl`: seconds that the result of a task is kept.",
    "MIDDLEWARE": "Dotted paths of `django_faktory.tasks.middleware.Middleware` classes, the outermost first.",
    "BATCH_COMMIT_WITHIN": "Seconds in which a batch must be committed. After that it expires, and its callbacks "
    "never run.",
    "CRON": "Periodic jobs by name: `{schedule, task or jobtype, …}`, see [Cron](../cron.md).",
    "LOCKET": "Queues whose identical jobs run one at a time: `locket(queues)`, see [Locks](../locks.md).",
    "LIMITS": 'Limits of queues, tasks and keys: `{"queues": {"mail": 5}}`, see [Limits](../limits.md).',
    "REDACT": "Dotted path of a function `(jobtype, arguments)` that returns the arguments to show to users. "
    "Empty: all are shown.",
    "ENCRYPT_ARGUMENTS": "Default of the task option `encrypt`: whether arguments and results are encrypted.",
    "ENCRYPTION_KEYS": "Fernet keys. The first one encrypts, each of them decrypts.",
    "GEARMONKEY_URL": "URL of the Redis that GearMonkey clients and workers use. The environment variable "
    "`GEARMONKEY_URL` takes precedence.",
    "GEARMONKEY_MODE": '`"direct"`: a worker runs jobs as it takes them; `"gateway"`: they are first stored as '
    "jobs of this package.",
    "GEARMONKEY_FUNCTIONS": "Names of functions, with the names of the tasks that serve them, in addition to "
    "`@task(gearmonkey=…)`.",
    "GEARMONKEY_LEASE": "Seconds without a heartbeat after which the jobs of a GearMonkey worker are given to others.",
    "GEARMONKEY_MAX_INPUT_BYTES": "Maximum length of the input of a GearMonkey job in bytes; a job with a longer "
    "one fails.",
    "GEARMONKEY_AUDIT": "Whether to find idle GearMonkey jobs that are in no queue, and queue them again.",
    "WORKER_TIMEOUT": "Seconds without a heartbeat after which a worker counts as lost.",
    "BEAT_KEEPS_JOBS": "Whether the BEAT of an FWP client extends the reservations of the jobs delivered to its wid.",
    "DATABASE_TIMEOUT": "Seconds that `runfaktory` waits for PostgreSQL's reply to a verb, and that a command "
    "waits for a lock.",
    "DEAD_TTL": "Seconds that a dead job is kept.",
    "BATCH_TTL": "Seconds that a batch is kept after its end.",
    "METRICS_TTL": "Seconds that the sums of each minute are kept for charts. Totals are kept until 14 days "
    "after the last job.",
    "METRICS_TOKEN": "Bearer token that `/metrics`, `/healthz` and `/readyz` require. Empty: none.",
    "STATSD": "`HOST:PORT` of a statsd server that receives the metrics. Empty: none.",
    "API_READS": "Maximum rate of reads per user of the REST API, such as `20/second`. Empty: no limit.",
    "API_ACTS": "Maximum rate of changes per user of the REST API. Empty: no limit.",
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
    configured_value = getattr(settings, "FAKTORY", {})
    if not isinstance(configured_value, Mapping):
        raise ImproperlyConfigured(f"FAKTORY: expected a dict, got {type(configured_value).__name__}")
    return configured_value


def outbox() -> list[str]:
    """Return the aliases of databases that enqueue through an outbox row; never the alias that stores the jobs."""
    if not apps.is_installed("django_faktory"):
        return []  # no table
    # Jobs of that database are part of its transactions already (ADR 8).
    own_alias = get("DATABASE") if get("BROKER") == "orm" else None
    aliases = get("OUTBOX")
    return [alias for alias in (["default"] if aliases is None else aliases) if alias != own_alias]


def allows_flush() -> bool:
    """Return whether FLUSH, which deletes all jobs, is permitted (W25)."""
    allowed = get("ALLOW_FLUSH")
    return bool(settings.DEBUG if allowed is None else allowed)


# Django's reports of errors must not show the local variables of these two functions.
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
            content = file.read().rstrip("\r\n")
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "what is no UTF-8 text"
    else:
        if content:
            return content
        reason = "an empty one"  # as a password it would disable authentication
    raise ImproperlyConfigured(
        f"{name}: expected a readable file with the password at {value}, got: {reason}; "
        "correct the path or set the password itself"
    )


@sensitive_variables()
def url() -> str:
    """Return the URL of the Faktory server for clients.

    Read from `FAKTORY_PROVIDER`, then `FAKTORY_URL`, then the local default.
    """
    # Both variables are those that clients of the original server read.
    provider = os.environ.get("FAKTORY_PROVIDER")
    if not provider:
        return os.environ.get("FAKTORY_URL") or "tcp://localhost:7419"
    if ":" in provider:
        raise ImproperlyConfigured(
            "FAKTORY_PROVIDER: expected the name of an environment variable that holds the URL, got a URL; "
            "set FAKTORY_URL instead"
        )
    address = os.environ.get(provider)
    if not address:
        raise ImproperlyConfigured(
            f"FAKTORY_PROVIDER: expected a Faktory URL in the environment variable {provider}, it is not set"
        )
    return address
