"""Configuration of the Django app (`FaktoryConfig`)."""

from __future__ import annotations

from django.apps import AppConfig


class FaktoryConfig(AppConfig):
    """App config for `django_faktory` in INSTALLED_APPS."""

    name = "django_faktory"
    verbose_name = "Faktory"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks and the proxy models, and install the operations of query sets.

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
            execute=lambda verb, jobs: bulk.execute(bulk.Verb(verb), jobs),
            pause=bulk.pause,
            resume=bulk.resume,
        )
        hooks.install(operations)
