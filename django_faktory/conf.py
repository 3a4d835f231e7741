"""Read `FAKTORY = {…}` from the project's settings: every key with its default, its rule and its meaning.

Imports no model and no broker. `checks` reports unknown keys and invalid values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django.views.decorators.debug import sensitive_variables


class Rule(NamedTuple):
    """Constraint on the value of a setting: a phrase for error messages, and a predicate.

    A predicate that needs modules above this one is None here and defined in `checks.settings.PREDICATES`.
    """

    expected: str
    is_valid: Callable[[Any], bool] | None = None
    is_optional: bool = False
    """Whether None is valid too."""


class Setting(NamedTuple):
    """One key of FAKTORY. A value is checked, never converted: `get` returns what the project has written."""

    default: Any
    rule: Rule
    doc: str
    is_secret: bool = False
    """Whether its value is never displayed."""


def _integer(low: int, high: int = 2**31 - 1) -> Rule:
    # By default the largest value of an integer column.
    return Rule(
        f"a whole number from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def _seconds(low: float) -> Rule:
    # A comparison with NaN is false, and inf is above the largest value.
    return Rule(
        f"seconds, {low:g} or more",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= 2**31 - 1,
    )


def _or_none(rule: Rule) -> Rule:
    return rule._replace(expected=f"{rule.expected}, or None", is_optional=True)


def _list(expected: str) -> Rule:
    return Rule(
        expected, lambda value: isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_address(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    # From the right, because an IPv6 address contains colons.
    host, colon, port = value.rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and int(port) <= 65_535


def _is_token(value: Any) -> bool:
    # It is sent in an HTTP header, which cannot contain spaces or control characters.
    return isinstance(value, str) and all("!" <= character <= "~" for character in value)


def _is_rate(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"|[1-9]\d{0,8}/(second|minute|hour|day)", value) is not None


def _is_redis(value: Any) -> bool:
    schemes = ("redis://", "rediss://", "unix://", "redis+cluster://", "redis+sentinel://")
    return isinstance(value, str) and (value == "" or value.startswith(schemes))


def _is_function_path(value: Any) -> bool:
    return isinstance(value, str) and (value == "" or callable(import_string(value)))


def _is_web_address(value: Any) -> bool:
    return isinstance(value, str) and (value == "" or re.fullmatch(r"https?://\S+", value) is not None)


def _is_trace_address(value: Any) -> bool:
    return _is_web_address(value) and (value == "" or "{trace_id}" in value)


def _are_refusable(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(name in REFUSABLE for name in value)


REFUSABLE = ("MUTATE", "QUEUE PAUSE", "QUEUE RESUME", "QUEUE REMOVE")
"""Commands that `REFUSED_COMMANDS` may name; FLUSH has its own setting."""

_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_TEXT = Rule("a string", lambda value: isinstance(value, str))
_PEM_FILE = Rule("the path of a PEM file", lambda value: isinstance(value, str | os.PathLike))
_RATE = Rule('a rate such as "20/second" (minute, hour, day), or ""', _is_rate)

SETTINGS: dict[str, Setting] = {
    # storage of jobs
    "BROKER": Setting(
        "orm",
        Rule('"orm", "remote" or the dotted path of a Broker'),
        '`"orm"`: jobs are rows of this database; `"remote"`: they go to the Faktory server of `FAKTORY_URL`.',
    ),
    "DATABASE": Setting(
        "default",
        Rule("an alias of DATABASES", lambda value: isinstance(value, str) and value != ""),
        "Alias of the database that holds the jobs.",
    ),
    "OUTBOX": Setting(
        None,
        _or_none(_list("a list of aliases of DATABASES")),
        "Aliases of the databases with an outbox: jobs that are enqueued in their transactions are stored in "
        "them and sent after the commit. `None`: `default`, unless jobs are stored there.",
    ),
    # server
    "BIND": Setting(
        "127.0.0.1:7419",
        Rule('"HOST:PORT", such as "127.0.0.1:7419"', _is_address),
        "`HOST:PORT` on which the server listens.",
    ),
    "PASSWORD": Setting(
        "",
        _TEXT,
        "Password of the server. A value that begins with `/` is the path of a file that contains it. "
        "The environment variable `FAKTORY_PASSWORD` takes precedence.",
        is_secret=True,
    ),
    "PASSWORD_TRIES": Setting(
        20,
        _integer(0),
        "Wrong passwords per minute and address, counted separately for the server and the REST API; "
        "further attempts are rejected. 0: no limit.",
    ),
    "TLS_CERT": Setting(
        "",
        _PEM_FILE,
        "PEM file with the server's certificate and its chain. If set, the server accepts TLS only.",
    ),
    "TLS_KEY": Setting(
        "",
        _PEM_FILE,
        "PEM file with the private key of the certificate. Empty: the key is in the file of `TLS_CERT`.",
    ),
    "MAX_COMMAND_BYTES": Setting(
        16 * 1024 * 1024,
        _integer(4096),
        "Maximum length of a command line in bytes. Most verbs have [lower limits](command-limits.md).",
    ),
    "MAX_CONNECTIONS": Setting(
        2000,
        _integer(1),
        "Maximum number of client connections.",
    ),
    "PREFETCH": Setting(
        16,
        _integer(0, 500),
        "Maximum number of jobs per queue that the server prefetches if many clients fetch (PostgreSQL only). 0: none.",
    ),
    "HELLO_TIMEOUT": Setting(
        5.0,
        _seconds(0.1),
        "Seconds in which a new connection must send HELLO; the TLS handshake before it has the same limit.",
    ),
    "COMMAND_TIMEOUT": Setting(
        60.0,
        _seconds(0.1),
        "Seconds from the first byte of a command line to its end.",
    ),
    "ALLOW_FLUSH": Setting(
        None,
        _or_none(_FLAG),
        "Whether the server executes FLUSH, which deletes all jobs. `None`: only if `DEBUG` is on.",
    ),
    "REFUSED_COMMANDS": Setting(
        [],
        Rule(f"a list of some of {', '.join(REFUSABLE)}", _are_refusable),
        "Commands that the server rejects: any of `MUTATE`, `QUEUE PAUSE`, `QUEUE RESUME`, `QUEUE REMOVE`.",
    ),
    "STRICT_WIDS": Setting(
        False,
        _FLAG,
        "Whether to reject FETCH, ACK and FAIL from a connection without a wid, and a BEAT for the wid of another "
        "connection.",
    ),
    # worker
    "PROCESSES": Setting(
        None,
        _or_none(_integer(1, 1024)),
        "Number of worker processes. `None`: one per CPU, at most 4 (1 on SQLite).",
    ),
    "CONCURRENCY": Setting(
        5,
        _integer(1, 1024),
        "Number of threads in each worker process.",
    ),
    "QUEUES": Setting(
        None,
        _or_none(Rule('a list of queues, each "name" or "name:weight"')),
        "Queues that the workers serve, in this order. `None`: all queues that the tasks use.",
    ),
    "MAX_JOBS": Setting(
        None,
        _or_none(_integer(1)),
        "Number of jobs after which a worker process is replaced. `None`: no limit.",
    ),
    "MAX_RSS": Setting(
        None,
        _or_none(_integer(1, 2**20)),
        "Memory in MB above which a worker process is replaced after a job. `None`: no limit.",
    ),
    "SHUTDOWN_TIMEOUT": Setting(
        25.0,
        _seconds(0),
        "Seconds that running jobs have to finish after SIGTERM.",
    ),
    "MAX_INTERRUPTIONS": Setting(
        None,
        _or_none(_integer(0)),
        "How often the stop or trouble of a worker may return a job to its queue before it fails. `None`: no limit.",
    ),
    "BEAT_INTERVAL": Setting(
        15.0,
        _seconds(0.1),
        "Seconds between two heartbeats of a worker.",
    ),
    "POLL_INTERVAL": Setting(
        1.0,
        _seconds(0.01),
        "Seconds until an idle worker polls without a notification; five times as long while notifications arrive.",
    ),
    "UNKNOWN_JOBTYPE_GRACE": Setting(
        600.0,
        _seconds(0),
        "Seconds that jobs of an unknown task are left to workers with newer code before they fail. 0: they "
        "fail at once.",
    ),
    "MIGRATIONS_WAIT": Setting(
        300.0,
        _seconds(0),
        "Seconds that `runfaktory` waits for unapplied migrations. 0: it exits at once if migrations of this "
        "package are not applied.",
    ),
    # jobs
    "MAX_ATTEMPTS": Setting(
        26,
        _integer(1),
        "Default of the task option `max_attempts`: attempts of a job, including the first.",
    ),
    "RESERVE_FOR": Setting(
        1800,
        _integer(60, 86_400),  # W9
        "Default of the task option `reserve_for`: seconds that an FWP client may keep a job.",
    ),
    "RESULT_TTL": Setting(
        86_400,
        _integer(0),
        "Default of the task option `result_ttl`: seconds that the result of a task is kept.",
    ),
    "MIDDLEWARE": Setting(
        [],
        Rule("a list of dotted paths of Middleware classes that can be imported"),
        "Dotted paths of `django_faktory.tasks.middleware.Middleware` classes, the outermost first.",
    ),
    "BATCH_COMMIT_WITHIN": Setting(
        1800,
        _seconds(1),
        "Seconds in which a batch must be committed. After that it expires, and its callbacks never run.",
    ),
    "CRON": Setting(
        {},
        Rule("a dict of entries by name", _is_mapping),
        "Periodic jobs by name: `{schedule, task or jobtype, …}`, see [Cron](../cron.md).",
    ),
    "LOCKET": Setting(
        {},
        # Checked by `locket.problems`, which has error codes of its own.
        Rule("a dict: see `locket.problems`", lambda _: True),
        "Queues whose identical jobs run one at a time: `locket(queues)`, see [Locks](../locks.md).",
    ),
    "LIMITS": Setting(
        {},
        Rule("a dict of scopes: queues, tasks, keys, workers", _is_mapping),
        'Limits of queues, tasks and keys: `{"queues": {"mail": 5}}`, see [Limits](../limits.md).',
    ),
    "REDACT": Setting(
        "",
        Rule('the dotted path of a function that takes a jobtype and arguments, or ""', _is_function_path),
        "Dotted path of a function `(jobtype, arguments)` that returns the arguments to show to users. "
        "Empty: all are shown.",
    ),
    "LOG_LINES": Setting(
        50,
        _integer(0, 500),
        "Number of latest log lines of an attempt that are kept and shown on the page of its job. 0: none.",
    ),
    "RELEASE": Setting(
        "",
        Rule("a string such as a version or a commit", lambda value: isinstance(value, str)),
        "Release of your code, such as a version or a commit. Workers record it with each failed attempt.",
    ),
    "REDACT_LOG": Setting(
        "",
        Rule('the dotted path of a function that takes a jobtype and log lines, or ""', _is_function_path),
        "Dotted path of a function `(jobtype, lines)` that returns the log lines to show to users. "
        "Empty: all are shown, but none if `REDACT` is set.",
    ),
    "TRACE_URL": Setting(
        "",
        Rule('an address such as "https://traces.example.org/trace/{trace_id}", or ""', _is_trace_address),
        "Address of a trace in your tracing system, with `{trace_id}`. The page of a job with a `traceparent` links to "
        "it. Empty: no link.",
    ),
    "ENCRYPT_ARGUMENTS": Setting(
        False,
        _FLAG,
        "Default of the task option `encrypt`: whether arguments and results are encrypted.",
    ),
    "ENCRYPTION_KEYS": Setting(
        [],
        _list("a list of keys, each a string from Fernet.generate_key()"),
        "Fernet keys. The first key encrypts; all keys decrypt.",
        is_secret=True,
    ),
    # GearMonkey
    "GEARMONKEY_URL": Setting(
        "",
        Rule("the URL of a Redis server, such as redis://localhost:6379/0", _is_redis),
        "URL of the Redis server that GearMonkey clients and workers use. The environment variable "
        "`GEARMONKEY_URL` takes precedence.",
        is_secret=True,
    ),
    "GEARMONKEY_MODE": Setting(
        "direct",
        Rule('"direct" or "gateway"', lambda value: value in ("direct", "gateway")),
        '`"direct"`: a worker runs jobs as it takes them; `"gateway"`: they are first stored as jobs of this package.',
    ),
    "GEARMONKEY_FUNCTIONS": Setting(
        {},
        Rule("a dict of names of functions to names of tasks"),
        "Names of functions, with the names of the tasks that serve them, in addition to `@task(gearmonkey=…)`.",
    ),
    "GEARMONKEY_LEASE": Setting(
        20.0,
        _seconds(1),
        "Seconds without a heartbeat after which the jobs of a GearMonkey worker are given to other workers.",
    ),
    "GEARMONKEY_MAX_INPUT_BYTES": Setting(
        1024 * 1024,
        _integer(1),
        "Maximum length of the input of a GearMonkey job in bytes; a job with a longer one fails.",
    ),
    "GEARMONKEY_AUDIT": Setting(
        False,
        _FLAG,
        "Whether to find idle GearMonkey jobs that are in no queue, and queue them again.",
    ),
    # maintenance
    "WORKER_TIMEOUT": Setting(
        60,
        _seconds(1),
        "Seconds without a heartbeat after which a worker counts as lost.",
    ),
    "ALARM_EMAILS": Setting(
        [],
        _list("a list of e-mail addresses"),
        "Addresses to which `runfaktory` sends alarms, with Django's e-mail settings. Empty: none.",
    ),
    "ALARM_WEBHOOK": Setting(
        "",
        Rule('an address that begins with https:// or http://, or ""', _is_web_address),
        "Address to which `runfaktory` posts alarms as JSON. Empty: none.",
        is_secret=True,
    ),
    "ALARM_REPEAT": Setting(
        14_400.0,
        _seconds(60),
        "Seconds after which an alarm that is still active is sent again.",
    ),
    "ALARM_LATENCY": Setting(
        600.0,
        _seconds(0),
        "Seconds that the first job of a queue may wait before an alarm reports the queue. 0: never.",
    ),
    "BEAT_KEEPS_JOBS": Setting(
        False,
        _FLAG,
        "Whether the BEAT of an FWP client extends the reservations of the jobs delivered to its wid.",
    ),
    "DATABASE_TIMEOUT": Setting(
        10.0,
        _seconds(1),
        "Seconds that `runfaktory` waits for PostgreSQL's reply to a call, and that a command waits for a lock.",
    ),
    "DEAD_TTL": Setting(
        180 * 86_400,
        _seconds(0),
        "Seconds that a dead job is kept.",
    ),
    "EXPORT_HISTORY": Setting(
        "",
        Rule('the dotted path of a function that takes a day and a queryset of jobs, or ""', _is_function_path),
        "Called with ended jobs before they are deleted, as `function(day, rows)`; it may get the same rows again.",
    ),
    "BATCH_TTL": Setting(
        7 * 86_400,
        _seconds(0),
        "Seconds that a batch is kept after its end.",
    ),
    # metrics
    "METRICS_TTL": Setting(
        2_592_000,
        _seconds(0),
        "Seconds that timings are kept for charts: by minute for 4 hours, then by hour. Totals are kept until 14 days "
        "after the last job.",
    ),
    "METRICS_TOKEN": Setting(
        "",
        Rule('a string of printable ASCII without spaces, or ""', _is_token),
        "Bearer token that `/metrics`, `/healthz` and `/readyz` require. Empty: none.",
        is_secret=True,
    ),
    "STATSD": Setting(
        "",
        Rule('"HOST:PORT", such as "127.0.0.1:8125", or ""', lambda value: value == "" or _is_address(value)),
        "`HOST:PORT` of a statsd server that receives the metrics. Empty: none.",
    ),
    # the REST API
    "API_READS": Setting(
        "1200/minute",
        _RATE,
        "Maximum rate of reads per user of the REST API, such as `20/second`. Empty: no limit.",
    ),
    "API_WRITES": Setting(
        "300/minute",
        _RATE,
        "Maximum rate of changes per user of the REST API. Empty: no limit.",
    ),
}

DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}

_NO_SETTINGS: Mapping[str, Any] = {}


def get(name: str) -> Any:
    """Return `FAKTORY[name]`, or its default.

    Read from the settings on each call, so that override_settings works.
    """
    return configured().get(name, DEFAULTS[name])


def configured() -> Mapping[str, Any]:
    """Return the project's FAKTORY setting, unchanged. Raises ImproperlyConfigured unless it is a mapping.

    It is the same object until the settings change.
    """
    configured_value = getattr(settings, "FAKTORY", _NO_SETTINGS)
    if not isinstance(configured_value, Mapping):
        raise ImproperlyConfigured(f"FAKTORY: expected a dict, got {type(configured_value).__name__}")
    return configured_value


def outbox() -> list[str]:
    """Return the aliases of databases that enqueue through an outbox row; never the alias that stores the jobs."""
    if not apps.is_installed("django_faktory"):
        return []  # no table
    # Jobs of that database are part of its transactions already (ADR 0008).
    own_alias = get("DATABASE") if get("BROKER") == "orm" else None
    aliases = get("OUTBOX")
    return [alias for alias in (["default"] if aliases is None else aliases) if alias != own_alias]


def allows_flush() -> bool:
    """Return whether FLUSH, which deletes all jobs, is permitted (W25)."""
    allowed = get("ALLOW_FLUSH")
    return bool(settings.DEBUG if allowed is None else allowed)


# Django's error reports must not show the local variables of these two functions.
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
        reason = error.strerror if isinstance(error, OSError) else "text that is not UTF-8"
    else:
        if content:
            return content
        reason = "an empty file"  # as a password it would disable authentication
    raise ImproperlyConfigured(
        f"{name}: expected a readable file with the password at {value}, got: {reason}; "
        "correct the path or set the password itself"
    )


@sensitive_variables()
def url() -> str:
    """Return the URL of the Faktory server for clients.

    Read from `FAKTORY_PROVIDER`, then `FAKTORY_URL`, then the local default.
    """
    # The clients of the original server read the same two variables.
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
            f"FAKTORY_PROVIDER: expected a Faktory URL in the environment variable {provider}, which is not set"
        )
    return address
