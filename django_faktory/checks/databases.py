"""System checks of the database of the jobs: routers that name another one, and rows where nothing reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004  (Django's name)
from django.db import connections, router

from ..models import Job, Limit
from ..models.cron import CronEntry
from .settings import job_database


@register
def check_routers(**_: Any) -> list[CheckMessage]:
    """Check that no router sends the rows to another database or keeps their tables out of the right one."""
    connection = job_database()
    if connection is None:
        return []
    alias = connection.alias
    hint = (
        f"For django_faktory, return {alias!r} in db_for_write and True in allow_migrate, "
        "or change FAKTORY['DATABASE']."
    )
    messages: list[CheckMessage] = []
    answer = next(_answers(), alias)
    if answer != alias:
        text = f"DATABASE_ROUTERS: expected {alias!r}, as in FAKTORY['DATABASE'], for writes of jobs, got {answer!r}"
        messages.append(Error(text, hint=hint, id="django_faktory.E019"))
    # The router of a backend with a schema for each tenant answers by the schema of the moment.
    has_tenants = hasattr(connection, "schema_name")
    if not has_tenants and not router.allow_migrate_model(alias, Job):
        text = f"DATABASE_ROUTERS: allow_migrate is False for {alias!r}: migrate creates no tables for the jobs"
        messages.append(Warning(text, hint=hint, id="django_faktory.W007"))
    return messages


def _answers() -> Iterator[str]:
    # Not `router.db_for_write`: it returns "default" if no router has an answer.
    for one in router.routers:
        choose = getattr(one, "db_for_write", None)
        if choose is not None and (answer := choose(Job)):
            yield answer


@register(Tags.database)
def check_other_databases(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check that the other databases that Django names have no jobs, cron entries or limits: nothing reads them."""
    connection = job_database()
    if connection is None:
        return []
    messages: list[CheckMessage] = []
    for alias in set(databases or ()) - {connection.alias}:
        tables = connections[alias].introspection.table_names()
        models = [model for model in (Job, CronEntry, Limit) if model._meta.db_table in tables]  # noqa: SLF001
        filled = [str(model._meta.verbose_name_plural) for model in models if model.objects.using(alias).exists()]  # noqa: SLF001
        if filled:
            used = f"FAKTORY['DATABASE'] is {connection.alias!r}"
            text = f"DATABASES[{alias!r}] has {', '.join(filled)} that nothing reads: {used}"
            hint = f"Delete these rows, or set FAKTORY['DATABASE'] to {alias!r} if they are the ones in use."
            messages.append(Warning(text, hint=hint, id="django_faktory.W008"))
    return messages
