"""Conditions on the long texts of jobs, which no index serves: arguments, JSON as it was sent, messages of failures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import Any

from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Length, Replace, Right, StrIndex, Substr

from ..core.payloads import is_storable
from ..core.queries import Query

_Equals: Callable[[Any, Any], Any] = models.lookups.Exact


def text_conditions(query: Query) -> Iterable[Q]:
    """Return the conditions of a query that search texts."""
    if query.args is not None:
        yield has_args(query.args)
    yield from map(has_text, query.texts)
    yield from map(has_message, query.messages)
    yield from map(has_word, query.words)


def has_text(text: str) -> Q:
    """Match a text as it was sent, or as JSON may spell it."""
    return reduce(or_, map(_has_verbatim, sorted({text, *_spellings(text)})))


def _has_verbatim(text: str) -> Q:
    """Match a text exactly.

    LIKE is fast but ignores case on SQLite; the position of the text is compared there exactly.
    """
    return Q(payload__contains=text) & _is_in("payload", text)


def has_word(word: str) -> Q:
    """Match a text in the job's JSON without its jid and time, where any number may occur, or in its latest failure."""
    # The time is the last member, which takes at most 43 characters, unless the client of another language sends it.
    at = StrIndex(Right("payload", 43), Value('"created_at":"'))
    without_time = Case(
        When(models.lookups.GreaterThan(at, 0), then=Substr("payload", 1, Length("payload") - 44 + at)),
        default=F("payload"),
        output_field=models.TextField(),
    )
    jid: Any = F("jid")  # django-stubs admits values only
    content = Replace(without_time, jid, Value(""))
    # `contains` first: it is fast, and few jobs have the text.
    in_payload = (Q(payload__contains=text) & _is_in(content, text) for text in sorted({word, *_spellings(word)}))
    return reduce(or_, in_payload, has_message(word))


def _is_in(column: Any, text: str) -> Q:
    return Q(models.lookups.GreaterThan(StrIndex(column, Value(text)), 0))


# Regular expressions that lead from the key to a character of its text. Lazy: the search ends at the first match.
_ESCAPE = r"\\(?:u[0-9a-fA-F]{4}|[^u])"
_PLAIN = r'[^"\\]*'
_MESSAGE = rf'"message": ?"(?:{_PLAIN}{_ESCAPE})*?'
_LINES = rf'"backtrace": ?\["(?:{_PLAIN}(?:{_ESCAPE}|", ?"))*?'
_MAX_PATTERN = 4000
"""Characters of a text that a pattern contains. PostgreSQL and SQLite refuse patterns of 50,000 characters."""


def has_message(text: str) -> Q:
    """Match a text within the message or a line of the backtrace of the latest failure."""
    return reduce(or_, map(_has_spelling, sorted(_spellings(text))))


def _spellings(text: str) -> set[str]:
    """Return the text as the JSON encoders of several languages spell it."""
    verbatim, ascii_only = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    # The spelling of Go's encoder: failures that are imported from a Faktory server keep it.
    return {verbatim, ascii_only, verbatim.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})}


def _has_spelling(text: str) -> Q:
    beginning = text[:_MAX_PATTERN]
    # The fast conditions first. The second skips the members before the message, whose names are in every failure.
    key = '"message":'
    values = Substr("failure", StrIndex("failure", Value(key)) + len(key))
    pattern = f"(?:{_MESSAGE}|{_LINES}){_PLAIN}{re.escape(beginning)}"
    return Q(failure__contains=beginning) & _is_in(values, text) & Q(failure__regex=pattern)


def has_args(args: str) -> Q:
    """Match the `args` member in the spellings of common JSON libraries: with or without spaces, escaped or not.

    Leaves out jobs with further members of that name, in a keyword argument for example: a text cannot show which of
    them has the arguments, and the jobs may be killed.
    """
    value, key = json.loads(args), '"args":'
    key_chars = Length("payload") - Length(Replace("payload", Value(key), Value("")))
    has_no_other_key = Q(_Equals(key_chars, len(key) * (1 + json.dumps(value, separators=(",", ":")).count(key))))
    spellings = {
        f'"args"{colon}{json.dumps(value, separators=marks, ensure_ascii=is_ascii)}'
        for marks, colon in (((",", ":"), ":"), ((", ", ": "), ": "))
        for is_ascii in (True, False)
    } | {f'"args":{args}'}
    # A lone surrogate can only be stored as an escape.
    return reduce(or_, map(_has_verbatim, sorted(filter(is_storable, spellings)))) & has_no_other_key
