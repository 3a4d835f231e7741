"""Split JSON objects into members without changing a byte of them.

Pure. Clients receive numbers, escapes and key order as they sent them (W11), so a job is stored as the original text;
this module only cuts it at the top level and validates it (W7).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

import msgspec

from ...errors import InvalidPayload, translatable

MAX_DEPTH = 128
CHECKED_AT_ONCE = 16 * 1024
"""Characters of a text per step of the bracket check."""

_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_items = msgspec.json.Decoder(list[msgspec.Raw])
_whitespace = re.compile(r"[ \t\n\r]*")
_strings = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_brackets = re.compile(r"[\[\]{}]")
_tokens = re.compile(r'(?:[^" \t\r\n]|"[^"\\]*+(?:\\.[^"\\]*+)*+"){1,1000}+', re.DOTALL)
_any_space = re.compile(r"[ \t\r\n]")


def members(text: str) -> dict[str, str]:
    """Return key → verbatim JSON text of each member of the object in `text`, in order.

    Raises InvalidPayload ("invalid JSON: …") for text that is not one JSON object, for NaN and Infinity, for a repeated
    key at this level, and for nesting deeper than 128.
    """
    check_depth(text)
    try:
        # msgspec first: 2.4 µs for a job of 180 bytes, the checks included; the scanner needs 14 (ADR 0004).
        raw = _raw_members.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return _members_by_scanner(text)
    values = {key: str(value, "utf-8") for key, value in raw.items()}
    # msgspec keeps the last of repeated keys without an error. Compact JSON with distinct keys has exactly this length;
    # a repeated key or white space makes it longer.
    if len(text) == 1 + 4 * len(values) + sum(map(len, values)) + sum(map(len, values.values())):
        return values
    # Python's `json.dumps` writes a space behind each comma and colon: its text is rebuilt and compared.
    if text == "{" + ", ".join([f'"{key}": {value}' for key, value in values.items()]) + "}":
        return values
    return _members_by_scanner(text)


def last_members(text: str) -> dict[str, str]:
    """Return the members like `members`, but keep the last of repeated keys, as most JSON parsers do."""
    check_depth(text)
    return dict(_pairs_by_scanner(text))


def items(text: str) -> list[str]:
    """Return the verbatim JSON text of each element of the array in `text`.

    Raises InvalidPayload ("invalid JSON: …") if `text` is not one JSON array. The depth of the elements is not checked:
    `members` does that, so that one bad element affects only itself.
    """
    try:
        return [str(value, "utf-8") for value in _raw_items.decode(text)]
    except (msgspec.MsgspecError, RecursionError):
        return list(_items_by_scanner(text))


def check_depth(text: str) -> None:
    """Raise InvalidPayload if `text` nests deeper than MAX_DEPTH; the outer object is level 1."""
    # Fast path: text with few opening brackets cannot be too deep, even if all of them count.
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    depth, without_strings = 0, _strings.sub("", text)
    for start in range(0, len(without_strings), CHECKED_AT_ONCE):  # stops at the first level that is too deep
        for bracket in _brackets.findall(without_strings, start, start + CHECKED_AT_ONCE):
            depth += 1 if bracket in "[{" else -1
            if depth > MAX_DEPTH:
                raise depth_error()


def depth_error() -> InvalidPayload:
    """Return the error for text that nests deeper than MAX_DEPTH."""
    text = translatable("invalid JSON: nested deeper than %(levels)s levels; flatten the data")
    return InvalidPayload(text, levels=MAX_DEPTH)


def duplicate_key_error(key: str) -> InvalidPayload:
    """Return the error for an object that contains this key twice."""
    return InvalidPayload(f"invalid JSON: key {key[:60]!a} given twice; send it once")


def check_value(text: str) -> None:
    """Raise InvalidPayload unless `text` is exactly one JSON value; depth is not checked."""
    _, end = _scan_value(text, after_space(text, 0))
    expect_end(text, end)


def split_member(text: str) -> tuple[str, str]:
    """Return the key and the text of the value of one member of an object; the value is not validated."""
    at = after_space(text, 0)
    if text[at : at + 1] != '"':
        raise InvalidPayload(f"invalid JSON: expected a key in double quotes, got {text[at : at + 20]!a}")
    key, at = _scan_key(text, at + 1)
    at = after_space(text, at)
    if text[at : at + 1] != ":":
        raise InvalidPayload(f"invalid JSON: expected ':' behind the key {key[:60]!a}")
    return key, text[at + 1 :].strip(" \t\r\n")


def decode(text: str) -> Any:
    """Decode any JSON value; integers keep every digit, lone surrogates are allowed."""
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(translatable("invalid JSON: %(problem)s"), problem=error) from error


def encode(value: Any) -> str:
    """Encode to compact JSON. Raises TypeError for values that JSON cannot represent (NaN becomes null)."""
    try:
        return str(msgspec.json.encode(value), "utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can represent only as an escape
        return json.dumps(value, separators=(",", ":"), allow_nan=False)


def join(members: Iterable[tuple[str, str]]) -> str:
    """Join members into an object, compact and with verbatim values: the inverse of `members`."""
    return "{" + ",".join(f"{encode(key)}:{value}" for key, value in members) + "}"


def append(text: str, members: Iterable[tuple[str, str]]) -> str:
    """Add members at the end of the object in `text`; the existing text stays unchanged."""
    added_text = ",".join([f'"{key}":{value}' for key, value in members])
    if not added_text:
        return text
    head = text.rstrip(" \t\r\n")[:-1].rstrip(" \t\r\n")
    return f"{head}{'' if head.endswith('{') else ','}{added_text}}}"


def compact(text: str) -> str:
    """Remove the white space between the tokens of `text`; strings stay unchanged."""
    if not _any_space.search(text):
        return text
    # Match by match, so that other threads can run in between.
    return "".join(match[0] for match in _tokens.finditer(text))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)  # built once: building takes longer than decoding a jid

# Numbers are skipped and not converted: digits stay text, so no integer is too long and no float is rounded.
_skipper = json.JSONDecoder(parse_float=lambda _: None, parse_int=lambda _: None, parse_constant=_refuse_constant)


def _members_by_scanner(text: str) -> dict[str, str]:
    """Split with the standard library's scanner: slower, but it explains errors and detects repeated keys."""
    values: dict[str, str] = {}
    for key, value in _pairs_by_scanner(text):
        if key in values:
            raise duplicate_key_error(key)
        values[key] = value
    return values


def _pairs_by_scanner(text: str) -> Iterable[tuple[str, str]]:
    at = after_space(text, 0)
    if text[at : at + 1] != "{":
        raise InvalidPayload("invalid JSON: expected an object {…}")
    at = after_space(text, at + 1)
    if text[at : at + 1] != "}":
        while True:
            if text[at : at + 1] != '"':
                raise InvalidPayload(f"invalid JSON: expected a key in double quotes at character {at}")
            key, at = _scan_key(text, at + 1)
            at = after_space(text, at)
            if text[at : at + 1] != ":":
                raise InvalidPayload(f"invalid JSON: expected ':' at character {at}")
            value, at = _scan_value(text, after_space(text, at + 1))
            yield key, value
            at, has_more = _scan_comma(text, at, "}")
            if not has_more:
                break
    expect_end(text, at + 1)


def _items_by_scanner(text: str) -> Iterable[str]:
    at = after_space(text, 0)
    if text[at : at + 1] != "[":
        raise InvalidPayload("invalid JSON: expected an array […]")
    at = after_space(text, at + 1)
    if text[at : at + 1] != "]":
        while True:
            value, at = _scan_value(text, at)
            yield value
            at, has_more = _scan_comma(text, at, "]")
            if not has_more:
                break
    expect_end(text, at + 1)


def _scan_key(text: str, at: int) -> tuple[str, int]:
    try:
        key, end = scanstring(text, at, True)
    except ValueError as error:
        raise InvalidPayload(f"invalid JSON: {error}") from error
    return str(key), int(end)


def _scan_value(text: str, at: int) -> tuple[str, int]:
    try:
        # RecursionError: `items` and `check_value` do not check the depth first.
        _, end = _skipper.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"invalid JSON: {error}") from error
    return text[at:end], end


def _scan_comma(text: str, at: int, closing: str) -> tuple[int, bool]:
    at = after_space(text, at)
    if text[at : at + 1] == ",":
        return after_space(text, at + 1), True
    if text[at : at + 1] == closing:
        return at, False
    raise InvalidPayload(f"invalid JSON: expected ',' or '{closing}' at character {at}")


def expect_end(text: str, at: int) -> None:
    """Raise InvalidPayload if anything but white space follows."""
    if after_space(text, at) != len(text):
        raise InvalidPayload(f"invalid JSON: unexpected text after the end, at character {at}")


def after_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    match = _whitespace.match(text, at)
    return match.end() if match else at
