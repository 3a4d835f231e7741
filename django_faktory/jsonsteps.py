"""Long JSON in steps: what `jsontext` does in one go, so that who serves many can turn to the others in between.

Pure. A generator yields where a rest is due, every millisecond or so, and returns what it was asked for. Nothing that
grows with the number of values is built but the texts that are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import TypeVar

import msgspec

from . import jsontext
from .errors import InvalidPayload

T = TypeVar("T")
Steps = Generator[None, None, T]

SHORT = 16 * 1024
"""Characters of a text that is looked at in one go."""

TOKENS_A_STEP = 2000
MAX_LEVELS = 4
"""Levels of long values within each other that are looked at in steps when they are odd: each is read again."""

_SPACE = " \t\r\n"
_string = r'"(?:[^"\\]++|\\.){0,1000}+("?)'  # the group is empty where a long one has not ended yet
_outer = re.compile(rf'[^"\[\]{{}},]*+(?:{_string}|([\[\]{{}},]))', re.DOTALL)
_inner = re.compile(rf'[^"\[\]{{}}]*+(?:{_string}|([\[\]{{}}]))', re.DOTALL)
_rest_of_string = re.compile(r'(?:[^"\\]++|\\.){0,1000}+("?)', re.DOTALL)
_value = msgspec.json.Decoder(msgspec.Raw)


def run(steps: Steps[T]) -> T:
    """All steps, without a rest."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def check_depth(text: str) -> Steps[None]:
    """Raise InvalidPayload if `text` nests deeper than MAX_DEPTH; the outer object is level 1."""
    if len(text) <= SHORT:
        jsontext.check_depth(text)
        return
    if text.count("{") + text.count("[") <= jsontext.MAX_DEPTH:
        return
    depth = count = at = 0
    while at < len(text):
        for match in _inner.finditer(text, at):
            count += 1
            if not count % TOKENS_A_STEP:
                yield
            sign = match[2]
            if sign is None:
                if not match[1]:
                    at = yield from _string_end(text, match.end())
                    break
            elif sign in "[{":
                depth += 1
                if depth > jsontext.MAX_DEPTH:
                    raise jsontext.too_deep()
            else:
                depth -= 1
        else:
            return


def members(text: str, *, most: int, refuses_twice: bool = True) -> Steps[dict[str, str]]:
    """Key → verbatim JSON text of each member of the object in `text`; depth is not looked at.

    Raises InvalidPayload for what is not one JSON object, for a key twice unless the last one is to count, and for
    more than `most` members.
    """
    found: dict[str, str] = {}
    for part in cut(text, "{}"):
        if part is None:
            yield
            continue
        key, value = yield from _member(part)
        if refuses_twice and key in found:
            raise jsontext.given_twice(key)
        if len(found) == most and key not in found:
            raise InvalidPayload(f"invalid JSON: expected at most {most} members of an object; use fewer")
        found[key] = value
    return found


def check_value(text: str, levels: int = MAX_LEVELS) -> Steps[None]:
    """Raise InvalidPayload if `text` is not one JSON value; depth is not looked at."""
    text = text.strip(_SPACE)
    if len(text) > SHORT:
        yield
        try:
            _value.decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):  # wrong, or lone surrogates, which may be
            if levels and text[0] in "[{":
                yield from _check_parts(text, levels - 1)
                return
        else:
            return
    jsontext.check_value(text)


def _check_parts(text: str, levels: int) -> Steps[None]:
    for part in cut(text, "[]" if text[0] == "[" else "{}"):
        if part is None:
            yield
        elif text[0] == "[":
            yield from check_value(part, levels)
        else:
            yield from _member(part, levels)


def _member(part: str, levels: int = MAX_LEVELS) -> Steps[tuple[str, str]]:
    key, value = jsontext.split_member(part)
    yield from check_value(value, levels)
    return key, value


def cut(text: str, brackets: str) -> Iterator[str | None]:
    """The texts between the commas of the array or object that `text` is, none of them looked at; None: rest now.

    Where each of them is good JSON, `text` was. Raises InvalidPayload where the brackets do not fit.
    """
    begin = jsontext.after_space(text, 0)
    if text[begin : begin + 1] != brackets[0]:
        kind = "an array […]" if brackets == "[]" else "an object {…}"
        raise InvalidPayload(f"invalid JSON: expected {kind}")
    begin, count = begin + 1, 0
    for where in _limits(text, begin):
        if where is None:
            yield None
            continue
        part = text[begin:where]
        if text[where] == ",":
            yield part
        elif text[where] != brackets[1]:
            break
        else:
            if count or part.strip(_SPACE):
                yield part
            jsontext.expect_end(text, where + 1)
            return
        begin, count = where + 1, count + 1
    raise InvalidPayload(f"invalid JSON: expected ',' or '{brackets[1]}' at character {begin}")


def _limits(text: str, at: int) -> Iterator[int | None]:
    """Where the commas of this level are, and at last the bracket that ends it."""
    depth = count = 0
    while True:
        for match in (_inner if depth else _outer).finditer(text, at):
            count += 1
            if not count % TOKENS_A_STEP:
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
            if depth == (sign in "[{"):  # from here on commas count no more, or again
                at = match.end()
                break
        else:
            return


def _string_end(text: str, at: int) -> Steps[int]:
    """Behind the quote that ends a long string, or the end of the text where none does."""
    while match := _rest_of_string.match(text, at):
        if match[1]:
            return match.end()
        if match.end() == at:
            break
        at = match.end()
        yield
    return len(text)
