"""What all resources have in common: how they speak, whom they let in, where their rows are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib.auth.models import AnonymousUser
from django.http import Http404
from django_filters.rest_framework import DjangoFilterBackend
from rest_framework import exceptions, status
from rest_framework.permissions import SAFE_METHODS
from rest_framework.renderers import BrowsableAPIRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from ..brokers import get_broker
from ..brokers.base import Broker
from ..permissions import may_see
from .access import Acts, May, Reads, WrongPasswords
from .described import AutoSchema
from .problems import JobsElsewhere, handle
from .rendering import BoundedJson, Json

if TYPE_CHECKING:
    Generic = GenericViewSet[Any]
else:
    Generic = GenericViewSet


class Door(APIView):
    """A view of this API, whatever the project's settings say of its others. Who a user is, is the project's."""

    renderer_classes: Any = (Json, BrowsableAPIRenderer)
    parser_classes = (BoundedJson,)
    schema: Any = AutoSchema()

    def get_exception_handler(self) -> Callable[..., Any]:
        """Problem details."""
        return handle

    def perform_authentication(self, request: Request) -> None:
        """Check who asks, unless too many wrong passwords came from there. Raises Throttled, AuthenticationFailed."""
        wrong_passwords = WrongPasswords()
        if not wrong_passwords.allow_request(request, self):
            request.user = AnonymousUser()  # no renderer of the error may check the password either
            raise exceptions.Throttled(wrong_passwords.wait(), "too many wrong passwords from this address")
        try:
            super().perform_authentication(request)
        except exceptions.AuthenticationFailed:
            wrong_passwords.count(request)
            raise

    def get_throttles(self) -> list[BaseThrottle]:
        """Looking and acting are counted apart."""
        return [Reads() if self.request.method in SAFE_METHODS else Acts()]


class Resource(Door, Generic):
    """Rows and the acts on them."""

    resource: ClassVar[str]
    """As `permissions` names it."""

    permission_classes = (May,)
    filter_backends: Any = (DjangoFilterBackend,)
    needs: ClassVar[Mapping[str, str]]
    """The act of `permissions` that each action is."""
    lookup_value_regex = "[^/]+"
    keys = re.compile(r"[^\x00\ud800-\udfff]{1,255}")
    """What names a row: the rest is not asked for, and never found."""

    def get_object(self) -> Any:
        """The row that the address names; what can be no row's name is not asked for."""
        key = self.kwargs[self.lookup_url_kwarg or self.lookup_field]
        if not self.keys.fullmatch(key):
            raise Http404
        return super().get_object()

    def filter_queryset(self, queryset: Any) -> Any:
        """Lists are filtered; what an address names is there, whatever else is asked for."""
        return super().filter_queryset(queryset) if self.action == "list" else queryset

    @property
    def may_see(self) -> bool:
        """Whether the user may see rows of this resource."""
        return may_see(self.request.user, self.resource)

    def answer(self, row: Callable[[], Any], *, code: int = status.HTTP_200_OK) -> Response:
        """Answer an act with the row as it is now; with 204 and no body if the user may act and not see."""
        return Response(row(), status=code) if self.may_see else Response(status=status.HTTP_204_NO_CONTENT)

    def said(self, kind: type[Serializer[Any]], *, of: Any = None) -> dict[str, Any]:
        """What the request's body says, or its parameters, checked."""
        told = kind(data=self.request.data if of is None else of, context=self.get_serializer_context())
        told.is_valid(raise_exception=True)
        found: dict[str, Any] = told.validated_data
        return found


def alias() -> str:
    """The database the jobs are in. Raises JobsElsewhere."""
    found: str | None = getattr(get_broker(), "alias", None)
    if found is None:
        raise JobsElsewhere
    return found


def broker() -> Broker:
    """Where the jobs are, in this project's database. Raises JobsElsewhere."""
    alias()
    return get_broker()
