"""Limits on the cost of a command between two steps of the event loop, and in memory. Calls are counted, not time."""

import json
import sys
import tracemalloc
from contextlib import suppress

import pytest

from django_faktory.core.json import jsontext
from django_faktory.core.protocol import commands
from django_faktory.core.protocol.commands import PushBulk, parse, parse_long
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core

SIZE = 1_500_000
"""Characters of arguments."""

ARGS = {
    "numbers": "[" + "1," * (SIZE // 2) + "1]",
    "arrays": "[" + "[]," * (SIZE // 3) + "1]",
    "members": "[" + '{"a":1,"b":[2]},' * (SIZE // 17) + "1]",
    "strings with brackets": "[" + '"[",[],' * (SIZE // 7) + "1]",
    "escapes": '["' + "\\n" * (SIZE // 2) + '"]',
    "a long string": '["' + "é" * (SIZE // 2) + '"]',
    "deep": "[" + ("[" * 120 + "]" * 120 + ",") * (SIZE // 241) + "1]",
    "wide": "[{" + ",".join(f'"{number:09d}{"x" * 10}":0' for number in range(SIZE // 24)) + "}]",
    "space": "[" + " 1 ,\t" * (SIZE // 5) + "1]",
}
JOB = '{{"jid":"12345678","jobtype":"t","args":{args},"custom":{{{custom}}}}}'
COMPARED = '"unique_for":60,"lock":true'


def calls_of_each_step(line):
    """Return the command, and the number of calls before each pause."""
    counts = [0]

    def count(frame, event, argument):
        if event in ("call", "c_call"):
            counts[-1] += 1

    steps = parse_long(bytearray(line.encode()))
    sys.setprofile(count)
    try:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value, counts
            counts.append(0)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("line", ["PUSH {}", "PUSHB [{}]"])
@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_the_calls_for_a_long_job_do_not_grow_with_its_arguments(line, args):
    jsontext.items(ARGS["arrays"])  # the first long array makes a decoder
    _, counts = calls_of_each_step(line.format(JOB.format(args=args, custom="")))
    assert sum(counts) < 500


@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_a_long_job_takes_a_few_times_the_memory_of_its_line(args):
    line = ("PUSH " + JOB.format(args=args, custom="")).encode()
    assert peak_of(line) < 8 * len(line)


def peak_of(line):
    """Return the most memory that parsing this line takes."""
    steps = parse_long(bytearray(line))
    tracemalloc.start()
    try:
        with suppress(InvalidPayload):
            for _ in steps:
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "line",
    [b"PUSHB [" + b"0," * 1_000_000 + b"0]", b'FAIL {"jid":"12345678","backtrace":[' + b"{}," * 700_000 + b"0]}"],
)
def test_elements_beyond_the_most_allowed_take_no_memory(line):
    """A list of two million numbers once took 2 GB."""
    jsontext.items(ARGS["arrays"])  # the first long array makes a decoder
    assert peak_of(line) < 6 * len(line)


def test_many_jobs_are_parsed_with_a_bounded_number_of_calls_between_pauses():
    jobs = ",".join(JOB.format(args='[{"a":1}]', custom=COMPARED) for _ in range(1000))
    command, counts = calls_of_each_step(f"PUSHB [{jobs}]")
    assert len(command.jobs) == 1000
    assert max(counts) < 2 * commands.PART


def test_equal_refusals_are_kept_once():
    """Each refused number used to be stored: 2 MB from a client took 2 GB of the server's memory."""
    command = parse("PUSHB [" + "0," * 9_999 + JOB.format(args="[]", custom="") + "]")
    assert isinstance(command, PushBulk)
    assert [job.jid for job in command.jobs] == ["12345678", ""]


def test_a_job_with_more_than_100_members_is_refused():
    line = "PUSH {" + ",".join(f'"{number}" :1' for number in range(30_000)) + "}"
    with pytest.raises(InvalidPayload, match="at most 100 members"):
        parse(line)


def test_a_custom_with_many_members_is_accepted():
    custom = ",".join(f'"{number}":1' for number in range(30_000))
    assert parse("PUSH " + JOB.format(args="[]", custom=f'{custom},"unique_for":9')).job.options.unique_for == 9


def test_a_job_with_a_mebibyte_besides_its_arguments_and_custom_is_refused():
    text = JOB.format(args="[]", custom="")
    assert parse(f'PUSH {text[:-1]},"other":"{"x" * 1_000_000}"}}').job
    with pytest.raises(InvalidPayload, match="at most 1048576 characters besides args and custom, got 1100"):
        parse(f'PUSH {text[:-1]},"other":"{"x" * 1_100_000}"}}')


@pytest.mark.parametrize("custom", ['"unique_for":60', '"lock":true'])
def test_arguments_of_more_than_64_kib_are_not_compared(custom):
    args = json.dumps(["x" * (64 * 1024)])
    with pytest.raises(InvalidPayload, match=r"^args: expected at most 65536 characters, because .*, got 65540; "):
        parse("PUSH " + JOB.format(args=args, custom=custom))
    assert parse("PUSH " + JOB.format(args=json.dumps(["x" * 65_000]), custom=custom)).job.options


def test_a_lock_with_its_own_key_does_not_compare_arguments():
    line = "PUSH " + JOB.format(args=ARGS["members"], custom='"lock":"key"')
    assert parse(line).job.options.lock_key == "key"
