"""Helpers to parse and write commands: a verb followed by JSON, and typed members.

`format_line` writes a command, `parse_object` and `field` read one. Parsers raise InvalidPayload.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidPayload
from ..json import jsontext
from .limits import check_name


def format_line(verb: str, arguments: str) -> bytes:
    """Return a command as bytes, with CRLF."""
    return f"{verb} {arguments}\r\n".encode()


def parse_object(verb: str, text: str) -> dict[str, Any]:
    """Decode the JSON object that follows the verb. Raises InvalidPayload for anything else."""
    # Before the decoder, which is recursive.
    jsontext.check_depth(text)
    try:
        members = jsontext.decode(text)
    except InvalidPayload as error:
        raise InvalidPayload(f"invalid {verb} {text[:200]}: {error}") from error
    if not isinstance(members, dict):
        raise InvalidPayload(f"invalid {verb} {text[:200]}: expected an object {{…}}")
    return members


def field(verb: str, members: dict[str, Any], name: str, expected_type: type[Any], default: Any) -> Any:
    """Return the member `name`, or `default` if it is absent or null. Raises InvalidPayload for another type."""
    value = members.get(name)
    if value is None:
        return default
    # No member is a bool, and True is an int in Python.
    if not isinstance(value, expected_type) or isinstance(value, bool):
        raise InvalidPayload(f"invalid {verb}: {name}: expected {_TYPE_NAMES[expected_type]}, got {ascii(value)[:60]}")
    return value


_TYPE_NAMES: dict[type[Any], str] = {str: "a string", int: "an integer", list: "an array", dict: "an object"}


def parse_wid(verb: str, members: dict[str, Any]) -> str:
    """Return the wid, "" if absent. Raises InvalidPayload if it is too long or not printable."""
    value: str = field(verb, members, "wid", str, "")
    check_name(verb, "wid", value)
    return value
