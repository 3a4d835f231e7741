"""GearMonkey in `runfaktory`: its option, start message and processes. Needs redis-py only if the option is given."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from ... import conf
from ...core.extras import explain_missing
from ...errors import FaktoryError
from ...runtime.config import RunConfig
from ...runtime.supervisor.child import Role
from .registry import served_tasks
from .settings import url_of, without_password


def url_in(options: dict[str, Any]) -> str:
    """Return the Redis URL of the option; without a value, that of the settings; "" without the option."""
    if options["gearmonkey"] is None:
        return ""
    if options["drain"]:
        raise CommandError("expected --drain or --gearmonkey, got both: GearMonkey jobs may come at any time")
    try:
        from .address import check_url  # needs redis-py
    except ImportError as error:
        raise CommandError(explain_missing("--gearmonkey", "redis-py", "redis")) from error
    try:
        url = url_of(options["gearmonkey"])
        check_url(url)
        if not served_tasks():
            raise CommandError("--gearmonkey: no task serves a function; write @task(gearmonkey=NAME)")
    except (FaktoryError, ImproperlyConfigured) as error:
        raise CommandError(f"--gearmonkey: {error}") from error
    return url


def describe(run_config: RunConfig) -> list[str]:
    """Return the part about GearMonkey of the line that describes a run configuration; empty without GearMonkey."""
    if not run_config.gearmonkey:
        return []
    fns = ",".join(sorted(served_tasks()))
    return [f"GearMonkey {conf.get('GEARMONKEY_MODE')} at {without_password(run_config.gearmonkey)}, functions {fns}"]


def roles(run_config: RunConfig) -> list[Role]:
    """Return the roles that serve GearMonkey clients; none if the run configuration has no GearMonkey server."""
    if not run_config.gearmonkey:
        return []
    from .roles import roles  # needs redis-py

    return roles(run_config)
