"""Limits on the cost of a command between two steps of the event loop, and in memory. Calls are counted, not time."""

import json
import sys
import tracemalloc
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core import job_options
from django_faktory.core.json import incremental
from django_faktory.core.protocol.commands import Push, begin, parse
from django_faktory.core.protocol.connection import ServerConnection
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core

MOST_CALLS = 15_000
"""Most calls between two steps: about 5 ms."""

SIZE = 40_000
"""Characters of arguments: several times what `MOST_CALLS` can read."""

ARGS = {
    "numbers": "[" + "1," * (SIZE // 2) + "1]",
    "arrays": "[" + "[]," * (SIZE // 3) + "1]",
    "objects": "[" + "{}," * (SIZE // 3) + "1]",
    "members": "[" + '{"a":1,"b":[2]},' * (SIZE // 17) + "1]",
    "odd members": "[" + '{"é" : "\\n"},' * (SIZE // 14) + "1]",
    "short strings": "[" + '"ab",' * (SIZE // 5) + "1]",
    "escapes": '["' + "\\n" * (SIZE // 2) + '"]',
    "a long string": '["' + "é" * (SIZE // 2) + '"]',
    "deep": '[{"a":' * 63 + '"' + "x" * SIZE + '"' + "}]" * 63,
    "wide": "[{" + ",".join(f'"{number:09d}{"x" * 10}":0' for number in range(10_000)) + "}]",
    "space": "[" + " 1 ,\t" * (SIZE // 5) + "1]",
    "envelope": '[{"$encrypted":"' + "x" * SIZE + '","same":"abc"}]',
}
JOB = '{{"jid":"12345678","jobtype":"t","args":{args},"custom":{{"unique_for":60,"lock":true{more}}}}}'


def steps_of(line):
    connection = ServerConnection(max_command_bytes=1 << 24)
    connection.receive(b'HELLO {"v":2}\r\n' + line.encode() + b"\r\n")
    connection.next_command()
    return connection.begin_command


def calls_of_each_step(begin_command):
    """Return the command, and the number of calls before each pause."""
    counts = [0]

    def count(frame, event, argument):
        if event in ("call", "c_call"):
            counts[-1] += 1

    sys.setprofile(count)
    try:
        steps = begin_command()
        if not isinstance(steps, Generator):
            return steps, counts
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value, counts
            counts.append(0)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_each_step_of_parsing_a_long_unique_push_is_bounded(args):
    """Such a PUSH of 15 MiB used to block the event loop for 20 to 33 s."""
    command, counts = calls_of_each_step(steps_of("PUSH " + JOB.format(args=args, more="")))
    assert command.job.options.unique_key == job_options.unique_key("t", "default", args)
    assert command.job.options.lock_key == job_options.default_lock_key("t", args)
    assert max(counts) < MOST_CALLS


@pytest.mark.parametrize("args", ['["' + "é" * 1_000_000 + '"]', "[" + ('"' + "x" * 50 + '",') * 20_000 + "1]"])
def test_each_step_of_a_unique_key_reads_a_bounded_number_of_characters(args):
    """The number of characters is bounded even if they are few tokens."""
    written = bytearray()
    sizes = [0]
    for _ in incremental.canonical(args, written):
        sizes.append(len(written))
        written.clear()
    assert max(sizes) < 1_000_000


@pytest.mark.parametrize("size", [500, 5_000, 50_000])
@pytest.mark.parametrize("verb", ["PUSH {}", "PUSHB [{}]", 'BATCH NEW {{"success":{}}}'])
def test_each_step_of_parsing_a_shorter_job_is_bounded(verb, size):
    job = JOB if "NEW" not in verb else JOB.replace('"unique_for":60,', "")
    line = verb.format(job.format(args="[" + "[]," * (size // 3) + "1]", more=""))
    _, counts = calls_of_each_step(steps_of(line))
    assert max(counts) < MOST_CALLS


def test_each_step_of_parsing_many_unique_jobs_is_bounded():
    jobs = ",".join(JOB.format(args="[" + "[]," * 2000 + "1]", more="") for _ in range(20))
    _, counts = calls_of_each_step(steps_of(f"PUSHB [{jobs}]"))
    assert max(counts) < 2 * MOST_CALLS


def test_a_job_with_more_than_10000_members_is_refused():
    line = "PUSH {" + ",".join(f'"{number}" :1' for number in range(30_000)) + "}"
    with pytest.raises(InvalidPayload, match="at most 10000 members"):
        calls_of_each_step(steps_of(line))


def test_short_unique_jobs_are_parsed_in_one_step():
    assert isinstance(begin("PUSH " + JOB.format(args='[1,{"a":"b"}]', more="")), Push)
    assert isinstance(begin("PUSH " + JOB.format(args=f'[1,"{"x" * 5000}"]', more="")), Push)


@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_a_unique_key_takes_memory_proportional_to_its_arguments(args):
    """Arguments of 15 MiB used to take 1.7 GB."""
    tracemalloc.start()
    try:
        job_options.unique_key("t", "q", args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(args) + 4_000_000


@pytest.mark.parametrize("custom", ['"unique_for":60', '"lock":true'])
def test_unique_arguments_with_more_than_10000_nested_members_are_refused(custom):
    members = ",".join(f'"{number}":0' for number in range(5_001))
    inner = f"{{{members}}}"
    line = f'PUSH {{"jid":"12345678","jobtype":"t","args":[{{{members},"a":{inner}}}],"custom":{{{custom}}}}}'
    with pytest.raises(
        InvalidPayload, match=r"^args: expected at most 10000 members of objects within each other, because "
    ):
        parse(line)
    beside = f'PUSH {{"jid":"12345678","jobtype":"t","args":[{inner},{inner}],"custom":{{{custom}}}}}'
    assert isinstance(parse(beside), Push)


def test_unique_arguments_with_an_overlong_object_key_are_refused():
    key = "k" * (incremental.SHORT + 1)
    with pytest.raises(InvalidPayload, match=r"^args: expected keys of at most 16384 characters"):
        parse("PUSH " + JOB.format(args=f'[{{"{key}":1}}]', more=""))


class Digits(str):
    """A number in its original spelling."""


def plainly(value):
    """Return the canonical text, computed from the values."""
    match value:
        case Digits():
            return str(value)
        case list():
            return f"[{','.join(map(plainly, value))}]"
        case dict():
            return f"{{{','.join(f'{json.dumps(key)}:{plainly(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


texts = st.text(max_size=5) | st.text('\\"\ud83d\ude00/\n\x7f ,:{}[]é', max_size=5) | st.just("a\\u" * 5_000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=3), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([",", " ,\n"]))
def test_incremental_canonical_json_equals_the_canonical_json_of_the_values(value, is_ascii, indent, comma):
    """Keys of jobs stored by other versions must not change."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent, separators=(comma, ": "))
    expected = plainly(json.loads(text, parse_int=Digits, parse_float=Digits))
    assert job_options.canonical(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a":1,"a":2}]', '[{"a":2}]'),
        ('[{"b":1,"\\u0061":2,"a":{"x":[]}}]', '[{"a":{"x":[]},"b":1}]'),
        ('["\\ud83d\\ude00","\\ud83d"]', '["\\ud83d\\ude00","\\ud83d"]'),
        (" [ { } , [ ] , 1.0 , -0 ] ", "[{},[],1.0,-0]"),
    ],
)
def test_unusual_json_spellings_have_one_canonical_form(text, expected):
    assert job_options.canonical(text) == expected
