"""System checks of access control: E060 and W060 always, W061 to W067 with `--deploy`.

Reads settings, the environment and file modes. Never shows a secret.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004  (Django's name)
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..brokers.client import parse_url
from ..errors import FaktoryError
from ..server.listening import find_max_backlog
from ..tasks import encryption
from ..tasks.base import import_tasks, registered

SHORTEST = 16
"""Minimum number of characters of a password.

A recorded handshake can be attacked offline, with about 100,000 guesses a second on one processor.
"""

_REMEDY = "Set FAKTORY_PASSWORD to the password, or to the absolute path of its file; see docs/security.md."


@register
def check_bind(**_: Any) -> list[CheckMessage]:
    """Warn if other machines can reach the server and there is no password."""
    values, password = _read_values()
    host = _host(values)
    # None: the password cannot be read, which another check reports.
    if password is None or password or host is None or is_loopback(host):
        return []
    return [
        Warning(
            f"FAKTORY['BIND']: {host} can be reached from other machines, and there is no password: any client can "
            "add, fetch and delete jobs",
            hint=_REMEDY,
            id="django_faktory.W060",
        )
    ]


@register
def check_encryption(**_: Any) -> list[CheckMessage]:
    """Check that encryption works if a setting or a task asks for it: otherwise enqueue() would fail."""
    values = _read_values()[0]
    is_asked_for = values["ENCRYPT_ARGUMENTS"] or values["ENCRYPTION_KEYS"] or _any_task_encrypts()
    problem = encryption.problem() if is_asked_for else ""
    hint = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
    return [Error(f"encryption of arguments: {problem}", hint=hint, id="django_faktory.E060")] if problem else []


def _any_task_encrypts() -> bool:
    # Other checks may not have imported the tasks yet: the order of checks is not defined, and `--tag` omits some.
    import_tasks()  # E015 reports a module that cannot be imported
    return any(task.encrypt for task in registered())


@register(Tags.security, deploy=True)
def check_deploy(**_: Any) -> list[CheckMessage]:
    """Warn about settings that suit development and are unsafe in production."""
    values, password = _read_values()
    host = _host(values)
    if password is None:
        return []  # another check reports it
    if host is None:  # no server of this project, so its client is checked
        return [*_check_client()]
    is_local = is_loopback(host)
    return [
        *_check_password(password, is_local=is_local),
        *_check_tls(values, is_local=is_local),
        *_check_files(values),
        *_check_flush(values),
        *_check_backlog(values),
    ]


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the host. Names other than localhost may resolve to any address."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_values() -> tuple[Mapping[str, Any], str | None]:
    """Return the settings and the password; None for a password that cannot be read, which other checks report."""
    try:
        return {**conf.DEFAULTS, **conf.configured()}, conf.password()
    except (ImproperlyConfigured, AttributeError):  # a password that is no string
        return conf.DEFAULTS, None


def _host(values: Mapping[str, Any]) -> str | None:
    """Return the address on which this project's server listens; None if there is none or the setting is invalid."""
    bind = values["BIND"]
    return bind.rpartition(":")[0] or None if isinstance(bind, str) and values["BROKER"] != "remote" else None


def _check_password(password: str, *, is_local: bool) -> Iterable[CheckMessage]:
    if not password and is_local:  # for other addresses W060 reports it
        yield Warning(
            "FAKTORY['PASSWORD']: there is none: every process on this machine can add, fetch and delete jobs",
            hint=_REMEDY,
            id="django_faktory.W061",
        )
    elif password and len(password) < SHORTEST:
        yield Warning(
            f"FAKTORY['PASSWORD']: expected {SHORTEST} characters or more, got {len(password)}: it can be "
            "guessed from a recorded handshake",
            hint='python -c "import secrets; print(secrets.token_urlsafe(32))"',
            id="django_faktory.W062",
        )


def _check_tls(values: Mapping[str, Any], *, is_local: bool) -> Iterable[CheckMessage]:
    if not is_local and not values["TLS_CERT"]:
        yield Warning(
            "FAKTORY['TLS_CERT']: the server listens for other machines without TLS: jobs and their arguments can "
            "be read and changed in transit",
            hint="Set TLS_CERT, or listen on 127.0.0.1. This check does not see the options of runfaktory.",
            id="django_faktory.W063",
        )


def _check_client() -> Iterable[CheckMessage]:
    """Check the connection to a remote server."""
    try:
        address = parse_url(conf.url())
    except (FaktoryError, ImproperlyConfigured):
        return  # E005 reports it, or the connecting command
    if not address.is_tls and not is_loopback(address.host):
        yield Warning(
            f"FAKTORY_URL: jobs go to {address} without TLS: they can be read and changed in transit",
            hint="tcp+tls://:PASSWORD@HOST:PORT, if that server supports TLS.",
            id="django_faktory.W064",
        )


def _check_files(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    """Warn about files with secrets that other users can read."""
    # A value that begins with / is the path of a file with the password.
    secret = os.environ.get("FAKTORY_PASSWORD") or values["PASSWORD"]
    paths = {"FAKTORY['TLS_KEY']": values["TLS_KEY"] or values["TLS_CERT"]}
    if secret.startswith("/"):
        paths["FAKTORY_PASSWORD"] = secret
    for name, path in paths.items():
        if path and _others_may_read(path):
            yield Warning(
                f"{name}: every user of this machine can read {path}",
                hint=f"chmod o-rwx {path}",
                id="django_faktory.W065",
            )
    # The jobs' arguments are in the file, unlike with a database server, which checks its users.
    path = _database_file(values["DATABASE"])
    if path and _others_may_read(path) and _others_may_enter(path.parent):
        yield Warning(
            f"DATABASES[{values['DATABASE']!r}]: every user of this machine can read {path}, with the arguments of the "
            "jobs",
            hint=f"chmod o-rwx {path}; SQLite gives its other files the same mode.",
            id="django_faktory.W065",
        )


def _database_file(alias: str) -> Path | None:
    """Return the file of an SQLite database; None for another database."""
    database = settings.DATABASES.get(alias, {})
    name = database.get("NAME")
    if not str(database.get("ENGINE", "")).endswith("sqlite3") or not name:
        return None
    return Path(name).absolute()  # the name of an in-memory database is not an existing file


def _others_may_enter(folder: Path) -> bool:
    # A file in a folder that other users cannot enter is safe whatever its own mode is.
    try:
        return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    except OSError:
        return False


def _others_may_read(path: Any) -> bool:
    try:
        return bool(Path(path).stat().st_mode & stat.S_IROTH)
    except (OSError, TypeError, ValueError):
        return False


def _check_flush(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    if values["ALLOW_FLUSH"]:
        yield Warning(
            "FAKTORY['ALLOW_FLUSH']: any client can delete all jobs with one command",
            hint="Remove the setting: FLUSH is then allowed only if DEBUG is on.",
            id="django_faktory.W066",
        )


def _check_backlog(values: Mapping[str, Any]) -> Iterable[CheckMessage]:
    max_backlog = find_max_backlog()
    if max_backlog is not None and max_backlog < values["MAX_CONNECTIONS"]:
        yield Warning(
            f"FAKTORY['MAX_CONNECTIONS']: this system lets {max_backlog} connections wait to be accepted, expected "
            f"{values['MAX_CONNECTIONS']}: after a restart some clients may wait for a minute",
            hint=f"sysctl -w net.core.somaxconn={values['MAX_CONNECTIONS']}",
            id="django_faktory.W067",
        )
