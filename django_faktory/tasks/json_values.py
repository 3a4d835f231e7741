"""Convert task arguments and results to JSON types, and reject values that JSON would change.

Pure. Modelled on Django's `normalize_json`. In addition it rejects NaN and Infinity, which would arrive as None, and
converts subclasses (SafeString, IntEnum) to plain values, because msgspec does not encode them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from ..core.json import jsontext

UNCHANGED = frozenset({str, int, bool, type(None)})


def normalize(value: Any) -> Any:
    """Return `value` as lists, dicts and plain scalars.

    Raises TypeError or ValueError for values that JSON cannot represent.
    """
    value_type = type(value)
    # Exact types, compared first: they are by far the most common and need no copy.
    if value_type in UNCHANGED:
        return value
    if value_type is dict:
        return {normalize(key): normalize(item) for key, item in value.items()}
    if value_type is list or value_type is tuple:
        return [normalize(item) for item in value]
    return to_plain(value, normalize)


def encode_json(value: Any) -> str:
    """Return the JSON text of a normalized value. Raises InvalidPayload if it nests deeper than MAX_DEPTH."""
    text = jsontext.encode(value)
    jsontext.check_depth(text)
    return text


def to_plain(value: Any, convert_item: Callable[[Any], Any]) -> Any:
    """Convert a value of a type that is not exactly one of JSON's; `convert_item` converts its items.

    Raises TypeError or ValueError like `normalize`.
    """
    match value:
        # The methods of the base class, because subclasses may override them (SafeString, StrEnum).
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float() if isfinite(value):
            return float.__float__(value)
        case float():
            raise ValueError(f"Unsupported value: {value!r}: JSON has no NaN and no Infinity")
        case bytes():
            return _decode_bytes(value)
        case Mapping():
            return {normalize(key): convert_item(item) for key, item in value.items()}
        # The two excluded types are sequences of numbers, so the task would get a list of numbers.
        case Sequence() if not isinstance(value, bytearray | memoryview):
            return [convert_item(item) for item in value]
    raise TypeError(
        f"Unsupported type: {type(value)}: expected None, bool, int, float, str, list or dict; arguments without "
        "plain_json may also be a datetime, date, time, timedelta, Decimal, UUID or saved model instance"
    )


def _decode_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"Unsupported value: {type(value)}: bytes must be UTF-8; encode other bytes, for example as base64"
        ) from None
