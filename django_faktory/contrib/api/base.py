"""Base classes of the API views: renderers, authentication, throttling, and the database of the jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from django.apps import apps
from django.contrib.auth.models import AnonymousUser
from django.db.models import Model
from django.http import Http404
from django_filters.rest_framework import DjangoFilterBackend
from drf_spectacular.utils import OpenApiParameter
from rest_framework import exceptions, status
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet

from ...brokers import get_broker
from ...core.logs import get_logger
from ...core.suggestions import explain_unknown
from ...models.permissions import may_see
from .access import HasActionPermission, PasswordThrottle, RateThrottle
from .described import AutoSchema
from .inputs import ReasonSerializer
from .problems import JobsElsewhere, handle
from .rendering import BoundedJson, Browsable, Json

logger = get_logger("django_faktory.api.journal")  # a documented name: projects give it a handler of its own

ADDED, CHANGED, DELETED = 1, 2, 3
"""Action flags of Django's admin log, copied here: the admin need not be installed."""

REASON = OpenApiParameter("reason", description="Reason for the log.")
"""Parameter of a DELETE, which has no body."""


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
        return [RateThrottle("API_READS" if self.request.method in SAFE_METHODS else "API_WRITES")]


class Resource(ApiView, GenericViewSet[Any]):
    """Base view of a resource: rows and the actions on them.

    Subclasses also set `queryset`, for drf-spectacular, which reads the model from it. Otherwise it would call
    `get_queryset`, which fails if the jobs are on a Faktory server.
    """

    resource: ClassVar[str]
    """Name of the resource in `models.permissions`."""

    queryset: Any
    permission_classes = (HasActionPermission,)
    filter_backends: Any = (DjangoFilterBackend,)
    needs: ClassVar[Mapping[str, str]] = {}
    """Methods that need another action of `models.permissions` than theirs on the resource."""
    lookup_value_regex = "[^/]+"
    key_pattern = re.compile(r"[^\x00\ud800-\udfff]{1,255}")
    """Pattern of valid row keys: any other key is not queried and answers 404."""

    detail_class: Any = None
    """Serializer of a single row, if it is another one."""
    docs: ClassVar[Mapping[str, str]] = {}
    """Texts of `list` and `retrieve` in the OpenAPI document; see `AutoSchema`."""
    reason = ""
    """Reason for the log, once the input has been read."""

    def get_queryset(self) -> Any:
        return self.queryset.model.objects.using(get_alias())

    def get_serializer_class(self) -> Any:
        return (self.action == "retrieve" and self.detail_class) or super().get_serializer_class()

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

    def read_input(self, serializer_class: type[Serializer[Any]], *, partial: bool = False) -> dict[str, Any]:
        """Return the validated data of the request, with the reason apart. Raises ValidationError."""
        # `initial` has checked the parameters of a DELETE, which has no body.
        is_delete = self.request.method == "DELETE"
        data = self.request.query_params if is_delete else self.request.data
        serializer = serializer_class(data=data, partial=partial, context=self.get_serializer_context())
        if not is_delete:
            refuse_unknown(data, serializer.fields, "member")
        serializer.is_valid(raise_exception=True)
        validated: dict[str, Any] = serializer.validated_data
        self.reason = validated.pop("reason", "")
        return validated

    def read_action(self) -> Any:
        """Read the reason of an action; return the row that the URL names."""
        self.read_input(ReasonSerializer)
        return self.get_object()

    def record(self, target: Model | type[Model], summary: str, *, name: str = "", flag: int = CHANGED) -> None:
        """Record a change of a row or, if `target` is a model, of a set of rows: in Django's admin log and in our log.

        `name` is the name of the object in both logs; its default is the string of the row.
        """
        is_row = isinstance(target, Model)
        object_name = name or (str(target) if is_row else "")
        message = f"{summary}, through the API{f': {self.reason}' if self.reason else ''}"
        user: Any = self.request.user
        # ascii() keeps line breaks and escape sequences of clients out of the log.
        logger.info("change through the API user=%s target=%s action=%s", user.pk, ascii(object_name), ascii(message))
        # An authentication class of the project may return users without a row, which the admin log cannot reference.
        if not apps.is_installed("django.contrib.admin") or user.pk is None:
            return
        from django.contrib.admin.models import LogEntry  # the admin need not be installed
        from django.contrib.contenttypes.models import ContentType

        LogEntry.objects.create(
            user_id=user.pk,
            # Not the concrete model: the admin writes its own log entries the same way.
            content_type_id=ContentType.objects.get_for_model(target, for_concrete_model=False).pk,
            object_id=str(target.pk) if is_row else None,
            object_repr=object_name[:200],
            action_flag=flag,
            change_message=message,
        )


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
