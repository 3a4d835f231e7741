"""Globs with the syntax of Redis. Rule: W23."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.globs import Glob

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("", "", True),
        ("*", "", True),
        ("*", "anything\nat all", True),
        ("abc", "abc", True),
        ("abc", "ABC", False),
        ("?", "é", True),
        ("[c-a]", "b", True),
        ("[a-]", "^", True),  # as Redis parses it: the range from a to ]
        ("[-a]", "-", True),
        ("[]", "", False),
        ("[]", "]", False),
        ("[^]", "x", True),
        (r"[\]]", "]", True),
        (r"[\^a]", "^", True),
        ("[[]", "[", True),
        ("[abc", "b", True),
        ("[&&~~||--]", "&", True),
        (r"\*", "*", True),
        (r"\[a]", "[a]", True),
        ("\\", "\\", True),
        (".", "x", False),
        ("a+", "aa", False),
        ("(a|b)", "a", False),
        ('*"jobtype":"report"*', '{"jid":"j","jobtype":"report","args":[]}', True),
    ],
)
def test_a_pattern_matches_whole_texts_as_redis_does(pattern, text, is_match):
    assert Glob(pattern).matches(text) is is_match


@given(st.text("ab*?[]^-\\", max_size=12), st.text("ab]^-*", max_size=12))
def test_matching_agrees_with_a_brute_force_matcher(pattern, text):
    assert Glob(pattern).matches(text) is _tried(pattern, text)


@given(st.text("ab*?[]^-\\", max_size=12), st.text("ab]^-*", max_size=12))
def test_every_matching_text_contains_all_literals_of_the_pattern(pattern, text):
    glob = Glob(pattern)
    if glob.matches(text):
        assert all(literal in text for literal in glob.literals)


def test_any_escaped_character_can_be_a_class_member():
    for char in map(chr, range(1, 256)):
        escaped = f"\\{char}"
        assert Glob(f"[{escaped}]").matches(char)
        assert not Glob(f"[^{escaped}]").matches(char)


def test_patterns_designed_for_backtracking_match_in_bounded_time():
    """A regular expression of this shape would take exponential time."""
    text = "a" * 20_000
    began = time.monotonic()
    assert not Glob("*a" * 100 + "*b").matches(text)
    assert not Glob("*[ab]?a" * 30 + "b*").matches(text)
    assert time.monotonic() - began < 5


def _tried(pattern, text):
    """Match by plain recursion: one element at a time, and every possible length for a star."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(_tried(pattern[1:], text[at:]) for at in range(len(text) + 1))
    if not text:
        return False
    if pattern[0] == "?":
        return _tried(pattern[1:], text[1:])
    if pattern[0] == "[":
        inside = re.match(r"\[(\^?)((?:\\.|[^\]\\]-.|[^\]\\]|\\(?=\Z))*)\]?", pattern, re.DOTALL)
        members = set()
        for low, high, escaped, single in re.findall(r"([^\\])-(.)|\\(.)|(.)", inside[2], re.DOTALL):
            first, last = sorted((low, high)) if low else (escaped or single,) * 2
            members |= {chr(code) for code in range(ord(first), ord(last) + 1)}
        return (text[0] in members) is not bool(inside[1]) and _tried(pattern[inside.end() :], text[1:])
    if pattern[0] == "\\" and len(pattern) > 1:
        return text[0] == pattern[1] and _tried(pattern[2:], text[1:])
    return text[0] == pattern[0] and _tried(pattern[1:], text[1:])


@pytest.mark.parametrize("at_once", [1, 3, 7])
@given(
    st.text("ab*?[]", max_size=8).map("*{}*".format),
    st.text("ab", max_size=30),
)
def test_searching_in_windows_gives_the_same_match_as_on_the_whole_text(at_once, pattern, text):
    assert Glob(pattern, compared_at_once=at_once).matches(text) is Glob(pattern).matches(text)


def test_a_wide_segment_costs_no_more_than_a_narrow_one():
    """A pattern of 100 classes kept a core busy for 7 to 26 s for a job of 15 MiB."""
    text = "a" * 1_000_000

    def cost_s(width):
        began = time.thread_time()
        assert not Glob("*" + "[a-z]" * (width - 1) + "[b]*").matches(text)
        return time.thread_time() - began

    assert min(cost_s(100) for _ in range(3)) < 4 * min(cost_s(10) for _ in range(3))


def test_characters_of_many_kinds_match_as_in_a_short_text():
    text = "".join(map(chr, range(0x20, 0xD800))) + "\U0010ffff" * 20_000
    for pattern in ("*[α-ω]ϊ[!ό]*", "*[^\U0010ffff]?\U0010ffff*", "*[\U0010ffff]" + "?" * 90 + "[a]*"):
        assert Glob(pattern).matches(text) is Glob(pattern, compared_at_once=10**9).matches(text), pattern


@pytest.mark.parametrize("middle", [499, 49])
def test_a_long_literal_costs_as_little_as_a_short_one(middle):
    literal = "a" * middle + "b" + "a" * middle
    began = time.thread_time()
    assert not Glob(f"*{literal}*").matches("a" * 15_000_000)
    assert time.thread_time() - began < 1
