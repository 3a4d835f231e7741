"""What commands are made of: a verb with JSON behind it, and members of known kinds. Raises InvalidPayload."""

from __future__ import annotations

from typing import Any

from .. import jsonsteps, jsontext
from ..errors import InvalidPayload
from ..jsonsteps import Steps
from .limits import check_name


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
    check_name(verb, "wid", given)
    return given


def strings_of(raw: str, *, most: int) -> Steps[list[str] | None]:
    """The first strings of a JSON array whose values are good, one more than `most`; None where it is another thing."""
    if not raw.startswith("["):
        return None
    found: list[str] = []
    for part in jsonsteps.cut(raw, "[]"):
        if part is None:
            yield
        elif not part.lstrip().startswith('"'):
            return None
        elif len(found) <= most:
            found.append(jsontext.decode(part))
    return found


def decoded(raw: str) -> Any:
    """A member of a long command that is to be a string: what else is as long is not built, but told by its kind."""
    if len(raw) > jsonsteps.SHORT and raw[0] in "{[":
        return {} if raw[0] == "{" else []
    return jsontext.decode(raw)
