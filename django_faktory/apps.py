"""Configuration of the Django app (`FaktoryConfig`)."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connections
from django.db.models.signals import post_migrate
from django.db.utils import load_backend

from .core.extras import explain_missing
from .errors import FunctionsMissing

_DRIVERS = {
    "django.db.backends.postgresql": ("psycopg", "postgres"),
    "django.db.backends.mysql": ("mysqlclient", "mysql"),
}


class FaktoryConfig(AppConfig):
    """App config for `django_faktory` in INSTALLED_APPS."""

    name = "django_faktory"
    verbose_name = "Faktory"
    default_auto_field = "django.db.models.BigAutoField"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _check_drivers()  # before the first model, which would raise an error of Django that names no extra

    def ready(self) -> None:
        """Register checks, proxy models and the receiver of `post_migrate`; install the operations of query sets.

        Tasks are imported later, by the commands that run them (see `tasks.base.autodiscover`).
        """
        # Imported here because importing registers them, and models can be imported only once the apps are loaded.
        from .checks import cron, databases, encodings, limits, security, settings, tasks  # noqa: F401
        from .contrib.gearmonkey import checks  # noqa: F401
        from .models import hooks, proxies  # noqa: F401
        from .operations import bulk
        from .tasks.arguments import encode_call

        # The models' query sets call higher layers, which they must not import (ADR 0037).
        operations = hooks.Operations(
            encode_args=lambda args: encode_call(args, {})[0],
            execute=bulk.execute,
            pause=bulk.pause,
            resume=bulk.resume,
        )
        hooks.install(operations)
        # Not migrations: tables are also created by `migrate --run-syncdb`, `MIGRATE: False`, `pytest --nomigrations`
        # and, for tenants, `migrate_schemas`.
        post_migrate.connect(_complete_tables, sender=self)


def _check_drivers() -> None:
    """Name the extra that installs the driver of a database, if the driver is missing."""
    for alias, database in settings.DATABASES.items():
        engine = database.get("ENGINE", "")
        if engine not in _DRIVERS:
            continue
        try:
            load_backend(engine)
        except ImproperlyConfigured as error:
            raise ImproperlyConfigured(explain_missing(f"DATABASES[{alias!r}]", *_DRIVERS[engine])) from error


def _complete_tables(using: str, **_: Any) -> None:
    """Partition the history, install triggers, and functions of PostgreSQL, in a database that has the tables."""
    from .models import History, Job
    from .store.dialects import dialect_of, triggers
    from .store.dialects.postgresql import functions
    from .store.statistics import deltas

    connection = connections[using]
    if not triggers.has_tables(connection):
        return
    dialect_of(connection).partitions.convert(connection)  # before it has triggers
    try:
        if connection.vendor == "postgresql":
            functions.install(connection)
        is_new = bool(triggers.install(connection))
    except FunctionsMissing as error:
        raise CommandError(str(error)) from error  # `migrate` prints it in one line
    # Rows may have been written without triggers. `flush` empties tables in any order, and on MariaDB leaves deltas.
    is_flushed = connection.vendor == "mysql" and not Job.live.using(using).exists()
    if is_new or is_flushed:
        deltas.recount(using=using, with_history=is_new or not History.objects.using(using).exists())
