"""Define the Django app config: register the system checks and the admin's virtual models."""

from __future__ import annotations

from django.apps import AppConfig


class FaktoryConfig(AppConfig):
    """App config for `django_faktory` in INSTALLED_APPS."""

    name = "django_faktory"
    verbose_name = "Faktory"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks. Tasks are imported later, by the commands that run them (see
        `tasks.base.autodiscover`).
        """
        # Imported here because importing registers them, and models can be imported only once the apps are loaded.
        from .checks import cron, limits, security, settings, tasks  # noqa: F401
        from .contrib.gearmonkey import checks  # noqa: F401
        from .models import proxies  # noqa: F401
