"""JSON in and out: what a client can write never breaks a reader, or us."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rest_framework import exceptions, status
from rest_framework.parsers import JSONParser
from rest_framework.renderers import JSONRenderer

from .. import conf


class TooLarge(exceptions.APIException):
    """The request's body is longer than a job may be."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE


class Json(JSONRenderer):
    """In ASCII: half a surrogate pair, which JSON may hold and UTF-8 may not, stays an escape."""

    ensure_ascii = True


class BoundedJson(JSONParser):
    """No longer than a command of the protocol may be, and no deeper than a reader can go."""

    renderer_class = Json

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """The value. Raises ParseError, TooLarge."""
        length, most = _length((parser_context or {}).get("request")), conf.get("MAX_COMMAND_BYTES")
        if length > most:
            raise TooLarge(f"expected at most {most} bytes, got {length}")
        try:
            found = super().parse(stream, media_type, dict(parser_context or {}))
        except RecursionError:
            raise exceptions.ParseError("JSON parse error - nested too deeply; flatten the data") from None
        if not isinstance(found, dict):
            raise exceptions.ParseError(f"expected a JSON object, got {type(found).__name__}")
        return found


def _length(request: Any) -> int:
    told = request.META.get("CONTENT_LENGTH") if request is not None else None
    return int(told) if told and str(told).isdigit() else 0
