"""What a task's arguments and results may be: JSON's types, read as Django's Tasks do; nothing that JSON would change.

Pure. Django's `normalize_json` is the model; this one also refuses NaN and Infinity, which would arrive as None,
and takes the plain value out of subclasses (SafeString, IntEnum), which msgspec does not encode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from . import jsontext

UNCHANGED = frozenset({str, int, bool, type(None)})


def normalized(value: Any) -> Any:
    """Return `value` in lists, dicts and plain scalars. Raises TypeError or ValueError for what JSON cannot hold."""
    kind = type(value)
    if kind in UNCHANGED:
        return value
    if kind is dict:
        return {normalized(key): normalized(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [normalized(item) for item in value]
    return plain(value, normalized)


def encoded(value: Any) -> str:
    """The JSON text of a normalized value. Raises InvalidPayload where it nests deeper than any reader takes."""
    text = jsontext.encode(value)
    jsontext.check_depth(text)
    return text


def plain(value: Any, each: Callable[[Any], Any]) -> Any:
    """A value of a type that is not exactly one of JSON's; what it holds is converted by `each`. Raises as above."""
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float() if isfinite(value):
            return float.__float__(value)
        case float():
            raise ValueError(f"Unsupported value: {value!r}: JSON has no NaN and no Infinity")
        case bytes():
            return _decoded(value)
        case Mapping():
            return {normalized(key): each(item) for key, item in value.items()}
        case Sequence() if not isinstance(value, bytearray | memoryview):
            return [each(item) for item in value]
    raise TypeError(
        f"Unsupported type: {type(value)}: arguments and results of tasks are None, bool, int, float, str, list, dict"
    )


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"Unsupported value: {type(value)}: bytes must be UTF-8; encode others, as base64") from None
