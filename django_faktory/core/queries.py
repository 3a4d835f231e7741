"""The query language for jobs, in one line of text, shared by Python, the admin, the API and the command line.

Example: `state:dead queue:mail task:shop.* error:Timeout about:shop.order/42 older:2d`. Pure: `parse_query` reads a
text into a `Query`, `str` writes it back; `models.job` applies it to rows. Grammar: docs/queries.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from ..errors import InvalidPayload, InvalidQuery, TranslatableError, translatable
from .json import jsontext
from .json.fields import abbreviate
from .lifecycle import FAILED, State
from .suggestions import find_closest

MAX_TEXT = 4000
"""Longest query, in characters."""
MAX_VALUES = 200
"""Most values of one key."""
MAX_WORDS = 20
"""Most words without a key."""
SEARCHED = 10_000
"""Jobs that a text search reads unless the query says otherwise: the newest that match the other conditions."""
MAX_SEARCHED = 10_000_000
"""Largest number that `among:` accepts."""

LATEST_FAILURE = ("-failed_at", "-id")
"""The order of lists of failed jobs: the latest failure first."""

_UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
# Nine digits at most for each unit, which bounds the work of int() on a client's text.
_duration = re.compile(r"(?:(\d{1,9})w)?(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")
_time = re.compile(r"(?:19[7-9]|2\d\d)\d-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d)?(?:Z|[+-]\d\d:\d\d)?)?", re.ASCII)
_key = re.compile(r"([a-z_]+):")
_bare_value = re.compile(r"[^\s,\"]+")
_next_space = re.compile(r"(?=\s)|$")
_plain = re.compile(r"[^\s,\"*]+")
_quoted = re.compile(r'"(?:[^"\\]|\\.)*"')
_jid = re.compile(r"[A-Za-z0-9_.-]{8,255}")
# Names of apps and models contain no `/`: the first one begins the primary key, which may contain more.
_label = re.compile(r"[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*/.+", re.DOTALL)
_BARE = "bare"
_decoder = json.JSONDecoder()
_states_known = frozenset(map(str, State))
_AGES = ("older", "newer", "failed_before", "failed_after")

Age = int | datetime
"""How long ago, in seconds, or a time; a time without an offset is in the time zone of the project."""


class Pattern(msgspec.Struct, frozen=True, gc=False):
    """A name, or the prefix of one."""

    text: str
    is_prefix: bool = False


class Query(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Conditions that a job must all meet; one matching value per key is enough. Empty: every job."""

    states: tuple[State, ...] = ()
    queues: tuple[Pattern, ...] = ()
    tasks: tuple[Pattern, ...] = ()
    errors: tuple[Pattern, ...] = ()
    """Types of the latest failure: full (`requests.exceptions.Timeout`), last part (`Timeout`), or a prefix."""
    about: tuple[str, ...] = ()
    """Objects, as `app.model/pk`."""
    batches: tuple[str, ...] = ()
    jids: tuple[str, ...] = ()
    older: Age | None = None
    """Pushed before this; `newer` is the opposite."""
    newer: Age | None = None
    failed_before: Age | None = None
    """With a latest failure before this; `failed_after` is the opposite."""
    failed_after: Age | None = None
    args: str | None = None
    """JSON of all positional arguments."""
    texts: tuple[str, ...] = ()
    """Texts that the job's JSON, as it was sent, must all contain."""
    messages: tuple[str, ...] = ()
    """Texts that the message or the traceback of the latest failure must all contain."""
    words: tuple[str, ...] = ()
    """Texts that the job's JSON, without its jid, or the message or the traceback must contain, each in any of them."""
    among: int = SEARCHED
    """Number of jobs that the `args`, `texts`, `messages` and `words` conditions search."""

    def __str__(self) -> str:
        """Return the canonical text of this query; `parse_query` reads it back."""
        terms = [
            _format_values("state", [_quote_if_needed(str(state)) for state in self.states]),
            _format_values("queue", map(_format_pattern, self.queues)),
            _format_values("task", map(_format_pattern, self.tasks)),
            _format_values("error", map(_format_pattern, self.errors)),
            _format_values("about", map(_quote_if_needed, self.about)),
            _format_values("batch", map(_quote_if_needed, self.batches)),
            _format_values("jid", map(_quote_if_needed, self.jids)),
            *(_format_values(key, map(_format_age, filter(_is_given, [getattr(self, key)]))) for key in _AGES),
            _format_values("args", [] if self.args is None else [self.args]),
            *(_format_values("text", [_quote_if_needed(text)]) for text in self.texts),
            *(_format_values("message", [_quote_if_needed(text)]) for text in self.messages),
            *(_format_values("word", [_quote_if_needed(text)]) for text in self.words),
            _format_values("among", [] if self.among == SEARCHED else [str(self.among)]),
        ]
        return " ".join(filter(None, terms))

    @property
    def is_empty(self) -> bool:
        """True if there is no condition, so that the query matches every job."""
        return self == Query(among=self.among)

    @property
    def in_states(self) -> tuple[State, ...]:
        """The states of its jobs; a time of failure alone selects failed jobs, which have one."""
        has_time = self.failed_before is not None or self.failed_after is not None
        return self.states or (FAILED if has_time else ())

    @property
    def order(self) -> tuple[str, ...]:
        """The order of a list, the latest first: by failure if all its jobs have failed, else by push."""
        is_of_failed = self.in_states and set(self.in_states) <= set(FAILED)
        return LATEST_FAILURE if is_of_failed else ("-id",)

    @property
    def searches(self) -> bool:
        """True if the query searches the texts of jobs."""
        return self.searches_arguments or bool(self.messages)

    @property
    def searches_arguments(self) -> bool:
        """True if the query searches the arguments of jobs."""
        return self.args is not None or bool(self.texts or self.words)

    @property
    def has_index(self) -> bool:
        """True if an index leads to few rows, or to the rows that are shown first anyway: see docs/queries.md."""
        # Conditions that filter row by row once the state has been found by its index.
        ages = [getattr(self, key) for key in _AGES]
        filters = self.queues or self.tasks or self.errors or any(map(_is_given, ages))
        # Succeeded rows can be millions: without another filter a page reads the newest ones only, with one it scans
        # them all.
        is_short = bool(self.in_states) and State.SUCCEEDED not in self.in_states
        return is_short or not filters or bool(self.about or self.batches or self.jids)


def parse_query(text: str) -> Query:
    """Parse a query. Raises InvalidQuery with one line that names the position and what was expected."""
    query, words = parse_words(text)
    for word, at in words:
        # Texts are for searches only: a verb must not change jobs that contain a jid that is misspelled or gone.
        if not _jid.fullmatch(word):
            problem = InvalidQuery(
                "expected key:value, a state or a jid, got %(word)s; keys: %(known)s",
                word=_with_suggestion(word, _states_known),
                known=", ".join(_READERS),
            )
            raise _at(at, problem)
    jids = dict.fromkeys((*query.jids, *(word for word, _ in words)))
    return structs.replace(query, jids=tuple(jids))


def parse_words(text: str) -> tuple[Query, list[tuple[str, int]]]:
    """Parse a query; also return its words without a key that are no states, each with its position.

    Raises InvalidQuery.
    """
    if len(text) > MAX_TEXT:
        problem = InvalidQuery(
            "expected a query of at most %(most)s characters, got %(count)s", most=MAX_TEXT, count=len(text)
        )
        raise _at(MAX_TEXT, problem)
    conditions: dict[str, Any] = {}
    at = _skip_spaces(text, 0)
    while at < len(text):
        start = at
        try:
            at = _read_term(text, at, conditions)
        except InvalidQuery as error:
            # A reader that knows no exact position leaves it None: the term as a whole is wrong.
            error.at = start if error.at is None else error.at
            raise
        if at < len(text) and not text[at].isspace():
            problem = InvalidQuery(
                "expected a space before %(text)s; put values with spaces or commas in quotes",
                text=abbreviate(text[at:]),
            )
            raise _at(at, problem)
        at = _skip_spaces(text, at)
    words = conditions.pop(_BARE, [])
    return Query(**conditions), words


def split_about(label: str) -> tuple[str, str]:
    """Return the model and the key of an object's name. Raises InvalidQuery if it is not one."""
    if not is_about(label):
        raise InvalidQuery(
            "about: expected app.model/pk, such as shop.order/42, got %(value)s", value=abbreviate(label)
        )
    model, _, key = label.partition("/")
    return model, key


def is_about(label: str) -> bool:
    """Return True if this names an object, as `app.model/pk`."""
    # 255 is the length of the column `about`.
    return len(label) <= 255 and label.isprintable() and _label.fullmatch(label) is not None


# Parsing


def _at(position: int, error: InvalidQuery) -> InvalidQuery:
    error.at = position
    return error


def _read_term(text: str, at: int, conditions: dict[str, Any]) -> int:
    """Read a key with its values, or a bare word; return the position after it.

    An error raised without a position concerns the whole term.
    """
    key = _key.match(text, at)
    if key is None:
        return _read_word(text, at, conditions)
    reader = _READERS.get(key[1])
    if reader is None:
        raise InvalidQuery(
            "no such key: %(key)s; known: %(known)s", key=_with_suggestion(key[1], _READERS), known=", ".join(_READERS)
        )
    return reader(text, key.end(), conditions)


def _with_suggestion(name: str, known: Iterable[str]) -> str | TranslatableError:
    """Return a name for a message, with the known name that it resembles."""
    closest = find_closest(name, known)
    if closest is None:
        return abbreviate(name)
    return TranslatableError(
        translatable("%(name)s (did you mean %(closest)s?)"), name=abbreviate(name), closest=closest
    )


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _read_word(text: str, at: int, conditions: dict[str, Any]) -> int:
    """Read a state, another word without a key, or a text in quotes."""
    if quoted := _quoted.match(text, at):
        word, end = _unquote(quoted[0], "word"), quoted.end()
    else:
        end = _next_space.search(text, at).end()  # type: ignore[union-attr]  # the end of the text matches
        word = text[at:end]
        # Some names of states, such as "enqueued", are well-formed jids too.
        if word in _states_known:
            _add_values(conditions, "states", [State(word)])
            return end
    if not word or not word.isprintable():
        raise InvalidQuery(
            "%(key)s: expected printable characters, got %(value)s", key="word", value=abbreviate(word) or "nothing"
        )
    words = conditions.setdefault(_BARE, [])
    words.append((word, at))
    if len(words) > MAX_WORDS:
        raise InvalidQuery("%(key)s: expected at most %(most)s values", key="word", most=MAX_WORDS)
    return end


def _read_values(text: str, at: int, key: str) -> tuple[list[tuple[str, bool]], int]:
    """Read values separated by commas, each with whether it was quoted."""
    values: list[tuple[str, bool]] = []
    while True:
        start = at
        if quoted := _quoted.match(text, at):
            value, at = _unquote(quoted[0], key), quoted.end()
        elif bare := _bare_value.match(text, at):
            value, at = bare[0], bare.end()
        else:
            problem = InvalidQuery(
                "%(key)s: expected a value, got %(value)s", key=key, value=abbreviate(text[at : at + 40]) or "nothing"
            )
            raise _at(at, problem)
        if not value or not value.isprintable():
            problem = InvalidQuery(
                "%(key)s: expected printable characters, got %(value)s", key=key, value=abbreviate(value) or "nothing"
            )
            raise _at(start, problem)
        values.append((value, quoted is not None))
        if len(values) > MAX_VALUES:
            raise InvalidQuery("%(key)s: expected at most %(most)s values", key=key, most=MAX_VALUES)
        if text[at : at + 1] != ",":
            return values, at
        at += 1


def _unquote(text: str, key: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise InvalidQuery(
            "%(key)s: expected a string in double quotes, as JSON has them, got %(value)s",
            key=key,
            value=abbreviate(text),
        ) from None


def _add_values(conditions: dict[str, Any], field: str, values: list[Any]) -> None:
    # A key may occur several times; dict.fromkeys removes duplicates and keeps the order.
    conditions[field] = tuple(dict.fromkeys((*conditions.get(field, ()), *values)))


Reader = Callable[[str, int, dict[str, Any]], int]


def _names_reader(key: str, field: str) -> Reader:
    def read(text: str, at: int, conditions: dict[str, Any]) -> int:
        values, at = _read_values(text, at, key)
        _add_values(conditions, field, [value for value, _ in values])
        return at

    return read


def _patterns_reader(key: str, field: str) -> Reader:
    def read(text: str, at: int, conditions: dict[str, Any]) -> int:
        values, at = _read_values(text, at, key)
        # In quotes a star is a plain character; quoting is the way to match a name that contains one.
        _add_values(
            conditions, field, [Pattern(value) if is_quoted else pattern(value, key) for value, is_quoted in values]
        )
        return at

    return read


def pattern(value: str, key: str) -> Pattern:
    """Return the pattern for a name, or for a prefix that ends in a star. Raises InvalidQuery for a star elsewhere."""
    name = value.removesuffix("*")
    if "*" in name:
        raise InvalidQuery("%(key)s: expected a star at the end only, got %(value)s", key=key, value=abbreviate(value))
    return Pattern(name, is_prefix=name != value)


def _read_states(text: str, at: int, conditions: dict[str, Any]) -> int:
    values, at = _read_values(text, at, "state")
    for value, _ in values:
        if value not in _states_known:
            raise InvalidQuery(
                "state: expected one of %(known)s, got %(value)s",
                known=", ".join(State),
                value=_with_suggestion(value, _states_known),
            )
    _add_values(conditions, "states", [State(value) for value, _ in values])
    return at


def _read_objects(text: str, at: int, conditions: dict[str, Any]) -> int:
    values, at = _read_values(text, at, "about")
    for value, _ in values:
        split_about(value)
    _add_values(conditions, "about", [value for value, _ in values])
    return at


def _single_reader(key: str, field: str, convert: Callable[[str], Any]) -> Reader:
    def read(text: str, at: int, conditions: dict[str, Any]) -> int:
        values, at = _read_values(text, at, key)
        if field in conditions or len(values) > 1:
            raise InvalidQuery("%(key)s: expected it once, with one value", key=key)
        conditions[field] = convert(values[0][0])
        return at

    return read


def parse_seconds(text: str, key: str = "older") -> int:
    """Return the seconds of a duration such as 90s, 15m, 2h, 1h30m, 7d or 2w. Raises InvalidQuery."""
    match = _duration.fullmatch(text)
    if not text or match is None:
        raise InvalidQuery(
            "%(key)s: expected a duration such as 90s, 15m, 1h30m, 2d or 1w, got %(value)s",
            key=key,
            value=abbreviate(text),
        )
    seconds = sum(int(part) * unit for part, unit in zip(match.groups(default="0"), _UNITS.values(), strict=True))
    # Capped at 100 years: larger intervals overflow the dates of databases.
    return min(seconds, 100 * 365 * 86_400)


def _parse_age(text: str, key: str) -> Age:
    """Return the seconds of a duration, or a time, which is naive without an offset. Raises InvalidQuery."""
    with suppress(InvalidQuery):
        return parse_seconds(text, key)
    # fromisoformat() also accepts other forms, such as week dates, and years that no database stores.
    if _time.fullmatch(text):
        with suppress(ValueError):
            return datetime.fromisoformat(text)
    raise InvalidQuery(
        "%(key)s: expected a duration such as 15m, 1h30m or 2d, or a time such as 2026-11-27 or 2026-11-27T14:30, got "
        "%(value)s",
        key=key,
        value=abbreviate(text),
    )


def _parse_count(text: str) -> int:
    if re.fullmatch(r"\d{1,8}", text, re.ASCII) and 0 < int(text) <= MAX_SEARCHED:
        return int(text)
    raise InvalidQuery(
        "among: expected a number of jobs from 1 to %(most)s, got %(value)s", most=MAX_SEARCHED, value=abbreviate(text)
    )


def _read_arguments(text: str, at: int, conditions: dict[str, Any]) -> int:
    try:
        # raw_decode finds the end of the array, which may contain spaces and commas.
        value, end = _decoder.raw_decode(text, at)
        jsontext.check_depth(text[at:end])
    except (ValueError, RecursionError, InvalidPayload):
        value, end = None, at
    # RecursionError comes from deeply nested input, which json parses recursively.
    if not isinstance(value, list) or "args" in conditions:
        problem = InvalidQuery(
            'args: expected, once, a JSON array with all arguments, such as args:[42,"x"], got %(value)s',
            value=abbreviate(text[at:]),
        )
        raise _at(at, problem)
    conditions["args"] = jsontext.encode(value)
    return end


_READERS: dict[str, Reader] = {
    "state": _read_states,
    "queue": _patterns_reader("queue", "queues"),
    "task": _patterns_reader("task", "tasks"),
    "error": _patterns_reader("error", "errors"),
    "about": _read_objects,
    "batch": _names_reader("batch", "batches"),
    "jid": _names_reader("jid", "jids"),
    **{key: _single_reader(key, key, partial(_parse_age, key=key)) for key in _AGES},
    "args": _read_arguments,
    "text": _names_reader("text", "texts"),
    "message": _names_reader("message", "messages"),
    "word": _names_reader("word", "words"),
    "among": _single_reader("among", "among", _parse_count),
}
KEYS = tuple(_READERS)


# Formatting


def _format_values(key: str, values: Any) -> str:
    joined = ",".join(values)
    return f"{key}:{joined}" if joined else ""


def _format_pattern(pattern: Pattern) -> str:
    return f"{pattern.text}*" if pattern.is_prefix else _quote_if_needed(pattern.text)


def _quote_if_needed(value: str) -> str:
    return value if _plain.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _is_given(value: object) -> bool:
    return value is not None


def _format_age(age: Age) -> str:
    return age.isoformat() if isinstance(age, datetime) else _format_duration(age)


def _format_duration(seconds: int) -> str:
    parts = []
    for unit, size in _UNITS.items():
        count, seconds = divmod(seconds, size)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"
