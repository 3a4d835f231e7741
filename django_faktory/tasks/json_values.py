"""Convert task arguments and results to JSON types, and reject values that JSON would change.

Modelled on Django's `normalize_json`. In addition it rejects NaN and Infinity, which would arrive as None, and keys
that are not texts, which would arrive as texts. It converts subclasses (SafeString, IntEnum) and lazy texts to plain
values, because msgspec does not encode them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from django.utils.functional import Promise

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
        return {to_key(key): normalize(item) for key, item in value.items()}
    if value_type is list or value_type is tuple:
        return [normalize(item) for item in value]
    return to_plain(value, normalize)


def normalize_result(value: Any) -> Any:
    """Return a task's result like `normalize`; its keys may be numbers, booleans and None, which become texts.

    A job that has done its work should not fail because of them. Raises ValueError for keys that JSON writes alike.
    """
    if type(value) in UNCHANGED:
        return value
    if isinstance(value, Mapping):
        texts = {_text_of_key(key): normalize_result(item) for key, item in value.items()}
        if len(texts) < len(value):
            raise ValueError("Unsupported value: a dict with 2 keys that JSON writes alike, such as 1 and '1'")
        return texts
    if isinstance(value, list | tuple):
        return [normalize_result(item) for item in value]
    return normalize(value)


def _text_of_key(key: Any) -> str:
    # As Python's `json.dumps` writes them.
    return json.dumps(key) if key is None or isinstance(key, int | float) else to_key(key)


def to_key(key: Any) -> str:
    """Return the key of a dict as a plain str. Raises TypeError for other types, which JSON would turn into texts."""
    if type(key) is str:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    raise TypeError(
        f"Unsupported type: a dict: expected a str as key, got {type(key).__name__}: JSON would change it to a text; "
        "write str(…), or a list of pairs"
    )


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
        case str() | Promise():  # a lazy text becomes one in the language that is active here
            return str.__str__(value) if isinstance(value, str) else str(value)
        case int():
            return int.__int__(value)
        case float() if isfinite(value):
            return float.__float__(value)
        case float():
            raise ValueError(f"Unsupported value: {value!r}: JSON has no NaN and no Infinity")
        case bytes():
            return _decode_bytes(value)
        case Mapping():
            return {to_key(key): convert_item(item) for key, item in value.items()}
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
