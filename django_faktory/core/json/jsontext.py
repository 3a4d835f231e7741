"""Split JSON objects into members without changing a byte of them.

Pure. Clients receive numbers, escapes and key order as they sent them (W11), so a job is stored as the original text;
this module only cuts it at the top level and validates it (W7).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.encoder import encode_basestring_ascii
from operator import add
from typing import Any, NoReturn

import msgspec

from ...errors import InvalidPayload, translatable

MAX_DEPTH = 128

MAX_SCANNED = 256 * 1024
"""Characters of a text that the standard library reads if msgspec refuses it: to name the error, or to accept half a
surrogate pair. It takes up to 25 ms for them, and ten times their memory; longer texts get msgspec's error."""

MAX_ITEMS = 10_001
"""Elements of an array that are returned: one more than the most jobs of a PUSHB."""

ITEMS_AT_ONCE = 200_000
"""Commas in an array up to which a list of all elements takes little memory."""

PART = 256 * 1024
"""Bytes whose brackets are counted in one step, which takes up to 5 ms."""

_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_items = msgspec.json.Decoder(list[msgspec.Raw])
_raw_value = msgspec.json.Decoder(msgspec.Raw)
REFUSALS = (msgspec.MsgspecError, RecursionError, UnicodeEncodeError)
"""Exceptions of msgspec's decoder; the last one is for half a surrogate pair that is not escaped."""

_whitespace = re.compile(r"[ \t\n\r]*")
_tokens = re.compile(r'(?:[^" \t\r\n]|"[^"\\]*+(?:\\.[^"\\]*+)*+"){1,1000}+', re.DOTALL)
_any_space = re.compile(r"[ \t\r\n]")


def members(text: str) -> dict[str, str]:
    """Return key → verbatim JSON text of each member of the object in `text`, in order.

    Raises InvalidPayload ("invalid JSON: …") for text that is not one JSON object, for NaN and Infinity, for a repeated
    key at this level, and for nesting deeper than 128.
    """
    values = last_members(text)
    # Compact JSON with distinct keys has exactly this length; a repeated key or white space makes it longer.
    if len(text) != 1 + 4 * len(values) + sum(map(len, values)) + sum(map(len, values.values())):
        refuse_repeated_keys(text, values)
    return values


def last_members(text: str) -> dict[str, str]:
    """Return the members like `members`, but keep the last of repeated keys, as most JSON parsers do."""
    check_depth(text)
    try:
        # msgspec first: 2.4 µs for a job of 180 bytes, the checks included; the scanner needs 14 (ADR 0002).
        raw = _raw_members.decode(text)
    except REFUSALS as error:
        refuse_long(text, error)
        return dict(_pairs_by_scanner(text))
    return {key: str(value, "utf-8") for key, value in raw.items()}


def refuse_repeated_keys(text: str, values: Mapping[str, str], *, max_count: int | None = None) -> None:
    """Raise InvalidPayload if the object in `text`, which is valid JSON, contains a key twice, or too many members.

    `values` are the texts of members: they are skipped, and only other members are scanned.
    """
    keys: set[str] = set()
    for key, _ in _pairs_by_scanner(text, values):
        if key in keys:
            raise repeated_key_error(key)
        if len(keys) == max_count:
            raise InvalidPayload(f"invalid JSON: expected at most {max_count} members of an object; use fewer")
        keys.add(key)


def refuse_long(text: str, error: Exception) -> None:
    """Raise InvalidPayload if `text`, which msgspec refused with `error`, is too long for the standard library."""
    if isinstance(error, RecursionError):
        raise depth_error() from None
    if len(text) > MAX_SCANNED:
        raise InvalidPayload(translatable("invalid JSON: %(problem)s"), problem=error) from error


def pairs(text: str) -> Iterable[tuple[str, str]]:
    """Yield key and verbatim JSON text of each member of the object in `text`; its end is checked last."""
    check_depth(text)
    yield from _pairs_by_scanner(text)


def items(text: str) -> list[str]:
    """Return the verbatim JSON text of the elements of the array in `text`, of a long array the first MAX_ITEMS.

    Raises InvalidPayload ("invalid JSON: …") if `text` is not one JSON array. The depth of the elements is not checked:
    `members` does that, so that one bad element affects only itself.
    """
    try:
        raw = _raw_items.decode(text) if text.count(",") <= ITEMS_AT_ONCE else _first_items(text)
    except REFUSALS as error:
        refuse_long(text, error)
        return list(_items_by_scanner(text))
    return [str(value, "utf-8") for value in raw]


def _first_items(text: str) -> list[msgspec.Raw]:
    found = msgspec.structs.astuple(_first_items_decoder().decode(text))
    return [value for value in found if value is not _ABSENT_ITEM]


@lru_cache(1)
def _first_items_decoder() -> msgspec.json.Decoder[Any]:
    # A struct skips the elements for which it has no field: a list of 8 million numbers would take 450 MB. Not made at
    # the import: that takes 70 ms.
    fields = [(f"_{place}", msgspec.Raw, _ABSENT_ITEM) for place in range(MAX_ITEMS)]
    return msgspec.json.Decoder(msgspec.defstruct("_FirstItems", fields, array_like=True, gc=False))


_ABSENT_ITEM = msgspec.Raw(b"")


def check_depth(text: str) -> None:
    """Raise InvalidPayload if `text` nests deeper than MAX_DEPTH; the outer object is level 1."""
    # Repeated here, because the worker reads each job: one call less.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        for _ in check_depth_in_parts(text):
            pass


def check_depth_in_parts(text: str, *, part: int = PART) -> Generator[None]:
    """Like `check_depth`, with a pause after each part."""
    # Text with few opening brackets cannot be too deep, even if all of them count.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        for depth in _measure_depth(text, part):
            if depth > MAX_DEPTH:
                raise depth_error()
            yield


_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_BITS = bytes.maketrans(b"[{]}", b"1100")
_LEVELS_IN_BYTE = [[*accumulate(1 if byte >> place & 1 else -1 for place in range(7, -1, -1))] for byte in range(256)]
_NET = bytes(levels[-1] & 255 for levels in _LEVELS_IN_BYTE)
_PEAK = bytes(max(0, *levels) for levels in _LEVELS_IN_BYTE)


def _measure_depth(text: str, part: int) -> Generator[int]:
    """Yield the deepest level in each part of valid JSON; 16 MiB of brackets take 130 ms, in any order."""
    data = text.encode("utf-8", "replace").replace(b"\\\\", b"").replace(b'\\"', b"")
    level, is_inside = 0, False
    for start in range(0, len(data), part):
        brackets = data[start : start + part].translate(_BITS, _NO_STRUCTURE)
        if is_inside or b'"' in brackets:
            # Two quotes without a bracket in between change nothing for other brackets.
            pieces = brackets.replace(b'""', b"").split(b'"')
            brackets = b"".join(pieces[is_inside::2])
            is_inside ^= len(pieces) % 2 == 0
        if brackets:
            # A bit for each bracket, so that an entry of a table stands for eight: a loop over all takes five times as
            # long.
            packed = (int(brackets, 2) << -len(brackets) % 8).to_bytes(-(-len(brackets) // 8))
            before = accumulate(memoryview(packed.translate(_NET)).cast("b"), initial=level)
            yield max(map(add, before, packed.translate(_PEAK)))
            level += 2 * brackets.count(b"1") - len(brackets)


def depth_error() -> InvalidPayload:
    """Return the error for text that nests deeper than MAX_DEPTH."""
    text = translatable("invalid JSON: nested deeper than %(levels)s levels; flatten the data")
    return InvalidPayload(text, levels=MAX_DEPTH)


def repeated_key_error(key: str) -> InvalidPayload:
    """Return the error for an object that contains this key twice."""
    return InvalidPayload(f"invalid JSON: key {key[:60]!a} given twice; send it once")


def check_value(text: str) -> None:
    """Raise InvalidPayload unless `text` is exactly one JSON value; depth is not checked."""
    try:
        _raw_value.decode(text)
    except REFUSALS as error:
        refuse_long(text, error)
        _, end = _scan_value(text, _after_space(text, 0))
        _expect_end(text, end)


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


class _Number(str):
    """A number in its original spelling."""


def canonical(text: str) -> str:
    """Return canonical JSON: equal for equal values, independent of spacing, escapes and key order; 1 and 1.0 differ.

    Keys are sorted, strings are written in ASCII, and numbers keep their digits. Keys of stored jobs are hashes of this
    text, so its form must not change.
    """
    return _write_canonical(_spelling_decoder.decode(text))


def _write_canonical(value: Any) -> str:
    if isinstance(value, _Number):
        return value
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if isinstance(value, list):
        return f"[{','.join(map(_write_canonical, value))}]"
    if isinstance(value, dict):
        members = [f"{encode_basestring_ascii(key)}:{_write_canonical(value[key])}" for key in sorted(value)]
        return f"{{{','.join(members)}}}"
    return json.dumps(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_spelling_decoder = json.JSONDecoder(strict=False, parse_int=_Number, parse_float=_Number)
_decoder = json.JSONDecoder(parse_constant=_refuse_constant)  # built once: building takes longer than decoding a jid

# Numbers are skipped and not converted: digits stay text, so no integer is too long and no float is rounded.
_skipper = json.JSONDecoder(parse_float=lambda _: None, parse_int=lambda _: None, parse_constant=_refuse_constant)


def _pairs_by_scanner(text: str, values: Mapping[str, str] | None = None) -> Iterable[tuple[str, str]]:
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        raise InvalidPayload("invalid JSON: expected an object {…}")
    at = _after_space(text, at + 1)
    if text[at : at + 1] != "}":
        while True:
            if text[at : at + 1] != '"':
                raise InvalidPayload(f"invalid JSON: expected a key in double quotes at character {at}")
            key, at = _scan_key(text, at + 1)
            at = _after_space(text, at)
            if text[at : at + 1] != ":":
                raise InvalidPayload(f"invalid JSON: expected ':' at character {at}")
            at = _after_space(text, at + 1)
            value = values.get(key, "") if values else ""
            # The end of a known object or array is where its text ends; a number may continue.
            if value[:1] in ("{", "[") and text.startswith(value, at):
                at += len(value)
            else:
                value, at = _scan_value(text, at)
            yield key, value
            at, has_more = _scan_comma(text, at, "}")
            if not has_more:
                break
    _expect_end(text, at + 1)


def _items_by_scanner(text: str) -> Iterable[str]:
    at = _after_space(text, 0)
    if text[at : at + 1] != "[":
        raise InvalidPayload("invalid JSON: expected an array […]")
    at = _after_space(text, at + 1)
    if text[at : at + 1] != "]":
        while True:
            value, at = _scan_value(text, at)
            yield value
            at, has_more = _scan_comma(text, at, "]")
            if not has_more:
                break
    _expect_end(text, at + 1)


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
    at = _after_space(text, at)
    if text[at : at + 1] == ",":
        return _after_space(text, at + 1), True
    if text[at : at + 1] == closing:
        return at, False
    raise InvalidPayload(f"invalid JSON: expected ',' or '{closing}' at character {at}")


def _expect_end(text: str, at: int) -> None:
    """Raise InvalidPayload if anything but white space follows."""
    if _after_space(text, at) != len(text):
        raise InvalidPayload(f"invalid JSON: unexpected text after the end, at character {at}")


def _after_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    match = _whitespace.match(text, at)
    return match.end() if match else at
