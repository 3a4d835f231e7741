"""System checks of the project's settings. The ids are stable: E001…, W001….

Read settings, the environment and, if Django passes databases, their versions and isolation levels. Change nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register  # noqa: A004  (Django's name)
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from .. import conf
from ..backend import is_checked_by_django
from ..brokers import Broker, tls
from ..core import locket
from ..core.payloads import FUNCTION, queue_name
from ..core.suggestions import find_closest
from ..errors import InvalidPayload
from ..store.dialects import cursor_hooks
from ..tasks.compat import task_backends
from ..tasks.middleware import Middleware, instantiate
from .tasks import is_faktory_entry

OLDEST = {"postgresql": (15,), "mariadb": (10, 6)}
"""Oldest supported version of each database; each supports what a claim needs, such as SKIP LOCKED, and is
still maintained.
"""

# The documentation and the example project have the same options; a test compares them.
SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


@register
def check_settings(**_: Any) -> list[CheckMessage]:
    """Check FAKTORY: keys, values, and combinations of values."""
    try:
        configured = conf.configured()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="django_faktory.E007")]
    values = {**conf.DEFAULTS, **configured}
    messages: list[CheckMessage] = [*_check_keys(configured), *_check_values(configured)]
    if not settings.USE_TZ:
        messages.append(
            Error(
                "USE_TZ: expected True: times of jobs are absolute and shared with other languages",
                hint="USE_TZ = True (Django's default since 5.0)",
                id="django_faktory.E011",
            )
        )
    # The remaining checks rely on the types of `values`, so they run only if every value is valid.
    return messages or [
        *_check_combinations(values),
        *_check_locket(values),
        *_check_files(values),
        *_check_environment(),
    ]


@register
def check_tasks_setting(**_: Any) -> list[CheckMessage]:
    """Check that TASKS has an entry for FaktoryBackend, and check these entries."""
    backends = [
        task_backends[alias] for alias, params in getattr(settings, "TASKS", {}).items() if is_faktory_entry(params)
    ]
    if backends:
        return [] if is_checked_by_django() else [message for backend in backends for message in backend.check()]
    return [
        Warning(
            "TASKS: no entry uses FaktoryBackend: tasks are enqueued elsewhere, or run at once",
            hint='TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}',
            id="django_faktory.W001",
        )
    ]


@register
def check_database_options(**_: Any) -> list[CheckMessage]:
    """Check the options of the database that stores the jobs."""
    connection = job_database()
    if connection is None:
        return []
    options = connection.settings_dict.get("OPTIONS", {})
    place = f"DATABASES[{connection.alias!r}]"
    if connection.vendor == "sqlite":
        return _check_sqlite_options(place, connection, options)
    if connection.vendor == "mysql":
        return _check_mysql_options(place, options)
    return []


@register
def check_connections(**_: Any) -> list[CheckMessage]:
    """Check transactions and cursors of the databases that store jobs or an outbox."""
    messages = [message for one in written_databases() for message in _check_autocommit(one)]
    connection = job_database()
    return [*messages, *_check_isolation_option(connection), *_check_cursor(connection)] if connection else messages


@register(Tags.database)
def check_isolation(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the isolation level that the server, the database or the role gives to a session.

    PostgreSQL uses this level even if OPTIONS names another one: OPTIONS applies to transactions that the driver
    begins, and a statement in autocommit is not part of one.
    """
    connection = job_database()
    # A forbidden level in OPTIONS is reported by check_connections, so it is not reported twice.
    if connection is None or connection.alias not in (databases or ()) or _check_isolation_option(connection):
        return []
    if connection.vendor not in _FORBIDDEN_LEVELS:
        return []
    with connection.cursor() as cursor:
        cursor.execute(_isolation_query(connection))
        level = str(cursor.fetchone()[0])
    # MySQL and MariaDB write "REPEATABLE-READ", PostgreSQL "repeatable read".
    if level.replace("-", " ").lower() not in _FORBIDDEN_LEVELS[connection.vendor]:
        return []
    if connection.vendor == "postgresql":
        remedy = (
            '"OPTIONS": {"options": "-c default_transaction_isolation=read\\\\ committed"}; or as an administrator: '
            f"ALTER ROLE {connection.settings_dict['USER'] or '…'} SET default_transaction_isolation = 'read committed'"
        )
    else:
        remedy = _REMEDY_MYSQL
    return [_isolation_error(f"DATABASES[{connection.alias!r}]: isolation level of the session", level, remedy)]


@register(Tags.database)
def check_database_version(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that the database server that stores the jobs is supported, and new enough.

    Queries the server, so it runs only for the databases that Django passes.
    """
    connection = job_database()
    if connection is None or connection.alias not in (databases or ()):
        return []
    name = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor
    oldest, version = OLDEST.get(name), connection.get_database_version()
    if name == "mysql":  # Django's name for both
        expected = "MariaDB: MySQL has no collation utf8mb4_nopad_bin"
    elif oldest is None or version >= oldest:
        return []
    else:
        expected = f"{_dotted(oldest)} or newer"
    return [
        Error(
            f"DATABASES[{connection.alias!r}]: {connection.display_name} {_dotted(version)}: jobs need {expected}",
            hint='Upgrade the server, or name another database in FAKTORY["DATABASE"].',
            id="django_faktory.E006",
        )
    ]


def _check_keys(configured: Mapping[str, Any]) -> Iterable[CheckMessage]:
    for key in configured:
        if key not in conf.DEFAULTS:
            closest = find_closest(str(key), conf.DEFAULTS)
            hint = f"Did you mean {closest!r}?" if closest else f"Known: {', '.join(sorted(conf.DEFAULTS))}."
            yield Error(f"FAKTORY: unknown key {key!r}", hint=hint, id="django_faktory.E001")


def _check_values(configured: Mapping[str, Any]) -> Iterable[CheckMessage]:
    for key, value in configured.items():
        if key not in conf.SETTINGS:
            continue
        setting, problem = conf.SETTINGS[key], ""
        try:
            if is_valid(key, value):
                continue
        except Exception as error:  # noqa: BLE001  (imports project code, which may raise any error)
            problem = f": {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        # Check messages end up in logs and CI output, so values of secret settings are left out.
        shown_value = "something else" if setting.is_secret else f"{value!r:.80}{problem}"
        yield Error(
            f"FAKTORY[{key!r}]: expected {setting.rule.expected}, got {shown_value}",
            hint=setting.doc,
            id="django_faktory.E002",
        )


def is_valid(key: str, value: Any) -> bool:
    """Return whether a value satisfies the rule of its setting; an error of importing it is raised."""
    rule = conf.SETTINGS[key].rule
    return (rule.is_optional and value is None) or (rule.is_valid or PREDICATES[key])(value)


def _check_combinations(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    """Check combinations of values that are valid one by one."""
    if values["BROKER"] == "orm" and values["DATABASE"] not in connections:
        known = ", ".join(map(repr, connections))
        yield Error(
            f"FAKTORY['DATABASE']: no database has the alias {values['DATABASE']!r}; known: {known}",
            id="django_faktory.E003",
        )
    for alias in values["OUTBOX"] or ():
        if alias not in connections:
            known = ", ".join(map(repr, connections))
            yield Error(
                f"FAKTORY['OUTBOX']: no database has the alias {alias!r}; known: {known}", id="django_faktory.E013"
            )
    # Without the app there is no table for an outbox (ADR 0008).
    if values["BROKER"] != "orm" and not apps.is_installed("django_faktory"):
        yield Warning(
            "FAKTORY['BROKER']: tasks enqueued inside a transaction are sent at once, even if it rolls back",
            hint='INSTALLED_APPS += ["django_faktory"], then migrate: then an outbox sends them after the commit.',
            id="django_faktory.W005",
        )
    if values["BEAT_INTERVAL"] * 2 > values["WORKER_TIMEOUT"]:
        yield Warning(
            f"FAKTORY: a BEAT_INTERVAL of {values['BEAT_INTERVAL']} s with a WORKER_TIMEOUT of "
            f"{values['WORKER_TIMEOUT']} s: a running worker counts as lost after one late BEAT",
            hint="Set WORKER_TIMEOUT to at least twice BEAT_INTERVAL.",
            id="django_faktory.W004",
        )


def _check_locket(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    """Check LOCKET: its E1 to E6 become django_faktory.E031 to E036, and W1 to W3 become W031 to W033."""
    problems = locket.problems(values["LOCKET"], beat_s=values["BEAT_INTERVAL"])
    for problem in problems:
        message_class = Warning if problem.is_warning else Error
        check_id = f"{problem.code[0]}03{problem.code[1]}"
        yield message_class(f"FAKTORY: {problem.message}", hint=problem.remedy, id=f"django_faktory.{check_id}")
    # Only if LOCKET is valid so far: otherwise it may not be a dict.
    path = values["LOCKET"].get("JOB_LOCK_KEY") if not problems else None
    if isinstance(path, str):
        try:
            is_function = callable(import_string(path))
        except ImportError:
            is_function = False
        if not is_function:
            yield Error(
                f"FAKTORY: LOCKET: JOB_LOCK_KEY: expected the dotted path of a function, got {path!r:.80}",
                hint="Write a function that takes a job and returns a string, or None for no lock.",
                id="django_faktory.E035",
            )


def _check_files(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    """Check that the certificate and its key can be loaded."""
    if values["TLS_KEY"] and not values["TLS_CERT"]:
        hint = conf.SETTINGS["TLS_CERT"].doc
        yield Error("FAKTORY['TLS_KEY']: expected TLS_CERT with it, got none", hint=hint, id="django_faktory.E012")
    elif values["TLS_CERT"]:
        # Load them as the server does, to find every problem: no PEM, a passphrase, the key of another certificate.
        try:
            tls.server_context(str(values["TLS_CERT"]), str(values["TLS_KEY"]))
        except tls.UnusableFile as error:
            yield Error(str(error), hint=conf.SETTINGS["TLS_CERT"].doc, id="django_faktory.E012")


def _check_environment() -> Iterable[CheckMessage]:
    """Check FAKTORY_PASSWORD and FAKTORY_PROVIDER."""
    try:
        conf.password()
    except ImproperlyConfigured as error:
        yield Error(str(error), id="django_faktory.E004")
    if os.environ.get("FAKTORY_PROVIDER"):
        try:
            conf.url()
        except ImproperlyConfigured as error:
            yield Error(str(error), id="django_faktory.E005")


def job_database() -> BaseDatabaseWrapper | None:
    """Return the connection of the database that stores the jobs.

    None if jobs are stored on a remote server, or if the settings are invalid.
    """
    try:
        broker, alias = conf.get("BROKER"), conf.get("DATABASE")
    except ImproperlyConfigured:  # E007 reports it
        return None
    return connections[alias] if broker == "orm" and isinstance(alias, str) and alias in connections else None


def written_databases() -> list[BaseDatabaseWrapper]:
    """Return the connections of the databases that store jobs or an outbox."""
    connection = job_database()
    aliases = [connection.alias] if connection else []
    with suppress(ImproperlyConfigured, TypeError):  # reported by other checks
        aliases += conf.outbox()
    return [connections[alias] for alias in dict.fromkeys(aliases) if alias in connections]


def _check_sqlite_options(
    place: str, connection: BaseDatabaseWrapper, options: Mapping[str, Any]
) -> list[CheckMessage]:
    missing = []
    if str(options.get("transaction_mode")).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        missing.append("transaction_mode: two transactions that read before they write collide, and one fails")
    if "wal" not in str(options.get("init_command")).lower():
        missing.append("init_command: without WAL, readers block the writer")
    timeout = options.get("timeout")
    if not isinstance(timeout, int | float) or timeout < 10:
        missing.append("timeout: one transaction writes at a time, and a wait of 5 seconds may be too short")
    # An in-memory database is for tests: no worker process can open it.
    if not missing or ":memory:" in str(connection.settings_dict["NAME"]):
        return []
    paste = ", ".join(f'"{key}": {value!r}'.replace("'", '"') for key, value in SQLITE_OPTIONS.items())
    return [
        Warning(
            f"{place}: SQLite's options are unsuited for workers: {'; '.join(missing)}",
            hint=f'"OPTIONS": {{{paste}}}',
            id="django_faktory.W002",
        )
    ]


def _check_mysql_options(place: str, options: Mapping[str, Any]) -> list[CheckMessage]:
    # Django's own default, also if OPTIONS has no entry; None means the server's default, REPEATABLE READ.
    level = options.get("isolation_level", "read committed")
    if str(level).lower() in ("read committed", *_FORBIDDEN_LEVELS["mysql"]):
        return []  # E016 reports the latter
    return [
        Warning(
            f"{place}: isolation level {level or 'of the server'!s}: claims lock gaps between rows, and workers wait "
            "for each other",
            hint='"OPTIONS": {"isolation_level": "read committed"}, which is Django\'s default.',
            id="django_faktory.W003",
        )
    ]


def _check_autocommit(connection: BaseDatabaseWrapper) -> Iterable[CheckMessage]:
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"DATABASES[{connection.alias!r}]: AUTOCOMMIT: expected True, got False: jobs are stored in "
            "transactions that Django opens and commits, and enqueue() would raise TransactionManagementError",
            hint='Remove "AUTOCOMMIT", and use transaction.atomic() or "ATOMIC_REQUESTS": True.',
            id="django_faktory.E017",
        )


def _check_cursor(connection: BaseDatabaseWrapper) -> Iterable[CheckMessage]:
    methods = cursor_hooks.own_methods(connection) if connection.vendor == "postgresql" else []
    # Not a warning: such a backend may be intended, and its jobs are stored correctly.
    if methods:
        yield Info(
            f"DATABASES[{connection.alias!r}]: {connection.settings_dict['ENGINE']} has its own {', '.join(methods)}: "
            "each statement goes through connection.cursor() and is not prepared, which is slower",
            hint="Multi-tenant backends need it, see docs/howto/multi-tenant.md; otherwise use Django's own backend.",
            id="django_faktory.I001",
        )


_FORBIDDEN_LEVELS = {
    "postgresql": ("repeatable read", "serializable"),
    "mysql": ("serializable",),  # W003 covers REPEATABLE READ, which is slow there, but works
}
_REMEDY_MYSQL = '"OPTIONS": {"isolation_level": "read committed"}, which is Django\'s default.'


def _isolation_query(connection: BaseDatabaseWrapper) -> str:
    if connection.vendor == "postgresql":
        return "SHOW default_transaction_isolation"
    return "SELECT @@SESSION.tx_isolation"  # MariaDB before 11.1 has no other name


def _check_isolation_option(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    """Check OPTIONS: a number of Django's IsolationLevel on PostgreSQL, a name on MariaDB."""
    level = connection.settings_dict.get("OPTIONS", {}).get("isolation_level")
    # Only a level that is set here: the session's own level is read from the server, by check_isolation.
    name, remedy = str(level), _REMEDY_MYSQL
    if connection.vendor == "postgresql":
        remedy = 'Remove "isolation_level" from OPTIONS; use another alias for transactions that need more.'
        if isinstance(level, int):
            from django.db.backends.postgresql.psycopg_any import IsolationLevel  # needs a PostgreSQL driver

            name = next(
                (known_level.name.replace("_", " ") for known_level in IsolationLevel if known_level == level), name
            )
    if name.lower() not in _FORBIDDEN_LEVELS.get(connection.vendor, ()):
        return []
    return [_isolation_error(f"DATABASES[{connection.alias!r}]: isolation_level", name.lower(), remedy)]


def _isolation_error(place: str, level: str, remedy: str) -> CheckMessage:
    return Error(
        f"{place}: expected read committed, got {level}: claims of several workers would fail with serialization "
        "errors, and running workers would be declared lost",
        hint=remedy,
        id="django_faktory.E016",
    )


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _is_broker(value: Any) -> bool:
    if value in ("orm", "remote"):
        return True
    broker_class = import_string(value) if isinstance(value, str) else None
    return isinstance(broker_class, type) and issubclass(broker_class, Broker)


def _are_queues(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_queue, value))


def _are_middleware(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(instantiate(path), Middleware) for path in value)


def _are_functions(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(function, str) and re.fullmatch(FUNCTION, function) and isinstance(task_name, str)
        for function, task_name in value.items()
    )


def _is_queue(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    name, colon, weight = value.partition(":")
    if not name or (colon and not (weight.isascii() and weight.isdigit() and int(weight) > 0)):
        return False
    try:
        return bool(queue_name(name))
    except InvalidPayload:
        return False


PREDICATES: dict[str, Callable[[Any], bool]] = {
    "BROKER": _is_broker,
    "QUEUES": _are_queues,
    "MIDDLEWARE": _are_middleware,
    "GEARMONKEY_FUNCTIONS": _are_functions,
}
"""Predicates of the settings whose rules need modules above `conf`."""
