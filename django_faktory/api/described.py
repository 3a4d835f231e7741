"""`drf_spectacular`'s extend_schema, whatever schema class the project's settings name for its other views."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from drf_spectacular.openapi import AutoSchema as Framework
from drf_spectacular.utils import OpenApiResponse, extend_schema

PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {"type": "string", "description": "What kind of problem it is: urn:django-faktory:problem:…"},
        "title": {"type": "string", "description": "The kind, in words."},
        "status": {"type": "integer", "description": "The HTTP status."},
        "detail": {"type": "string", "description": "What was wrong, in a sentence."},
        "instance": {"type": "string", "description": "The path that was asked for."},
        "position": {"type": ["integer", "null"], "description": "Of a query's error: its place in the text, from 0."},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": ["string", "null"]}, "detail": {"type": "string"}},
            },
            "description": "What was wrong with each field.",
        },
    },
}

UNSEEN = OpenApiResponse(None, "Done. The user may do this and not view the row.")
"""Of 204: see `base.Resource.answer`."""


class AutoSchema(Framework):
    """Each operation may be answered with a problem."""

    def get_operation(self, *args: Any, **kwargs: Any) -> Any:
        """With what every error looks like."""
        operation = super().get_operation(*args, **kwargs)
        if operation is not None:
            said = {
                "description": "A problem (RFC 9457).",
                "content": {"application/problem+json": {"schema": PROBLEM}},
            }
            operation["responses"]["default"] = said
        return operation


F = TypeVar("F", bound=Callable[..., Any])


def described(**said: Any) -> Callable[[F], F]:
    """Say in the OpenAPI document what an action, or a whole resource, does."""

    def decorate(described: F) -> F:
        if not inspect.isclass(described):
            options = described.__dict__.setdefault("kwargs", {})
            options.setdefault("schema", AutoSchema())  # what it is built on; REST framework's own default is another
        return extend_schema(**said)(described)

    return decorate
