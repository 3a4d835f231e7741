"""Permission classes and throttles of the API.

An action that `models.permissions` does not have is closed to all users. Wrong passwords of HTTP Basic are counted by
address, as the server counts those of HELLO; `PASSWORD_TRIES` caps both.
"""

from __future__ import annotations

import time
from typing import Any

from django.core.cache import cache
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.settings import api_settings
from rest_framework.throttling import BaseThrottle, UserRateThrottle
from rest_framework.views import APIView

from ... import conf
from ...models.permissions import ACTIONS, may
from ...server.login_throttle import network_of

_VERBS = {
    "list": "view", "retrieve": "view", "create": "add", "update": "change", "partial_update": "change",
    "destroy": "delete",
    # OPTIONS describes the list.
    "metadata": "view",
}  # fmt: skip


class HasActionPermission(IsAuthenticated):
    """Require the permission of the requested action on the view's resource, or the one that its `needs` names."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return whether the user may perform the action.

        Returns True if the view has no such action: the answer is then 405, which reveals no data.
        """
        # Anonymous users cannot even find out which resources exist.
        if not super().has_permission(request, view):
            return False
        if getattr(view, "action", None) is None:
            return True
        required = required_action(view)
        return required in ACTIONS and may(request.user, required)


def required_action(view: Any) -> str:
    """Return the entry of `ACTIONS` that the current action of a view requires."""
    name = _VERBS.get(view.action, view.action.removeprefix("bulk_"))
    return getattr(view, "needs", {}).get(view.action) or f"{getattr(view, 'resource', '')}.{name}"


class PasswordThrottle(BaseThrottle):
    """Reject log-ins from an address that has sent `PASSWORD_TRIES` wrong passwords in this minute.

    Counted in Django's default cache, as by the other throttles. Requests without an Authorization header pass. The
    address is the connection's unless REST_FRAMEWORK["NUM_PROXIES"] is set: clients can forge X-Forwarded-For.
    """

    timer = staticmethod(time.time)

    def allow_request(self, request: Request, view: APIView) -> bool:  # noqa: ARG002
        """Return whether the credentials of this request may be checked."""
        # A race between the cache reads of parallel requests lets a few more tries through; the cap is not exact.
        limit = conf.get("PASSWORD_TRIES")
        return not limit or "Authorization" not in request.headers or cache.get(self._key(request), 0) < limit

    def count(self, request: Request) -> None:
        key = self._key(request)
        # `incr` fails on a missing key and sets no timeout: create the key with one first.
        cache.add(key, 0, timeout=2 * _MINUTE_S)
        try:
            cache.incr(key)
        except ValueError:  # evicted meanwhile
            cache.set(key, 1, timeout=2 * _MINUTE_S)

    def wait(self) -> float:
        """Return the seconds until the next minute begins."""
        return _MINUTE_S - self.timer() % _MINUTE_S

    def get_ident(self, request: Request) -> str:
        """Return the address, or the /64 network of an IPv6 address."""
        is_behind_proxies = api_settings.NUM_PROXIES is not None
        address = super().get_ident(request) if is_behind_proxies else request.META.get("REMOTE_ADDR")
        return network_of(address or "")

    def _key(self, request: Request) -> str:
        # Hexadecimal: the header of a proxy may contain characters that cache keys must not.
        name = self.get_ident(request).encode("utf-8", "replace").hex()[:200]
        # The minute is part of the key: each minute starts with a new count, without a reset.
        return f"faktory_wrong_passwords_{name}_{int(self.timer() // _MINUTE_S)}"


_MINUTE_S = 60


class RateThrottle(UserRateThrottle):
    """Throttle of requests per user, by the rate in a setting; without one there is no limit."""

    def __init__(self, setting: str) -> None:
        self.scope = setting
        super().__init__()

    def get_rate(self) -> str | None:
        return conf.get(str(self.scope)) or None
