"""Who may do what, and how often. One permission an action; what names none is closed to everybody."""

from __future__ import annotations

from typing import Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView

from .. import conf
from ..permissions import may


class LoggedIn(BasePermission):
    """Somebody who is known, whatever he may do."""

    def has_permission(self, request: Request, view: APIView) -> bool:  # noqa: ARG002
        """Nobody else learns anything, not even what there is."""
        return bool(request.user and request.user.is_authenticated)


class May(LoggedIn):
    """Who has the permission that the view names for what is asked of it."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Ask for the action's own; where there is no such action, the answer is 405, and tells nothing."""
        if not super().has_permission(request, view):
            return False
        action = getattr(view, "action", None)
        if action is None:
            return True
        asked: Any = getattr(view, "needs", {}).get("list" if action == "metadata" else action)
        return asked is not None and may(request.user, asked)


class _ByUser(UserRateThrottle):
    setting: str

    def get_rate(self) -> str | None:
        """The project's; None for no limit."""
        return conf.get(self.setting) or None


class Reads(_ByUser):
    """How often a user may look."""

    scope, setting = "faktory_reads", "API_READS"


class Acts(_ByUser):
    """How often a user may change something."""

    scope, setting = "faktory_acts", "API_ACTS"
