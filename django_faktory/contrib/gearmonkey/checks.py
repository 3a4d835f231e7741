"""System checks of GearMonkey: functions have usable tasks, and redis-py is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from ... import conf
from ...core.extras import explain_missing
from ...tasks import base
from .registry import served_tasks
from .settings import is_configured


@register
def check_gearmonkey(**_: Any) -> list[CheckMessage]:
    """Check GEARMONKEY_FUNCTIONS and `@task(gearmonkey=…)` without contacting a server."""
    try:
        functions = conf.get("GEARMONKEY_FUNCTIONS")
        is_used = bool(is_configured() or functions)
    except ImproperlyConfigured:  # reported by `checks`
        return []
    if not is_used or not isinstance(functions, dict):
        return []
    if find_spec("redis") is None:
        return [Error(explain_missing("GearMonkey", "redis-py", "redis"), id="django_faktory.E020")]
    if base.import_tasks():  # E015 reports them
        return []
    try:
        served_tasks()
    except ImproperlyConfigured as error:
        return [Error(str(error), hint=conf.SETTINGS["GEARMONKEY_FUNCTIONS"].doc, id="django_faktory.E021")]
    return []
