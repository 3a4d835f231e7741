"""JSON parser and renderer that tolerate any input a client can send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rest_framework import exceptions, status
from rest_framework.parsers import JSONParser
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer

from ... import conf
from ...operations.serializers import Verbatim, encode_document

MAX_SHOWN = 64 * 1024
"""Characters of a text of a job that the page of a browser shows."""


class TooLarge(exceptions.APIException):
    """The request body is longer than a job may be (413)."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE


class Json(JSONRenderer):
    """Render JSON in ASCII.

    JSON may contain half of a surrogate pair, UTF-8 may not: in ASCII it stays an escape.
    """

    ensure_ascii = True

    def render(
        self, data: Any, accepted_media_type: str | None = None, renderer_context: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the JSON; the long texts of a job are copied, unless the client asks for indentation."""
        if any(isinstance(value, Verbatim) for value in _values_of(data)):
            if self.get_indent(accepted_media_type or "", renderer_context or {}) is None:
                return encode_document(data).encode()
            data = {name: value.decode_json() if isinstance(value, Verbatim) else value for name, value in data.items()}
        content: bytes = super().render(data, accepted_media_type, renderer_context)
        return content


class Browsable(BrowsableAPIRenderer):
    """Render the page of a browser, without long texts."""

    def get_content(self, renderer: Any, data: Any, accepted_media_type: str | None, renderer_context: Any) -> Any:
        """Return the content of the page. Each of its words is searched for links, which takes long for a long text."""
        if any(isinstance(value, Verbatim) and len(value) > MAX_SHOWN for value in _values_of(data)):
            data = {
                name: f"{value[:100]}… ({len(value):,} characters; ?format=json has all)"
                if isinstance(value, Verbatim) and len(value) > MAX_SHOWN
                else value
                for name, value in data.items()
            }
        return super().get_content(renderer, data, accepted_media_type, renderer_context)


def _values_of(data: Any) -> Any:
    return data.values() if isinstance(data, dict) else ()


class BoundedJson(JSONParser):
    """Parse a JSON object of at most MAX_COMMAND_BYTES that is not nested too deeply."""

    renderer_class = Json

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the parsed object. Raises ParseError, or TooLarge for a long body."""
        # The length is checked before the body is read, so that a large request costs no memory.
        # REST framework parses no request without a valid Content-Length.
        meta, limit = (parser_context or {})["request"].META, conf.get("MAX_COMMAND_BYTES")
        length = int(meta.get("CONTENT_LENGTH") or 0)
        if length > limit:
            raise TooLarge(f"expected at most {limit} bytes, got {length}")
        try:
            body = super().parse(stream, media_type, dict(parser_context or {}))
        # Python's JSON parser recurses: a body that is nested too deeply would cause a response of 500.
        except RecursionError:
            raise exceptions.ParseError("JSON parse error - nested too deeply; flatten the data") from None
        if not isinstance(body, dict):
            raise exceptions.ParseError(f"expected a JSON object, got {type(body).__name__}")
        return body
