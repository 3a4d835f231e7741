"""System checks of GearMonkey: that functions have tasks that can serve them, and that redis-py is there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured

from . import conf, tasks
from .gearmonkey.functions import served


@register
def check_gearmonkey(**_: Any) -> list[CheckMessage]:
    """GEARMONKEY_FUNCTIONS and `@task(gearmonkey=…)`. Asks no server."""
    try:
        wanted = conf.get("GEARMONKEY_FUNCTIONS")
        is_used = bool(conf.get("GEARMONKEY_URL") or wanted)
    except ImproperlyConfigured:  # `checks` says so
        return []
    if not is_used or not isinstance(wanted, dict):
        return []
    if find_spec("redis") is None:
        hint = "pip install django-faktory[redis]"
        return [Error("GearMonkey: redis-py is not installed", hint=hint, id="django_faktory.E020")]
    try:
        tasks.autodiscover()
    except Exception:  # noqa: BLE001  (importing runs anybody's code; E015 tells)
        return []
    try:
        served()
    except ImproperlyConfigured as error:
        return [Error(str(error), hint=conf.DOCS["GEARMONKEY_FUNCTIONS"], id="django_faktory.E021")]
    return []
