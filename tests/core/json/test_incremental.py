"""The incremental JSON parser gives the same results as the direct one, and pauses between steps."""

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.json import incremental, jsontext
from django_faktory.core.payloads import JobPayload
from django_faktory.core.protocol import commands
from django_faktory.errors import InvalidPayload
from tests.core.json.test_jsontext import answer, texts_of_objects, values, writers

pytestmark = pytest.mark.core

JOB = '{"jid":"12345678","jobtype":"t","args":[1,"é"],"custom":{"a":1,"a":[2]}}'
OTHER = '{"jid":"abcdefgh", "jobtype":"t" ,"args":[{"x":"\\"],[\\\\"}]}'


SMALL = incremental.ParseSizes(short=0, tokens=2)
"""With these sizes every text counts as long."""


def in_steps(function, *args, **options):
    return answer(lambda: incremental.run(function(*args, **options)))


def items(text):
    found = []
    for part in incremental.cut(text, "[]", tokens_a_step=SMALL.tokens):
        if part is not None:
            yield from incremental.check_value(part, sizes=SMALL)
            found.append(part.strip(" \t\r\n"))
    return found


@given(texts_of_objects())
def test_members_match_the_direct_parser(given_):
    _, text = given_
    assert in_steps(incremental.members, text, max_count=1000, sizes=SMALL) == answer(jsontext.members, text)


@given(st.lists(values, max_size=5), writers)
def test_items_match_the_direct_parser(array, write):
    assert in_steps(items, write(array)) == answer(jsontext.items, write(array))


@given(
    texts_of_objects(), st.integers(0, 200), st.sampled_from(["", "]", "}", "{", "[", ",", ":", '"', "\\", "x", "1"])
)
def test_damaged_arrays_give_the_same_result_in_both_parsers(given_, at, sign):
    text = f"[{given_[1]}]"
    harmed = text[:at] + sign + text[at + 1 :]
    assert in_steps(items, harmed) == answer(jsontext.items, harmed)


@pytest.mark.parametrize(
    "text", ["", " ", "[", "]", "[1", "[1,", "[,]", "[1,]", "[]]", "[}", '["', '["\\', "[1 2]", "[[}]", "{}"]
)
def test_text_that_is_not_an_array_is_refused(text):
    assert in_steps(items, text) is InvalidPayload
    assert answer(jsontext.items, text) is InvalidPayload


@given(st.integers(1, 300), st.booleans())
def test_depth_check_matches_the_direct_parser(depth, is_wide):
    text = "[" + '"[",{},' * 200 * is_wide + "[" * depth + "]" * depth + "]"
    assert in_steps(incremental.check_depth, text, sizes=SMALL) == answer(jsontext.check_depth, text)


def test_a_string_of_any_length_is_one_value():
    """Brackets, commas and escaped quotes inside a string have no effect."""
    for string in ("[,]" * 5000, "\\" * 5001, '"' * 3000, "é,\\" * 2000):
        array = json.dumps([string, 1])
        assert in_steps(items, array) == [json.dumps(string), "1"]
        assert in_steps(incremental.check_depth, array, sizes=SMALL) is None


@pytest.mark.parametrize("piece", ["a", "\\\\n", "é"])
def test_the_parser_pauses_at_least_every_million_characters_of_a_string(piece):
    text = f'{{"a":"{piece * (4_000_000 // len(piece))}"}}'
    assert sum(part is None for part in incremental.cut(text, "{}")) >= 4


def test_lone_surrogates_are_accepted_as_by_the_direct_parser():
    text = json.dumps([["\ud800"] * 5, {"\udfff": ["\ud800"]}])
    assert in_steps(items, text) == answer(jsontext.items, text) != InvalidPayload


def test_the_parser_pauses_after_a_bounded_number_of_tokens():
    text = f"[{','.join(['[]'] * 10_000)}]"
    sizes = incremental.ParseSizes(tokens=100)
    assert len(list(incremental.check_depth(text, sizes=sizes))) == 20_002 // 100
    assert sum(part is None for part in incremental.cut(text, "[]", tokens_a_step=100)) > 100


LINES = [
    f"PUSH {JOB}",
    f"PUSH {OTHER}",
    'PUSH {"jid":"12345678","jid":"12345679","jobtype":"t","args":[]}',
    'PUSH {"jid":"12345678","jobtype":"t"}',
    f'PUSH {{"jid":"12345678","jobtype":"t","args":{"[" * 128}{"]" * 128}}}',
    f"PUSHB [{JOB}, {OTHER}]",
    f'PUSHB [{JOB},7,null,{{"jid":"short"}},{{"jid":"badbadba"}},{OTHER},"x"]',
    f"PUSHB [{JOB},{{]",
    f"PUSHB [{JOB},{{,}}]",
    'PUSHB [{"jid":"abcdefgh" "x"}]',
    "PUSHB {}",
    "PUSHB []",
    'FAIL {"jid":"12345678","errtype":" E","message":"m ","backtrace":["a","b,]"],"x":[{}]}',
    'FAIL {"jid":"12345678","backtrace":null}',
    'FAIL {"jid":"12345678","backtrace":["a",1]}',
    'FAIL {"jid":"12345678","backtrace":"a"}',
    'FAIL {"jid":"12345678","jid":"87654321","message":[1]}',
    'FAIL {"jid":"12345678","jid":"87654321"}',
    'FAIL {"jid":["12345678"]}',
    "FAIL []",
    'MUTATE {"cmd":"kill","target":"retries"}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":["a","b","a"],"jobtype":"t","regexp":"*"}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":[]}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":null}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":["a",1]}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":{}}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":{"other":1}}',
    'MUTATE {"cmd":"kill","target":"retries","filter":[1]}',
    'MUTATE {"cmd":"kill","target":"retries","filter":null}',
    'MUTATE {"cmd":["kill"],"target":"retries"}',
]


def line_of(verb, value):
    return f"{verb} {json.dumps(value)}"


MANY = {
    "members": line_of("PUSH", {f"m{n}": [] for n in range(1500)} | {"jid": "12345678", "jobtype": "t", "args": []}),
    "jobs": line_of("PUSHB", [{"jid": f"job-{n:04}", "jobtype": "t", "args": ["x" * 300]} for n in range(1000)]),
    "strings and a number": line_of("FAIL", {"jid": "12345678", "backtrace": ["a"] * 1500 + [1]}),
    "jids": line_of("MUTATE", {"cmd": "kill", "target": "dead", "filter": {"jids": [f"job-{n}" for n in range(1500)]}}),
}
"""Lines with so many values that a parser pauses between them."""

SPACE = " " * (incremental.SHORT + 1)
_brackets_and_strings = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]')


def lengthen(line):
    """Add so much white space to each array and object that it counts as long."""
    return _brackets_and_strings.sub(lambda match: match[0] + SPACE * (match[0] in "[{"), line)


def shorten(job):
    return msgspec.structs.replace(job, text=job.text.replace(SPACE, ""))


def meaning(command):
    """Return the parts of a command that matter; for PUSHB the stored jobs and the jids of the refused ones."""
    if isinstance(command, commands.Push):
        return shorten(command.job)
    if not isinstance(command, commands.PushBulk):
        return command
    good = [shorten(job) for job in command.jobs if isinstance(job, JobPayload)]
    return good, {job.jid for job in command.jobs if isinstance(job, InvalidPayload)}


@pytest.mark.parametrize("line", LINES)
def test_a_long_command_line_parses_the_same_as_a_short_one(line):
    verb, _, rest = lengthen(line).partition(" ")
    assert meaning(in_steps(commands._LONG[verb.encode()], rest)) == meaning(answer(commands.parse, line))


@pytest.mark.parametrize("line", MANY.values(), ids=MANY)
def test_a_command_line_with_many_values_parses_the_same_in_both_parsers(line):
    verb, _, rest = line.partition(" ")
    assert meaning(in_steps(commands._LONG[verb.encode()], rest)) == meaning(answer(commands.parse, line))


def test_equal_refusals_are_kept_once():
    """Each refused number used to be stored: 2 MB from a client took 2 GB of the server's memory."""
    same = incremental.run(commands.parse_long(b"PUSHB [" + b"0," * 9_999 + JOB.encode() + b"]"))
    assert [job.jid for job in same.jobs] == ["12345678", ""]


def test_lines_that_are_cheap_to_parse_are_not_parsed_incrementally():
    for line in (
        f"PUSHB [{JOB}]",
        f"PUSH {JOB}",
        'PUSH {"args":["' + "x" * 500_000 + '"]}',
        "ACK " + "x" * 500_000,
        "PUSHB",
    ):
        assert commands.parse_long(line.encode()) is None
