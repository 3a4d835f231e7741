"""Helpers to parse and write commands: a verb followed by JSON, and typed members. Parsers raise InvalidPayload."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidPayload
from ..json import incremental, jsontext
from ..json.incremental import Incremental
from .limits import check_name


def line(verb: str, rest: str) -> bytes:
    """Return a command as bytes, with CRLF."""
    return f"{verb} {rest}\r\n".encode()


def parse_object(verb: str, text: str) -> dict[str, Any]:
    """Decode the JSON object that follows the verb. Raises InvalidPayload for anything else."""
    jsontext.check_depth(text)
    try:
        found = jsontext.decode(text)
    except InvalidPayload as error:
        raise InvalidPayload(f"invalid {verb} {text[:200]}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidPayload(f"invalid {verb} {text[:200]}: expected an object {{…}}")
    return found


def field(verb: str, found: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return the member `name`, or `default` if it is absent or null. Raises InvalidPayload for another type."""
    value = found.get(name)
    if value is None:
        return default
    # No member is a bool, and True is an int in Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidPayload(f"invalid {verb}: {name}: expected {_KINDS[kind]}, got {ascii(value)[:60]}")
    return value


_KINDS: dict[type[Any], str] = {str: "a string", int: "an integer", list: "an array", dict: "an object"}


def wid(verb: str, found: dict[str, Any]) -> str:
    """Return the wid, "" if absent. Raises InvalidPayload if it is too long or not printable."""
    given: str = field(verb, found, "wid", str, "")
    check_name(verb, "wid", given)
    return given


def parse_strings(raw: str, *, max_count: int) -> Incremental[list[str] | None]:
    """Return the first `max_count` + 1 strings of a JSON array; None if it is not an array of strings.

    One more than `max_count`, so that the caller can detect too many. All values are checked.
    """
    if not raw.startswith("["):
        return None
    found: list[str] = []
    for part in incremental.cut(raw, "[]"):
        if part is None:
            yield
        elif not part.lstrip().startswith('"'):
            return None
        elif len(found) <= max_count:
            found.append(jsontext.decode(part))
    return found


def decode_value(raw: str) -> Any:
    """Decode a member of a long command that should be a string.

    A long object or array is returned empty: its type suffices for the error message, and decoding it takes long.
    """
    if len(raw) > incremental.SHORT and raw[0] in "{[":
        return {} if raw[0] == "{" else []
    return jsontext.decode(raw)
