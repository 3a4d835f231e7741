"""The app: where Django starts with us. Finds the project's tasks and registers the checks."""

from __future__ import annotations

from django.apps import AppConfig


class FaktoryConfig(AppConfig):
    """`django_faktory` in INSTALLED_APPS."""

    name = "django_faktory"
    verbose_name = "Faktory"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks. Tasks are found by the commands that run them (see `tasks.autodiscover`)."""
        # register by import, once the apps are loaded
        from . import (  # noqa: F401
            checks,
            cron_checks,
            gearmonkey_checks,
            limit_checks,
            pages,
            security_checks,
            task_checks,
        )
