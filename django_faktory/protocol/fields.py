"""What commands are made of: a verb with JSON behind it, and members of known kinds. Raises InvalidPayload."""

from __future__ import annotations

from typing import Any

from .. import jsontext
from ..errors import InvalidPayload
from ..payloads import MAX_NAME


def line(verb: str, rest: str) -> bytes:
    """A command as a client sends it."""
    return f"{verb} {rest}\r\n".encode()


def object_after(verb: str, text: str) -> dict[str, Any]:
    """The JSON object that follows the verb."""
    jsontext.check_depth(text)
    try:
        found = jsontext.decode(text)
    except InvalidPayload as error:
        raise InvalidPayload(f"invalid {verb} {text[:200]}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidPayload(f"invalid {verb} {text[:200]}: expected an object {{…}}")
    return found


def field(verb: str, found: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """The member `name`, or `default` where it is absent or null."""
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidPayload(f"invalid {verb}: {name}: expected {_KINDS[kind]}, got {ascii(value)[:60]}")
    return value


_KINDS: dict[type[Any], str] = {str: "a string", int: "an integer", list: "an array", dict: "an object"}


def wid(verb: str, found: dict[str, Any]) -> str:
    """The wid, "" where none is given."""
    given: str = field(verb, found, "wid", str, "")
    if len(given) > MAX_NAME or "\x00" in given or not given.isprintable():
        raise InvalidPayload(f"invalid {verb}: wid: expected at most {MAX_NAME} printable characters")
    return given
