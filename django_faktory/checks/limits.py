"""System checks of `FAKTORY["LIMITS"]`: E050, E051 and W050.

`check_limits` is the check. Each message names the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  (Django's name)
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..tasks import limits
from ..tasks.limits import InvalidDefinition
from .tasks import broken_modules

_FORMS = (
    '5 (jobs at a time), "100/s" (starts per period), or {"concurrency": 5, "rate": "10/m", "burst": 3}; '
    "see docs/limits.md"
)


@register
def check_limits(**_: Any) -> Iterable[CheckMessage]:
    """Check that limits can be read and that the configured broker enforces them."""
    try:
        broker = conf.get("BROKER")
    except ImproperlyConfigured:
        return
    if not isinstance(conf.get("LIMITS"), Mapping) or broken_modules():
        return  # reported by other checks; the limits in a broken tasks module are unknown
    invalid = [definition for definition in limits.read_definitions() if isinstance(definition, InvalidDefinition)]
    for definition in invalid:
        check_id = "E050" if definition.is_place else "E051"
        hint = 'LIMITS = {"queues": {"mail": 5}}; or "tasks", or "keys".' if definition.is_place else _FORMS
        yield Error(f"{definition.place}: {definition.problem}", hint=hint, id=f"django_faktory.{check_id}")
    # A warning: jobs are enqueued all the same, and that server may have limits of its own.
    if not invalid and broker == "remote" and any(conf.get("LIMITS").get(place) for place in limits.PLACES):
        yield Warning(
            "FAKTORY['LIMITS'] has no effect: the jobs are on a remote server",
            hint='FAKTORY = {"BROKER": "orm"}, or set the limits on that server.',
            id="django_faktory.W050",
        )
