"""Convert every error into problem details (RFC 9457): its kind, one sentence of detail, and the fields concerned."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.renderers import BrowsableAPIRenderer
from rest_framework.response import Response
from rest_framework.views import set_rollback

from ... import errors
from ...core.limits import InvalidLimit
from ...core.logs import get_logger
from ...store.database_errors import ErrorKind, kind_of, refused_data
from ...tasks.compat import InvalidTask
from .rendering import Json

logger = get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
KIND = "urn:django-faktory:problem:"

KINDS = {
    "invalid": (400, "The request is not valid"),
    "invalid-query": (400, "The query cannot be read"),
    "unknown-task": (400, "No task has this name"),
    "not-authenticated": (401, "Not logged in"),
    "not-allowed": (403, "Not allowed"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "Method not allowed"),
    "not-acceptable": (406, "Format not available"),
    "wrong-state": (409, "Not in this state"),
    "not-unique": (409, "Another job of this kind holds the lock"),
    "too-large": (413, "Too large"),
    "unsupported-media-type": (415, "Expected JSON"),
    "too-many": (429, "Too many requests"),
    "jobs-elsewhere": (501, "The jobs are not in this database"),
    "unavailable": (503, "Temporarily unavailable"),
}
"""Status and title of each kind of problem; part of the API. An error of REST framework is the first of its status."""
_KIND_BY_STATUS = {code: kind for kind, (code, _) in reversed(KINDS.items())}
_PACKAGE_PROBLEMS: list[tuple[type[Exception] | tuple[type[Exception], ...], str]] = [
    (errors.InvalidQuery, "invalid-query"),
    ((errors.InvalidCron, errors.InvalidPayload, InvalidLimit, InvalidTask), "invalid"),
    (errors.UnknownJobType, "unknown-task"),
    (errors.NotUnique, "not-unique"),
    ((errors.InvalidTransition, errors.BatchClosed), "wrong-state"),
    ((errors.JobNotFound, errors.UnknownBatch, errors.UnknownWorker), "not-found"),
    ((errors.BrokerUnavailable, OperationalError, InterfaceError), "unavailable"),
]
_HIDDEN_DETAIL = "not possible in the current state of the row; details require permission to view it"
_UNAVAILABLE_DETAIL = "the database is temporarily unavailable; try again"
"""Shown in place of a database driver's message, which may name hosts and users."""


class WrongState(exceptions.APIException):
    """The action is not possible in the current state of the row (409)."""

    status_code = status.HTTP_409_CONFLICT


_ABOUT_ROWS = (errors.InvalidCron, errors.InvalidPayload, errors.InvalidTransition, errors.NotUnique, WrongState)
"""Errors of actions on one row. Their text may quote the row."""


class JobsElsewhere(exceptions.APIException):
    """The jobs are on a Faktory server; its protocol has no command for this (501)."""

    status_code = status.HTTP_501_NOT_IMPLEMENTED
    default_detail = (
        "the API needs the jobs in this project's database (FAKTORY['BROKER'] = 'orm'): the protocol of a Faktory "
        "server elsewhere has no command for it"
    )


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Return the response to an exception of a view: the EXCEPTION_HANDLER of REST framework for this API.

    Returns None for an unexpected exception: it is a bug, which Django reports and logs as usual.
    """
    converted = _from_package_error(error) or _from_framework_error(error)
    if converted is None:
        return None
    problem, headers = converted
    request, view = context["request"], context["view"]
    # With permission to act on the row, but not to view it, no part of it may be read in the error text.
    if isinstance(error, _ABOUT_ROWS) and getattr(view, "detail", False) and not view.may_see:
        # The fields stay: the client named them itself.
        for part in (problem, *problem.get("errors", [])):
            part["detail"] = _HIDDEN_DETAIL
    problem["instance"] = request.path
    # As REST framework's own handler does: with ATOMIC_REQUESTS a failed request must not be committed.
    set_rollback()
    response = Response(problem, status=problem["status"], headers=headers)
    # A browser keeps the browsable page; every other client receives problem+json, whatever it accepts.
    if not isinstance(getattr(request, "accepted_renderer", None), BrowsableAPIRenderer):
        request.accepted_renderer, request.accepted_media_type = Json(), MEDIA_TYPE
        response.content_type = MEDIA_TYPE
    return response


def _describe(kind: str) -> dict[str, Any]:
    code, title = KINDS[kind]
    return {"type": KIND + kind, "title": title, "status": code}


def _from_package_error(error: Exception) -> tuple[dict[str, Any], dict[str, str]] | None:
    if kind_of(error) is ErrorKind.DATA:
        error = refused_data(error)
    match = next((entry for entry in _PACKAGE_PROBLEMS if isinstance(error, entry[0])), None)
    if match is None:
        return None
    problem: dict[str, Any] = {**_describe(match[1]), "detail": str(error)}
    if problem["status"] == status.HTTP_503_SERVICE_UNAVAILABLE:
        logger.warning("API: the database could not be used error=%s", error)
        return problem | {"detail": _UNAVAILABLE_DETAIL}, {"Retry-After": "1"}
    if isinstance(error, errors.InvalidQuery):
        problem |= {"position": error.at, "errors": [{"field": error.field, "detail": str(error)}]}
    if isinstance(error, errors.InvalidCron):
        problem["errors"] = [{"field": error.field, "detail": error.problem}]
    return problem, {}


def _from_framework_error(error: Exception) -> tuple[dict[str, Any], dict[str, str]] | None:
    # Django's two exceptions, which views may raise too, have no status of REST framework.
    if isinstance(error, Http404):
        error = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    if not isinstance(error, exceptions.APIException):
        return None
    known = _KIND_BY_STATUS.get(error.status_code)
    unknown = {"type": f"{KIND}error", "title": "Error", "status": error.status_code}
    problem: dict[str, Any] = _describe(known) if known else unknown
    if isinstance(error, exceptions.ValidationError):
        messages = list(_flatten("", error.detail))
        problem["detail"] = "; ".join(f"{path}: {message}" if path else message for path, message in messages)
        problem["errors"] = [{"field": path or None, "detail": message} for path, message in messages]
    else:
        problem["detail"] = str(error.detail)
    # The headers that REST framework's own handler would set.
    headers = {}
    if getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = error.auth_header  # type: ignore[attr-defined]  # set by the view
    if getattr(error, "wait", None):
        headers["Retry-After"] = f"{error.wait:.0f}"  # type: ignore[attr-defined]  # of Throttled
    return problem, headers


def _flatten(path: str, detail: Any) -> Any:
    """Yield each message of a nested error with the path of its field, such as `kwargs.when`."""
    if isinstance(detail, dict):
        for key, inner in detail.items():
            name = "" if key == "non_field_errors" else str(key)
            yield from _flatten(".".join(filter(None, (path, name))), inner)
    elif isinstance(detail, list):
        for inner in detail:
            yield from _flatten(path, inner)
    else:
        yield path, str(detail)
