"""Process long JSON in steps, so that an event loop can serve other connections in between.

The incremental version of `jsontext`. Pure. A generator yields about every millisecond and returns its result at the
end. Apart from the requested texts, no data structure grows with the number of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from ...errors import InvalidPayload
from . import jsontext

T = TypeVar("T")
Incremental = Generator[None, None, T]

SHORT = 16 * 1024
"""Characters of a text that is processed in one step."""

TOKENS_A_STEP = 2000
CANONICAL_TOKENS_A_STEP = 200
"""Tokens per step while writing canonical JSON, which is slower: about one millisecond."""

SLICE = 64 * 1024
"""Characters of a written value that are copied in one step."""

MAX_LEVELS = 4
"""Maximum levels at which long values are parsed in steps if msgspec rejects them; each level is read again."""


class ParseSizes(NamedTuple):
    """Sizes of the steps in which a long text is parsed."""

    short: int = SHORT
    tokens: int = TOKENS_A_STEP


DEFAULT_SIZES = ParseSizes()

_SPACE = " \t\r\n"
# At most 500,000 characters per match, about a millisecond; the group is empty if a long string continues.
_pieces = r'(?:[^"\\]{1,500}+|\\.){0,1000}+("?)'
_string = f'"{_pieces}'
# Possessive quantifiers (++, *+) prevent backtracking, so that matching stays linear for hostile input.
_outer = re.compile(rf'[^"\[\]{{}},]*+(?:{_string}|([\[\]{{}},]))', re.DOTALL)
_inner = re.compile(rf'[^"\[\]{{}}]*+(?:{_string}|([\[\]{{}}]))', re.DOTALL)
_rest_of_string = re.compile(_pieces, re.DOTALL)
_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_encode_string = json.encoder.encode_basestring_ascii


def run(steps: Incremental[T]) -> T:
    """Run all steps without a pause and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def check_depth(text: str, *, sizes: ParseSizes = DEFAULT_SIZES) -> Incremental[None]:
    """Raise InvalidPayload if `text` nests deeper than MAX_DEPTH; the outer object is level 1."""
    if len(text) <= sizes.short:
        jsontext.check_depth(text)
        return
    if text.count("{") + text.count("[") <= jsontext.MAX_DEPTH:
        return
    depth = count = at = 0
    tokens_a_step = sizes.tokens
    while at < len(text):
        for match in _inner.finditer(text, at):
            count += 1
            if not count % tokens_a_step:
                yield
            sign = match[2]
            if sign is None:
                if not match[1]:
                    at = yield from _string_end(text, match.end())
                    break
            elif sign in "[{":
                depth += 1
                if depth > jsontext.MAX_DEPTH:
                    raise jsontext.depth_error()
            else:
                depth -= 1
        else:
            return


def members(
    text: str, *, max_count: int, rejects_duplicates: bool = True, sizes: ParseSizes = DEFAULT_SIZES
) -> Incremental[dict[str, str]]:
    """Return key → verbatim JSON text for each member of the object in `text`; depth is not checked.

    Raises InvalidPayload if it is not one JSON object, for a repeated key (unless `rejects_duplicates` is false, then
    the last one counts), and for more than `max_count` members.
    """
    values: dict[str, str] = {}
    for part in cut(text, "{}", tokens_a_step=sizes.tokens):
        if part is None:
            yield
            continue
        key, value = yield from _member(part, MAX_LEVELS, sizes)
        if rejects_duplicates and key in values:
            raise jsontext.duplicate_key_error(key)
        # Bounds the memory: the texts of the members are kept until the object ends.
        if len(values) == max_count and key not in values:
            raise InvalidPayload(f"invalid JSON: expected at most {max_count} members of an object; use fewer")
        values[key] = value
    return values


def check_value(text: str, levels: int = MAX_LEVELS, *, sizes: ParseSizes = DEFAULT_SIZES) -> Incremental[None]:
    """Raise InvalidPayload if `text` is not one JSON value; depth is not checked."""
    # `cut` leaves white space around its parts.
    text = text.strip(_SPACE)
    if len(text) > sizes.short:
        yield
        # msgspec validates at a speed that needs no steps; only the texts that it rejects are cut into parts.
        try:
            _raw_decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):  # invalid, or a lone surrogate (valid)
            if levels and text[0] in "[{":
                yield from _check_parts(text, levels - 1, sizes)
                return
        else:
            return
    jsontext.check_value(text)


def _check_parts(text: str, levels: int, sizes: ParseSizes) -> Incremental[None]:
    for part in cut(text, "[]" if text[0] == "[" else "{}", tokens_a_step=sizes.tokens):
        if part is None:
            yield
        elif text[0] == "[":
            yield from check_value(part, levels, sizes=sizes)
        else:
            yield from _member(part, levels, sizes)


def _member(part: str, levels: int, sizes: ParseSizes) -> Incremental[tuple[str, str]]:
    key, value = jsontext.split_member(part)
    yield from check_value(value, levels, sizes=sizes)
    return key, value


def cut(text: str, brackets: str, *, tokens_a_step: int = TOKENS_A_STEP) -> Iterator[str | None]:
    """Yield the texts between the commas of the array or object in `text`; None where a pause is due.

    The parts are not validated: `text` is valid JSON if each of them is. Raises InvalidPayload if brackets do not
    match.
    """
    begin = jsontext.after_space(text, 0)
    if text[begin : begin + 1] != brackets[0]:
        expected = "an array […]" if brackets == "[]" else "an object {…}"
        raise InvalidPayload(f"invalid JSON: expected {expected}")
    begin, count = begin + 1, 0
    for end in _part_ends(text, begin, tokens_a_step):
        if end is None:
            yield None
            continue
        part = text[begin:end]
        if text[end] == ",":
            yield part
        elif text[end] != brackets[1]:
            break
        else:
            # An empty array or object has no part; after a trailing comma the empty part is rejected by the caller.
            if count or part.strip(_SPACE):
                yield part
            jsontext.expect_end(text, end + 1)
            return
        begin, count = end + 1, count + 1
    raise InvalidPayload(f"invalid JSON: expected ',' or '{brackets[1]}' at character {begin}")


def _part_ends(text: str, at: int, tokens_a_step: int) -> Iterator[int | None]:
    """Yield the positions of the commas at this level, and finally of the closing bracket."""
    depth = count = 0
    while True:
        for match in (_inner if depth else _outer).finditer(text, at):
            count += 1
            if not count % tokens_a_step:
                yield None
            sign = match[2]
            if sign is None:
                if match[1]:
                    continue
                at = yield from _string_end(text, match.end())
                break
            if depth == 0 and sign not in "[{":
                yield match.end() - 1
                if sign != ",":
                    return
                continue
            depth += 1 if sign in "[{" else -1
            if depth == (sign in "[{"):  # the level changed between 0 and 1: start or stop counting commas
                at = match.end()
                break
        else:
            return


def _string_end(text: str, at: int) -> Incremental[int]:
    """Return the position after the quote that ends a long string; the end of the text if there is none."""
    while match := _rest_of_string.match(text, at):
        if match[1]:
            return match.end()
        if match.end() == at:
            break
        at = match.end()
        yield
    return len(text)


_verbatim = re.compile(r'(?:[^"\\\[\]{} \t\r\n]|"[ !#-Z^-~]{0,50}+"){1,200}+')  # numbers, commas and strings
_plain_member = re.compile(
    r'"([ !#-Z^-~]{0,50}+)"[ \t\r\n]*+:[ \t\r\n]*+([^"\\[\]{},: \t\r\n]++|"[ !#-Z^-~]{0,200}+")[ \t\r\n]*+'
)  # a key and a one-token value, both already in canonical spelling
_scalar = re.compile(r'[^"\[\]{},: \t\r\n]++')
_spaces = re.compile(r"[ \t\r\n]*+")
_string_piece = re.compile(r'((?:[^"\\]{1,1000}+|\\u.{4}|\\[^u]){0,16}+)("?)', re.DOTALL)


def canonical(text: str, out: bytearray, *, max_count: int | None = None) -> Incremental[None]:
    """Append the valid JSON `text` to `out` in canonical form: equal values give equal bytes.

    Object keys are sorted, white space is removed, strings are written in ASCII, and numbers keep their digits. The
    caller may empty `out` between steps: an array is written while it is read; only an object is kept in memory until
    its end. Raises InvalidPayload for more than `max_count` members in objects that are open at once, and, if
    `max_count` is given, for a key longer than SHORT characters.
    """
    # Stored keys of other versions are compared with hashes of these bytes, so the form must not change (ADR 0033).
    writer = _Canonical(text, max_count)
    yield from writer.value(writer.after_space(0), out)


class _Canonical:
    """Writer of one text; `at` arguments and results are positions in it."""

    def __init__(self, text: str, max_count: int | None) -> None:
        self._text, self._max_count = text, max_count
        self._members, self._remaining_tokens = 0, CANONICAL_TOKENS_A_STEP

    def value(self, at: int, out: bytearray) -> Incremental[int]:
        """Write the value that begins at `at` and return the position after it."""
        first = self._text[at]
        if first == "{":
            return (yield from self._write_object(at + 1, out))
        if first == "[":
            return (yield from self._write_array(at + 1, out))
        if first == '"':
            return (yield from self._write_string(at + 1, out))
        match = _scalar.match(self._text, at)
        assert match is not None  # noqa: S101  (the text is valid JSON)
        out += match[0].encode()
        return match.end()

    def after_space(self, at: int) -> int:
        """Return the position of the next token."""
        match = _spaces.match(self._text, at)
        return match.end() if match else at

    def _is_due(self, size: int = 0) -> bool:
        """Return whether a pause is due after one more token of `size` characters."""
        # A long token counts as several, because copying it takes longer.
        self._remaining_tokens -= 1 + size // 500
        if self._remaining_tokens > 0:
            return False
        self._remaining_tokens = CANONICAL_TOKENS_A_STEP
        return True

    def _write_array(self, at: int, out: bytearray) -> Incremental[int]:
        out += b"["
        while True:
            begin = at
            # Most arrays have scalars only: a run of them is copied at once, not token by token.
            if match := _verbatim.match(self._text, at):
                out += match[0].encode()
                at = match.end()
            if self._is_due(at - begin):
                yield
            at = self.after_space(at)
            sign = self._text[at]
            if sign == "]":
                out += b"]"
                return at + 1
            if sign in '[{"':
                at = yield from self.value(at, out)

    def _write_string(self, at: int, out: bytearray) -> Incremental[int]:
        """Write a string piece by piece.

        A surrogate pair that is cut in two is written like an uncut one: as two escapes.
        """
        out += b'"'
        while True:
            match = _string_piece.match(self._text, at)
            assert match is not None  # noqa: S101  (it matches the empty text)
            out += _encode_string(json.loads(f'"{match[1]}"', strict=False))[1:-1].encode()
            size, at = match.end() - at, match.end()
            if self._is_due(size):
                yield
            if match[2]:
                out += b'"'
                return at

    def _write_object(self, at: int, out: bytearray) -> Incremental[int]:
        values: dict[str, str | bytearray] = {}
        at = self.after_space(at)
        while self._text[at] != "}":
            if self._text[at] == ",":
                at = self.after_space(at + 1)
            if self._is_due():
                yield
            value: str | bytearray
            if match := _plain_member.match(self._text, at):
                key, value, at = match[1], match[2], match.end()
            else:
                key, at = yield from self._read_key(at)
                value = bytearray()
                at = self.after_space((yield from self.value(at, value)))
            # A repeated key replaces its value, so it needs no more memory.
            self._members += key not in values
            if self._max_count is not None and self._members > self._max_count:
                raise InvalidPayload(f"expected at most {self._max_count} members of objects within each other")
            values[key] = value
        # The object is complete; only members of open objects count against `max_count`.
        self._members -= len(values)
        yield from self._write_sorted(values, out)
        return at + 1

    def _read_key(self, at: int) -> Incremental[tuple[str, int]]:
        """Return the key that begins at `at`, and the position of its value."""
        raw = bytearray()
        at = yield from self._write_string(at + 1, raw)
        if self._max_count is not None and len(raw) > SHORT:
            raise InvalidPayload(f"expected keys of at most {SHORT} characters")
        return json.loads(raw), self.after_space(self.after_space(at) + 1)

    def _write_sorted(self, values: dict[str, str | bytearray], out: bytearray) -> Incremental[None]:
        separator = b"{"
        for key in sorted(values):
            out += separator + _encode_string(key).encode() + b":"
            separator = b","
            if self._is_due():
                yield
            value = values[key]
            if isinstance(value, str):
                out += value.encode()
                continue
            # In slices: copying megabytes at once would take longer than a step may.
            out += value[:SLICE]
            for start in range(SLICE, len(value), SLICE):
                yield
                out += value[start : start + SLICE]
        out += b"{}" if separator == b"{" else b"}"
