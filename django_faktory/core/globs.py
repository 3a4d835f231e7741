"""Match globs with the syntax of Redis: `*`, `?`, `[abc]`, `[^a]`, `[a-z]` and `\\x`. Case matters.

Pure. The parts between two stars have a fixed width, so the leftmost position is always right and there is no
backtracking. A short text is searched with `re`, whose cost is its length times the width of a segment. A long one is
searched bit-parallel (Baeza-Yates and Gonnet, 1992), at the same cost for any segment: 65 ns a character, a second for
15 MiB, and other threads get their turns. Literals are found with `str.find`, in windows that take milliseconds.
Source: the pattern of Redis SCAN.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

_ANY_CHARACTER, _NO_CHARACTER = ".", "(?!)."

MAX_CHARACTER = 0x10FFFF

COMPARED_AT_ONCE = 1_000_000
"""Maximum of positions that one call of `str.find` compares, and of comparisons of one call of `re`."""


class Glob:
    """A parsed pattern. `matches` compares the whole text; to find a part, put a star at both ends."""

    def __init__(self, pattern: str, *, compared_at_once: int = COMPARED_AT_ONCE) -> None:
        self._compared_at_once = compared_at_once
        self._segments = [_Segment(elements, pattern) for elements in _parse_segments(pattern)]
        self.literals = [literal for segment in self._segments for literal in segment.literals]
        """Texts without wildcards, each of which occurs in every matching text."""
        self.stars = len(self._segments) - 1
        self.widest = max((segment.width for segment in self._segments if segment.literal is None), default=0)
        """Width of the widest part between two stars that contains other wildcards."""

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches the whole of `text`."""
        first, last = self._segments[0], self._segments[-1]
        if len(self._segments) == 1:
            return len(text) == first.width and first.is_at(text, 0)
        # The ends are anchored: only the parts between stars have to be searched.
        at, end = first.width, len(text) - last.width
        if end < at or not first.is_at(text, 0) or not last.is_at(text, end):
            return False
        # The leftmost match leaves the most text for the remaining segments, so no other need be tried.
        for segment in self._segments[1:-1]:
            position = segment.find(text, at, end, self._compared_at_once)
            if position < 0:
                return False
            at = position + segment.width
        return True


class _Element(NamedTuple):
    """One character of a pattern: a literal one, or a regular expression for a single character."""

    literal: str
    expression: str


class _Segment:
    """The part of a pattern between two stars; it always matches `width` characters."""

    def __init__(self, elements: list[_Element], pattern: str) -> None:
        self._elements, self._pattern = elements, pattern
        self.width = len(elements)
        literals = [element.literal for element in elements]
        self.literal = "".join(literals) if all(literals) else None
        # U+FFFE stands for a wildcard. If the pattern contains it, its literals are shorter, which is correct too.
        runs = "".join(literal or "\ufffe" for literal in literals).split("\ufffe")
        self.literals = [run for run in runs if run]
        self._expression = re.compile("".join(element.expression for element in elements), re.DOTALL)

    def is_at(self, text: str, at: int) -> bool:
        if self.literal is not None:
            return text.startswith(self.literal, at)
        return self._expression.match(text, at) is not None

    def find(self, text: str, at: int, end: int, compared_at_once: int) -> int:
        """Return the first position from `at` on where the segment fits before `end`; -1 if there is none."""
        if self.literal is not None:
            return self._find_literal(self.literal, text, at, end, compared_at_once)
        if (end - at) * self.width > compared_at_once:
            return self._find_bits(text, at, end)
        match = self._expression.search(text, at, end)
        return match.start() if match else -1

    def _find_literal(self, literal: str, text: str, at: int, end: int, step: int) -> int:
        for start in range(at, end - self.width + 1, step):
            if (position := text.find(literal, start, min(start + step + self.width - 1, end))) >= 0:
                return position
        return -1

    def _find_bits(self, text: str, at: int, end: int) -> int:
        # Bit n of `found` is set if the first n + 1 elements match the characters up to this one.
        found, last = 0, 1 << (self.width - 1)
        for position, fitting in enumerate(map(self._fitting.__getitem__, text[at:end]), at):
            found = (found << 1 | 1) & fitting
            if found >= last:
                return position - self.width + 1
        return -1

    @cached_property
    def _fitting(self) -> _FittingElements:
        return _FittingElements(self._elements, self._pattern)


class _FittingElements(dict[str, int]):
    """For each character a number whose bit n is set if the character fits element n of a segment."""

    def __init__(self, elements: list[_Element], pattern: str) -> None:
        super().__init__()
        # All characters between two of these fit the same elements, so that no text is costly for its variety.
        self._starts = sorted({0}.union(*({ord(char), min(ord(char) + 1, MAX_CHARACTER)} for char in pattern)))
        expressions = [re.compile(element.expression, re.DOTALL) for element in elements]
        self._bits = [
            sum(1 << number for number, expression in enumerate(expressions) if expression.match(chr(start)))
            for start in self._starts
        ]

    def __missing__(self, char: str) -> int:
        bits = self[char] = self._bits[bisect_right(self._starts, ord(char)) - 1]
        return bits


def _parse_segments(pattern: str) -> list[list[_Element]]:
    segments: list[list[_Element]] = [[]]
    at = 0
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if char == "*":
            segments.append([])
        elif char == "?":
            segments[-1].append(_Element("", _ANY_CHARACTER))
        elif char == "[":
            element, at = _parse_character_class(pattern, at)
            segments[-1].append(element)
        else:
            if char == "\\" and at < len(pattern):
                char, at = pattern[at], at + 1
            segments[-1].append(_Element(char, re.escape(char)))
    return segments


def _parse_character_class(pattern: str, at: int) -> tuple[_Element, int]:
    """Parse a character class after `[`, up to `]` or, as in Redis, the end of the pattern."""
    is_negated = pattern[at : at + 1] == "^"
    at += is_negated
    spans: list[str] = []
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "\\" and at + 1 < len(pattern):
            low = high = pattern[at + 1]
            at += 2
        # A reversed range such as [z-a] is sorted, as in Redis; `re` would reject it.
        elif pattern[at + 1 : at + 2] == "-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            at += 3
        else:
            low = high = pattern[at]
            at += 1
        spans.append(f"{re.escape(low)}-{re.escape(high)}")
    # As in Redis: `[]` matches no character, and `[^]` any.
    if not spans:
        return _Element("", _ANY_CHARACTER if is_negated else _NO_CHARACTER), at + 1
    return _Element("", f"[{'^' if is_negated else ''}{''.join(spans)}]"), at + 1
