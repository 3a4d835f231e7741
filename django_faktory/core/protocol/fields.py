"""Helpers to parse and write commands: a verb followed by JSON, and typed members.

`format_line` writes a command, `parse_object` and `field` read one, `parse_strings` and `decode_value` serve long
commands. Parsers raise InvalidPayload.
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidPayload
from ..json import incremental, jsontext
from ..json.incremental import Incremental
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


def parse_strings(raw: str, *, max_count: int, skips_others: bool = False) -> Incremental[list[str] | None]:
    """Return the first `max_count` + 1 strings of a JSON array; None if it is not an array of strings.

    With `skips_others` elements of another type are left out.

    One more than `max_count`, so that the caller can detect too many. All values are checked.
    """
    if not raw.startswith("["):
        return None
    strings: list[str] = []
    for element in incremental.cut(raw, "[]"):
        if element is None:
            yield
        elif not element.lstrip().startswith('"'):
            if not skips_others:
                return None
        # Further strings are only checked: a list may have millions, and the caller refuses or cuts it.
        elif len(strings) <= max_count:
            strings.append(jsontext.decode(element))
    return strings


def decode_value(raw: str) -> Any:
    """Decode a member of a long command that should be a string.

    A long object or array is returned empty: its type suffices for the error message, and decoding it takes long.
    """
    if len(raw) > incremental.SHORT and raw[0] in "{[":
        return {} if raw[0] == "{" else []
    return jsontext.decode(raw)
