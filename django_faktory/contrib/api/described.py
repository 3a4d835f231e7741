"""Describe the views of this API for drf-spectacular, by their docstrings.

Uses the `AutoSchema` of this module whatever DEFAULT_SCHEMA_CLASS the project sets for its other views.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from drf_spectacular.openapi import AutoSchema as BaseAutoSchema
from drf_spectacular.plumbing import ResolvedComponent, get_doc
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.decorators import action

from ...models.permissions import ACTIONS
from . import inputs
from .access import required_action
from .problems import KIND, KINDS

PROBLEM = {
    "type": "object",
    "description": "What is wrong (RFC 9457).",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {
            "type": "string",
            "enum": [KIND + kind for kind in (*KINDS, "error")],
            "description": "Kind of problem; error: any other one.",
        },
        "title": {"type": "string", "description": "The kind, in words."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "detail": {"type": "string", "description": "One sentence on what is wrong."},
        "instance": {"type": "string", "description": "Path of the request."},
        "position": {
            "type": ["integer", "null"],
            "description": "For an invalid query: the position of the error in its text, from 0.",
        },
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "field": {"type": ["string", "null"], "description": "Its path, such as kwargs.when."},
                    "detail": {"type": "string", "description": "What is wrong with it."},
                },
            },
            "description": "Fields with an error.",
        },
    },
}

UNSEEN = OpenApiResponse(None, "Done. No body, because the user may not view the row.")
"""Response 204 if the user may act on the row and not view it: see `base.Resource.respond`."""


class AutoSchema(BaseAutoSchema):
    """Add the permission and a problem response (RFC 9457) to every operation.

    Drops the key of a row where the path has none.

    The first line of an action's docstring is its summary, the rest its description. `docs` of the view has the text of
    actions that it inherits. An action without a description has that of its view.
    """

    def get_summary(self) -> str:
        return self._split_doc()[0].removesuffix(".")

    def get_description(self) -> str:  # type: ignore[override]  # as in drf-spectacular
        return " ".join(self._split_doc()[1].split()) or get_doc(type(self.view))

    def _split_doc(self) -> list[str]:
        action = getattr(self.view, "action", self.method.lower())
        text = getattr(self.view, "docs", {}).get(action) or get_doc(getattr(self.view, action))
        return [*text.split("\n\n", 1), ""]

    def get_operation(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return the operation with a default response for errors, and path parameters that its path has."""
        operation = super().get_operation(path, *args, **kwargs)
        # None: the operation is excluded from the document.
        if operation is not None:
            # A view describes its key once, for all its operations; generators drop an operation with one too many.
            parameters = operation.pop("parameters", [])
            in_place = [one for one in parameters if one["in"] != "path" or f"{{{one['name']}}}" in path]
            operation |= {"parameters": in_place} if in_place else {}
            operation["x-permission"] = ACTIONS[required_action(self.view)]
            problem = ResolvedComponent("Problem", ResolvedComponent.SCHEMA, PROBLEM, "Problem")  # type: ignore[no-untyped-call]
            self.registry.register_on_missing(problem)
            operation["responses"]["default"] = {
                "description": "A problem (RFC 9457).",
                "content": {"application/problem+json": {"schema": problem.ref}},
            }
        return operation


F = TypeVar("F", bound=Callable[..., Any])


def describe(**options: Any) -> Callable[[F], F]:
    """Return a decorator that describes an action, or a whole resource, in the OpenAPI document."""

    def decorate(view: F) -> F:
        # A class has its schema from `ApiView`; an action carries it in the keyword arguments of its decorator.
        if not inspect.isclass(view):
            kwargs = view.__dict__.setdefault("kwargs", {})
            # `extend_schema` derives from this class; without it, from the default class of REST framework.
            kwargs.setdefault("schema", AutoSchema())
        return extend_schema(**options)(view)

    return decorate


def describe_action(
    response: Any, *, request: Any = inputs.ReasonSerializer, shows_row: bool = False, **options: Any
) -> Callable[[F], F]:
    """Return a decorator for a POST action on a row. If it `shows_row`, it has the response 204 too, see `UNSEEN`."""
    responses = {200: response, 204: UNSEEN} if shows_row else {200: response}
    described = describe(request=request, responses=responses)
    make_action = action(**{"detail": True, "methods": ["post"], **options})

    def decorate(view: F) -> F:
        made: F = described(make_action(view))  # type: ignore[assignment]  # an action is the function with attributes
        return made

    return decorate
