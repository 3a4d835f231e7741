"""A pushed job is read in one decode; other spellings of the same job give the same result. Rules: W7, W9, W11."""

import random

import msgspec
import pytest

from django_faktory.core.job_parser import parse_job
from django_faktory.core.protocol.commands import WHOLE_BYTES, AckJob, Fetch, Push, parse_whole
from django_faktory.errors import InvalidPayload
from tests.core.protocol import lines
from tests.examples import examples

pytestmark = pytest.mark.core


def columns_of(text):
    """Return the parsed job without its text, or None if it is refused."""
    try:
        return msgspec.structs.replace(parse_job(text), text="")
    except InvalidPayload:
        return None


def test_a_random_job_is_the_same_with_another_member_or_white_space_or_half_a_surrogate_pair():
    """Each of them is read in another way: only known keys are counted, and msgspec refuses half a pair."""
    source, accepted = random.Random(7), 0
    for number in range(examples(20_000)):
        line = lines.push(source, f"jid-{number:08}")
        if source.random() < 0.2:
            line = lines.mutated(source, line.encode()).decode("utf-8", "ignore")
        text = line.partition(" ")[2]
        expected = columns_of(text)
        accepted += expected is not None
        for more in ('"more":1,', '"more" :1,', '"more":"\\ud800",', f'"more":"{"x" * WHOLE_BYTES}",'):
            assert columns_of(text.replace("{", "{" + more, 1)) == expected, text
    assert accepted > examples(20_000) / 5, "most random jobs would be invalid"


@pytest.mark.parametrize(
    "members",
    [
        '"jid":"12345678","jid":"12345678","jobtype":"t","args":[]',
        '"jid" :"12345678","jid":"12345678","jobtype":"t","args":[]',
        '"jid" :"12345678","jid" :"12345678","jobtype":"t\\":","args":[]',
        '"jid":"12345678","\\u006aid":"12345678","jobtype":"t","args":[]',
        '"jid":"12345678","jobtype":"t","args":[1],"args":[1]',
        '"jid":"12345678","jobtype":"t","args":["\\":"],"args":[1]',
        '"jid":"12345678","jobtype":"t","args":[1],"custom":{"a":"\\":"},"custom":{}',
        '"jid":"12345678","jobtype":"t","args":[],"x":1,"x":1',
        '"jid":"12345678","jobtype":"t","args":[],"x":"\\ud800","x":1',
    ],
)
@pytest.mark.parametrize("size", [0, 5_000, 300_000])
def test_a_key_given_twice_is_refused_however_it_is_spelled(members, size):
    text = "{" + members.replace('"args":[', f'"args":["{"x" * size}",').replace(",]", "]") + "}"
    with pytest.raises(InvalidPayload, match=r"given twice|hex escape"):
        parse_job(text)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'PUSH {"jid":"12345678","jobtype":"t","args":[1],"queue":"q","retry":1}\r\n', Push),
        (b'PUSH {"jid": "12345678", "jobtype": "t", "args": [], "custom": {"track": 1}}\n', Push),
        (b"FETCH a b c\r\n", Fetch),
        (b'ACK {"jid":"12345678"}\r\n', AckJob),
    ],
)
def test_a_whole_line_of_a_frequent_verb_is_parsed_without_a_buffer(line, kind):
    assert isinstance(parse_whole(line), kind)


@pytest.mark.parametrize(
    "line",
    [
        b"FETCH a\r\nFETCH b\r\n",
        b"FETCH a",
        b"",
        b"END\r\n",
        b'PUSH {"jid":"12345678"}\r\n',
        b'ACK {"jid":"\xff"}\r\n',
        b'PUSH {"jid":"12345678","jobtype":"t","args":["%s"],"queue":"q","retry":1}\r\n' % (b"a" * WHOLE_BYTES),
    ],
)
def test_any_other_line_is_buffered(line):
    assert parse_whole(line) is None
