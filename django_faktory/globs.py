"""Globs as Redis has them, over whole texts: `*`, `?`, `[abc]`, `[^a]`, `[a-z]` and `\\x`. Case counts.

Pure. Between two stars everything has a fixed width, so the leftmost place is the right one and nothing is tried twice:
a match takes at most length of text times width of a segment. A long text is searched in windows, so that a search
keeps the interpreter from other threads for milliseconds only. Source: Redis' SCAN pattern.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ANY, _NONE = ".", "(?!)."

COMPARED_AT_ONCE = 1_000_000
"""Characters of a pattern times places in a text that one call of the interpreter's own search may compare."""


class Glob:
    """A pattern, read once; `matches` asks for the whole text, so a part needs a star at both ends."""

    def __init__(self, pattern: str) -> None:
        self._segments = [_Segment.of(elements) for elements in _segments(pattern)]
        self.literals = [literal for segment in self._segments for literal in segment.literals]
        """Texts without wildcards, each of which is somewhere in whatever matches."""
        self.stars = len(self._segments) - 1
        self.widest = max((segment.width for segment in self._segments if segment.literal is None), default=0)
        """Characters of the longest part between two stars that has other wildcards."""

    def matches(self, text: str) -> bool:
        """Whether the pattern describes `text` from its first character to its last."""
        first, last = self._segments[0], self._segments[-1]
        if len(self._segments) == 1:
            return len(text) == first.width and first.is_at(text, 0)
        at, end = first.width, len(text) - last.width
        if end < at or not first.is_at(text, 0) or not last.is_at(text, end):
            return False
        for segment in self._segments[1:-1]:
            found = segment.find(text, at, end)
            if found < 0:
                return False
            at = found + segment.width
        return True


class _Element(NamedTuple):
    """What one character of the text may be: a literal one, or what the expression says."""

    literal: str
    expression: str


class _Segment(NamedTuple):
    """What stands between two stars: it always takes `width` characters."""

    width: int
    literal: str | None
    expression: re.Pattern[str]
    literals: list[str]

    @classmethod
    def of(cls, elements: list[_Element]) -> _Segment:
        text = "".join(element.literal or "\x00" for element in elements)
        is_literal = all(element.literal for element in elements)
        runs = "".join(element.literal or "\ufffe" for element in elements).split("\ufffe")
        return cls(
            width=len(elements),
            literal=text if is_literal else None,
            expression=re.compile("".join(element.expression for element in elements), re.DOTALL),
            literals=[run for run in runs if run],
        )

    def is_at(self, text: str, at: int) -> bool:
        if self.literal is not None:
            return text.startswith(self.literal, at)
        return self.expression.match(text, at) is not None

    def find(self, text: str, at: int, end: int) -> int:
        """The first place from `at` on where it fits before `end`; -1 where it does not."""
        places = max(1, COMPARED_AT_ONCE // max(1, self.width))
        for start in range(at, end - self.width + 1, places):
            if (found := self._find_in(text, start, min(start + places + self.width - 1, end))) >= 0:
                return found
        return -1

    def _find_in(self, text: str, at: int, end: int) -> int:
        if self.literal is not None:
            return text.find(self.literal, at, end)
        found = self.expression.search(text, at, end)
        return found.start() if found else -1


def _segments(pattern: str) -> list[list[_Element]]:
    segments: list[list[_Element]] = [[]]
    at = 0
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if char == "*":
            segments.append([])
        elif char == "?":
            segments[-1].append(_Element("", _ANY))
        elif char == "[":
            element, at = _character_class(pattern, at)
            segments[-1].append(element)
        else:
            if char == "\\" and at < len(pattern):
                char, at = pattern[at], at + 1
            segments[-1].append(_Element(char, re.escape(char)))
    return segments


def _character_class(pattern: str, at: int) -> tuple[_Element, int]:
    """Read what follows `[`, up to `]` or, as Redis does, the pattern's end."""
    negated = pattern[at : at + 1] == "^"
    at += negated
    spans: list[str] = []
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "\\" and at + 1 < len(pattern):
            low = high = pattern[at + 1]
            at += 2
        elif pattern[at + 1 : at + 2] == "-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            at += 3
        else:
            low = high = pattern[at]
            at += 1
        spans.append(f"{re.escape(low)}-{re.escape(high)}")
    if not spans:
        return _Element("", _ANY if negated else _NONE), at + 1
    return _Element("", f"[{'^' if negated else ''}{''.join(spans)}]"), at + 1
