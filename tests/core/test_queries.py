"""The query language as text: how it is parsed, how it is written back, and which one-line errors it raises."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.lifecycle import State
from django_faktory.core.queries import KEYS, MAX_TEXT, MAX_VALUES, Pattern, Query, parse_query, parse_seconds
from django_faktory.errors import InvalidQuery

pytestmark = pytest.mark.core

printable = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), min_size=1, max_size=20)
patterns = st.lists(
    st.builds(Pattern, printable) | st.builds(Pattern, st.from_regex(r"[a-z.]{0,9}", fullmatch=True), st.just(True)),
    max_size=3,
    unique=True,
).map(tuple)
names = st.lists(printable, max_size=3, unique=True).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)
)
ages = (
    st.none()
    | st.integers(0, 10**8)
    | st.integers(0, 10**10).map(lambda s: datetime.fromtimestamp(s, UTC))
    | st.integers(0, 10**10).map(lambda s: datetime.fromtimestamp(s, UTC).replace(tzinfo=None))
)
queries = st.builds(
    Query,
    states=st.lists(st.sampled_from(State), max_size=3, unique=True).map(tuple),
    queues=patterns,
    tasks=patterns,
    errors=patterns,
    about=st.lists(printable.map(lambda key: f"shop.order/{key}"), max_size=2, unique=True).map(tuple),
    batches=names,
    jids=names,
    older=ages,
    newer=ages,
    failed_before=ages,
    failed_after=ages,
    texts=names,
    messages=names,
    words=names,
    among=st.integers(1, 10**7),
)


def test_every_query_key_is_parsed():
    query = parse_query(
        "state:dead,retries queue:mail task:shop.* error:Timeout about:shop.order/42 batch:b-1 jid:12345678 older:2d "
        "newer:1w2h failed_before:2026-11-28 failed_after:2026-11-27T14:30:00Z "
        'args:[42, "x y"] text:"a b",c message:declined word:4711 among:500'
    )
    assert query == Query(
        states=(State.DEAD, State.RETRIES),
        queues=(Pattern("mail"),),
        tasks=(Pattern("shop.", is_prefix=True),),
        errors=(Pattern("Timeout"),),
        about=("shop.order/42",),
        batches=("b-1",),
        jids=("12345678",),
        older=2 * 86_400,
        newer=7 * 86_400 + 7200,
        failed_before=datetime.fromisoformat("2026-11-28"),
        failed_after=datetime(2026, 11, 27, 14, 30, tzinfo=UTC),
        args='[42,"x y"]',
        texts=("a b", "c"),
        messages=("declined",),
        words=("4711",),
        among=500,
    )
    assert all(f"{key}:" in str(query) for key in KEYS)


@given(queries)
def test_a_query_written_as_text_parses_to_the_same_query(query):
    assert parse_query(str(query)) == query


@given(st.lists(json_values, max_size=4))
def test_an_args_filter_written_as_text_parses_to_the_same_query(args):
    query = Query(args=parse_query(f"args:{json.dumps(args)}").args)
    assert parse_query(str(query)) == query


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_text_means_every_job(text):
    assert parse_query(text) == Query()
    assert parse_query(text).is_empty


def test_a_word_without_a_key_is_a_state_or_a_jid():
    assert parse_query("dead 0199a5b2c3d4") == Query(states=(State.DEAD,), jids=("0199a5b2c3d4",))


def test_values_of_a_repeated_key_are_alternatives():
    assert parse_query("state:dead state:retries,dead").states == (State.DEAD, State.RETRIES)


def test_a_quoted_star_is_matched_literally():
    assert parse_query('task:"a*"').tasks == (Pattern("a*"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stat:dead", "no such key: stat (did you mean state?); known: state, queue,"),
        ("colour:dead", "no such key: colour; known: state, queue,"),
        ("state:ded", f"state: expected one of {', '.join(State)}, got ded (did you mean dead?)"),
        ("ded", "expected key:value, a state or a jid, got ded (did you mean dead?); keys: state,"),
        ("state:deed", "state: expected one of scheduled,"),
        ("state:", "state: expected a value, got nothing"),
        ("state:dead,", "state: expected a value, got nothing"),
        ("foo", "expected key:value, a state or a jid, got foo; keys: state,"),
        ('"card is declined"', "expected key:value, a state or a jid, got card is declined; keys: state,"),
        ("dead 4711", "expected key:value, a state or a jid, got 4711; keys: state,"),
        ("a " * 30, "word: expected at most 20 values"),
        ('queue:"mail', 'queue: expected a value, got "mail'),
        ('queue:"mail"x', "expected a space before x"),
        ('queue:"\\x"', "queue: expected a string in double quotes"),
        ('queue:""', "queue: expected printable characters, got nothing"),
        ('queue:"\\u0000"', "queue: expected printable characters, got \\x00"),
        ("queue:a\x1b[31m", "queue: expected printable characters, got a\\x1b[31m"),
        ('text:"\\ud800"', "text: expected printable characters, got \\ud800"),
        ("task:*.mail", "task: expected a star at the end only, got *.mail"),
        ("about:order/42", "about: expected app.model/pk, such as shop.order/42, got order/42"),
        ("older:2", "older: expected a duration such as"),
        ("older:1d older:2d", "older: expected it once"),
        ("newer:soon", "newer: expected a duration such as"),
        ("failed_after:2026-02-30", "failed_after: expected a duration such as"),
        ("failed_after:2026-W48-5", "failed_after: expected a duration such as"),
        ("failed_before:0001-01-01", "failed_before: expected a duration such as"),
        ("args:42", "args: expected, once, a JSON array"),
        ("args:[", "args: expected, once, a JSON array"),
        ("args:[1] args:[2]", "args: expected, once, a JSON array"),
        ("args:" + "[" * 2000, "args: expected, once, a JSON array"),
        ("among:0", "among: expected a number of jobs from 1"),
        ("among:99999999", "among: expected a number of jobs from 1"),
        ("x" * (MAX_TEXT + 1), f"expected a query of at most {MAX_TEXT} characters"),
        ("queue:" + ",".join(["q"] * (MAX_VALUES + 1)), f"queue: expected at most {MAX_VALUES} values"),
    ],
)
def test_an_invalid_query_is_refused_with_a_one_line_error(text, message):
    with pytest.raises(InvalidQuery) as refused:
        parse_query(text)
    assert str(refused.value).startswith(message)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_with_invalid_query(text):
    try:
        query = parse_query(text)
    except InvalidQuery as error:
        printed = str(error)
    else:
        printed = str(query)
        assert parse_query(printed) == query
    assert printed == "" or printed.isprintable()


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("0s", 0), ("1w1d", 691_200)])
def test_the_parts_of_a_duration_are_added_up(text, seconds):
    assert parse_seconds(text) == seconds


def test_durations_are_capped_at_a_century():
    assert parse_seconds("999999999w") == 100 * 365 * 86_400


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("nonsense:1", 0),
        ("dead  nonsense:1", 6),
        ("dead queue:", 11),
        ('queue:"a" state:gone', 10),
        ('queue:a,b,"\\u0007"', 10),
        ("older:1d older:2d", 9),
        ('queue:"a"b', 9),
        ("dead args:{}", 10),
        ("x" * 4001, 4000),
    ],
)
def test_a_query_error_reports_its_position(text, at):
    with pytest.raises(InvalidQuery) as caught:
        parse_query(text)
    assert caught.value.at == at
