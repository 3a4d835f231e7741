"""Any bytes in any pieces, sent to the server side: only protocol errors, one valid reply per line, bounded memory."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_faktory.core.protocol.commands import VERBS
from tests.core.protocol.hostile import HELLO, check
from tests.examples import examples

pytestmark = pytest.mark.core

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = """jid jobtype args queue priority retry at created_at custom reserve_for wid labels v pwdhash hostname pid
errtype message backtrace current_state rss_kb cmd target filter jids regexp percent desc reserve_until
unique_for unique_until expires_in expires_at track lock failure"""
VALUES = ["12345678", "default", "clear", "retries", "2026-05-01T12:00:00Z", "*", "quiet", 1, 0, -1, 9, 86_400, 1e300]
some_object = st.dictionaries(st.sampled_from(KEYS.split()), st.sampled_from(VALUES) | anything, max_size=6)
job = st.fixed_dictionaries(
    {"jid": st.just("12345678"), "jobtype": st.just("t"), "args": st.lists(anything, max_size=3)},
    optional={"custom": some_object | anything, "retry": anything, "at": anything, "queue": st.sampled_from(VALUES)},
)
text = (some_object | job | st.lists(job | anything, max_size=3) | anything).map(
    lambda value: json.dumps(value, separators=(",", ":"))
)
words = st.sampled_from(["PAUSE *", "resume a", "REMOVE a b", "LATENCY a", "SET {}", "GET 12345678", "set", "", "a b"])
command = st.builds("{} {}".format, st.sampled_from([*VERBS, "HELLO", "NO", ""]), text | words)
line = (command.map(lambda written: written.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)).flatmap(
    lambda raw: st.just(raw) | st.integers(0, len(raw)).map(lambda at: raw[:at] + b"\x00\xff" + raw[at:])
)
stream = st.lists(line, max_size=6).map(lambda lines: b"".join(one + b"\r\n" for one in lines))


@st.composite
def cut(draw, whole):
    """Draw a stream, cut into pieces at random positions."""
    data = draw(whole)
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(cut(stream), st.sampled_from(["", "secret"]))
def test_lines_of_an_unidentified_client_are_answered_or_close_the_connection(pieces, password):
    check(pieces, password=password)


@given(cut(stream), st.sampled_from([100, 16 * 1024 * 1024]))
@settings(max_examples=examples(300))
def test_each_line_of_a_client_is_answered_the_same_at_every_split(pieces, limit):
    found = check([HELLO, *pieces], limit=limit)
    assert repr(found) == repr(check([HELLO + b"".join(pieces)], limit=limit))


@given(cut(st.binary(max_size=300)), st.booleans())
def test_arbitrary_bytes_are_answered_or_close_the_connection(pieces, is_known):
    check([HELLO, *pieces] if is_known else pieces, limit=64)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x1b[2J\x1b]0;title\x07",
        b"NO\rSUCH\x00VERB",
        "NO\u2028SUCH\x85VERB".encode(),
        b"HELLO \x7f",
        b'PUSH {"jid":"\\r\\n+OK\\r\\n"}',
        b'PUSH {"a\\r\\n-ERR b":1,"a\\r\\n-ERR b":1}',
        b"ACK \r\r\r",
        b"QUEUE \x1b[31m",
        b"QUEUE PAUSE \x01",
        b'MUTATE {"cmd":"\\u001b[2J"}',
        b"TRACK \x1b",
        b'BEAT {"wid":"\\n"}',
    ],
)
def test_error_replies_contain_no_control_characters_of_the_client(hostile):
    [_, outcome] = check([HELLO + hostile + b"\r\n"])
    assert isinstance(outcome, tuple), "refused"
    assert outcome[0] == "refused"
