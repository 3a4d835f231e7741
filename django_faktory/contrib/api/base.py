"""Base classes of the API views: renderers, authentication, throttling, and the database of the jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from django.contrib.auth.models import AnonymousUser
from django.http import Http404
from django_filters.rest_framework import DjangoFilterBackend
from rest_framework import exceptions, status
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from ...brokers import get_broker
from ...core.suggestions import explain_unknown
from ...models.permissions import may_see
from .access import HasActionPermission, PasswordThrottle, ReadThrottle, WriteThrottle
from .described import AutoSchema
from .problems import JobsElsewhere, handle
from .rendering import BoundedJson, Browsable, Json


class ApiView(APIView):
    """Base view of this API, independent of the project's DRF defaults.

    Only authentication is taken from the project's settings.
    """

    # Set here, so that the project's DEFAULT_* settings of REST framework do not change this API.
    renderer_classes: Any = (Json, Browsable)
    parser_classes = (BoundedJson,)
    schema: Any = AutoSchema()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check the log-in, permission and rate, then refuse what this method does not read. Raises ValidationError."""
        super().initial(request, *args, **kwargs)
        refuse_unknown(request.query_params, self.get_parameters(), "parameter")
        # A filter that is given twice would count once.
        if repeated := [name for name, values in request.query_params.lists() if len(values) > 1]:
            raise exceptions.ValidationError({repeated[0]: "expected once; separate several values with commas"})
        if request.method in (*SAFE_METHODS, "DELETE"):
            refuse_unknown(request.data, (), "member of the body")

    def get_parameters(self) -> Any:
        """Return the names of the query parameters of this method."""
        # Of the browsable pages; a project may turn it off.
        return list(filter(None, [self.settings.URL_FORMAT_OVERRIDE]))

    def get_exception_handler(self) -> Callable[..., Any]:
        """Return the handler that answers with problem details."""
        return handle

    def perform_authentication(self, request: Request) -> None:
        """Authenticate, unless this address has sent too many wrong passwords.

        Raises Throttled, AuthenticationFailed.
        """
        wrong_passwords = PasswordThrottle()
        # Before the credentials are checked, so that a guess beyond the limit costs no hash.
        if not wrong_passwords.allow_request(request, self):
            request.user = AnonymousUser()  # the error's renderer must not check the password
            raise exceptions.Throttled(wrong_passwords.wait(), "too many wrong passwords from this address")
        try:
            super().perform_authentication(request)
        except exceptions.AuthenticationFailed:
            wrong_passwords.count(request)
            raise

    def get_throttles(self) -> list[BaseThrottle]:
        """Return the throttle; reads and changes are counted separately."""
        return [ReadThrottle() if self.request.method in SAFE_METHODS else WriteThrottle()]


class Resource(ApiView, GenericViewSet[Any]):
    """Base view of a resource: rows and the actions on them.

    Subclasses also set `queryset`, for drf-spectacular, which reads the model from it. Otherwise it would call
    `get_queryset`, which fails if the jobs are on a Faktory server.
    """

    resource: ClassVar[str]
    """Name of the resource in `models.permissions`."""

    permission_classes = (HasActionPermission,)
    filter_backends: Any = (DjangoFilterBackend,)
    needs: ClassVar[Mapping[str, str]] = {}
    """Methods that need another action of `models.permissions` than theirs on the resource."""
    lookup_value_regex = "[^/]+"
    key_pattern = re.compile(r"[^\x00\ud800-\udfff]{1,255}")
    """Pattern of valid row keys: any other key is not queried and answers 404."""

    def serialize(self, rows: Sequence[Any]) -> Any:
        """Return the documents of these rows, with one query for what is counted for all of them."""
        return self.get_serializer(rows, many=True).data

    def serialize_one(self, row: Any) -> Any:
        return self.serialize([row])[0]

    # Without docstrings: the OpenAPI document has that of the class instead.
    def list(self, request: Request) -> Response:  # noqa: ARG002
        return self.respond_with_page(self.filter_queryset(self.get_queryset()))

    def retrieve(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        return Response(self.serialize_one(self.get_object()))

    def respond_with_page(self, rows: Any) -> Response:
        return self.get_paginated_response(self.serialize(self.paginate_queryset(rows) or []))

    def get_object(self) -> Any:
        """Return the row that the URL names. Raises Http404, without a query if no row can have that key."""
        key = self.kwargs[self.lookup_url_kwarg or self.lookup_field]
        # NUL and lone surrogates raise an error in the drivers, which would be an answer of 500.
        if not self.key_pattern.fullmatch(key):
            raise Http404
        return super().get_object()

    def filter_queryset(self, queryset: Any) -> Any:
        """Apply filters to lists only: a row named by its URL is found whatever the query parameters are."""
        # Otherwise `JobFilter` would search the recent jobs only, and the URL of an older job would be a 404.
        return super().filter_queryset(queryset) if self.action == "list" else queryset

    def get_parameters(self) -> Any:
        """Return the names of the query parameters of this action: filters and pages of a list."""
        names = super().get_parameters()
        if self.request.method == "DELETE":
            names += ["reason"]
        if self.request.method in SAFE_METHODS and self.action != "retrieve":
            filters: Any = getattr(self, "filterset_class", None)
            pages: Any = self.pagination_class
            names += filters.base_filters if filters else ()
            names += (pages.cursor_query_param, pages.page_size_query_param) if pages else ()
        return names

    @property
    def may_see(self) -> bool:
        """Return whether the user may see rows of this resource."""
        return may_see(self.request.user, self.resource)

    def respond(self, get_row: Callable[[], Any], *, code: int = status.HTTP_200_OK) -> Response:
        """Return a response with the current row, or 204 if the user may not view it."""
        # The permission to act does not include the permission to view (ADR 0034). `get_row` is a function, so that a
        # row that is not shown is not read.
        return Response(get_row(), status=code) if self.may_see else Response(status=status.HTTP_204_NO_CONTENT)

    def read_input(
        self, serializer_class: type[Serializer[Any]], *, source: Any = None, partial: bool = False
    ) -> dict[str, Any]:
        """Return the validated data of the request body, or of `source`. Raises ValidationError."""
        serializer = serializer_class(
            data=self.request.data if source is None else source,
            partial=partial,
            context=self.get_serializer_context(),
        )
        if source is None:
            refuse_unknown(self.request.data, serializer.fields, "member")
        serializer.is_valid(raise_exception=True)
        validated: dict[str, Any] = serializer.validated_data
        return validated


def refuse_unknown(names: Iterable[str], known: Collection[str], kind: str) -> None:
    """Raise ValidationError for the first unknown name; without it, a misspelled guard would be ignored."""
    for name in names:
        if name not in known:
            expected = explain_unknown(name, [one for one in known if one != "format"])
            raise exceptions.ValidationError({ascii(name)[1:-1][:60]: f"unknown {kind}; {expected}"})


def get_alias() -> str:
    """Return the alias of the database of the jobs. Raises JobsElsewhere if they are on a Faktory server."""
    # Only the broker of the project's database has an alias.
    alias: str | None = getattr(get_broker(), "alias", None)
    if alias is None:
        raise JobsElsewhere
    return alias
