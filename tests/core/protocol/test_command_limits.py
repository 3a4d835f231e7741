"""Size limits of commands and of their fields. Rules: W7, W13."""

import re
from pathlib import Path

import pytest

from django_faktory.core.payloads import MAX_NAME
from django_faktory.core.protocol.commands import VERBS, FailJob, parse
from django_faktory.core.protocol.connection import ServerConnection
from django_faktory.core.protocol.limits import CUT, DROPPED, LIMITS, LOOKED_UP, check_line
from django_faktory.errors import InvalidPayload, UnknownCommand

pytestmark = pytest.mark.core

LONG = "n" * (MAX_NAME + 1)

OVER = {
    ("BEAT", "wid"): f'BEAT {{"wid":"{LONG}"}}',
    ("ACK", "jid"): f'ACK {{"jid":"{LONG}"}}',
    ("FAIL", "jid"): f'FAIL {{"jid":"{LONG}"}}',
    ("TRACK GET", "jid"): f"TRACK GET {LONG}",
    ("TRACK SET", "jid"): f'TRACK SET {{"jid":"{LONG}"}}',
    ("FETCH", "queues"): "FETCH " + "q " * 1001,
    ("QUEUE", "queues"): "QUEUE PAUSE " + "q " * 1001,
    ("QUEUE", "queue"): f"QUEUE PAUSE {LONG}",
    ("BATCH OPEN", "bid"): f"BATCH OPEN {LONG}",
    ("BATCH COMMIT", "bid"): f"BATCH COMMIT {LONG}",
    ("BATCH STATUS", "bid"): f"BATCH STATUS {LONG}",
    ("BATCH NEW", "parent_bid"): f'BATCH NEW {{"parent_bid":"{LONG}"}}',
    ("PUSH", "jid"): f'PUSH {{"jid":"{LONG}","jobtype":"t","args":[]}}',
    ("PUSH", "jobtype"): f'PUSH {{"jid":"12345678","jobtype":"{LONG}","args":[]}}',
    ("PUSH", "queue"): f'PUSH {{"jid":"12345678","jobtype":"t","args":[],"queue":"{LONG}"}}',
    ("PUSH", "custom.bid"): f'PUSH {{"jid":"12345678","jobtype":"t","args":[],"custom":{{"bid":"{LONG}"}}}}',
    ("PUSH", "levels of nested JSON"): f'PUSH {{"jid":"12345678","jobtype":"t","args":{"[" * 128 + "]" * 128}}}',
    ("MUTATE", "jids"): 'MUTATE {"cmd":"kill","target":"dead","filter":{"jids":["a"' + ',"a"' * 20_000 + "]}}",
    ("MUTATE", "jid"): f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"jids":["a","{LONG}"]}}}}',
    ("MUTATE", "jobtype"): f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"jobtype":"{LONG}"}}}}',
    ("MUTATE", "regexp"): f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"regexp":"{"a" * 1001}"}}}}',
    ("MUTATE", "stars of regexp"): f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"regexp":"{"*" * 101}"}}}}',
    ("MUTATE", "part of regexp between two stars, with `?` or `[…]`"): (
        f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"regexp":"*{"a?" * 51}*"}}}}'
    ),
}
"""A line over each limit that rejects the command; the limit on line length is tested separately."""

ELSEWHERE = {
    ("HELLO", "wid"),  # tests/core/protocol/test_commands.py
    ("PUSH", "members"),  # tests/core/protocol/test_bounded_work.py
    ("PUSH", "characters besides `args` and `custom`"),  # tests/core/protocol/test_bounded_work.py
    ("PUSH", "args with `unique_for` or `lock: true`"),  # tests/core/protocol/test_bounded_work.py
    ("PUSHB", "each job"),
    ("PUSHB", "jobs"),  # below
    ("PUSHB", "jobs with `unique_for`, `lock` or a batch"),  # below
}


def test_every_limit_has_a_test_case():
    refused = {
        (limit.verb, limit.field) for limit in LIMITS if limit.field != "line" and limit.beyond not in (CUT, DROPPED)
    }
    assert refused == OVER.keys() | ELSEWHERE


@pytest.mark.parametrize(
    ("place", "line"), OVER.items(), ids=lambda given: " ".join(given) if isinstance(given, tuple) else ""
)
def test_a_field_over_its_limit_is_refused_in_one_line_that_names_field_and_limit(place, line):
    [limit] = [limit for limit in LIMITS if (limit.verb, limit.field) == place]
    with pytest.raises(InvalidPayload) as refusal:
        parse(line)
    text = str(refusal.value)
    assert "\n" not in text
    assert len(text) < 300
    assert str(limit.maximum) in text
    assert limit.field.split()[0].removeprefix("custom.") in text


@pytest.mark.parametrize(
    ("field", "custom"),
    [
        ("jobs", ""),
        (LOOKED_UP, ',"custom":{"unique_for":5}'),
        (LOOKED_UP, ',"custom":{"lock":true}'),
        (LOOKED_UP, ',"custom":{"bid":"b-1"}'),
    ],
)
def test_a_bulk_push_of_too_many_jobs_is_refused_as_a_whole(field, custom):
    [limit] = [limit.maximum for limit in LIMITS if (limit.verb, limit.field) == ("PUSHB", field)]
    job = f'{{"jid":"%08d","jobtype":"t","args":[]{custom}}}'
    jobs = [job % number for number in range(limit + 1)]
    with pytest.raises(InvalidPayload, match=f"^invalid PUSHB: {re.escape(field)}: expected at most {limit}, got"):
        parse(f"PUSHB [{','.join(jobs)}]")
    assert len(parse(f"PUSHB [{','.join(jobs[1:])}]").jobs) == limit


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "HELLO"])
def test_the_line_limit_of_each_verb_is_checked_before_decoding(verb):
    [most] = [limit.maximum for limit in LIMITS if (limit.verb, limit.field) == (verb, "line")]
    if not most:
        return
    line = verb.encode() + b" " + b"\xff" * most  # not UTF-8: decoding it would raise another error
    with pytest.raises(InvalidPayload, match=rf"^{verb}: line: expected at most {most} bytes, got {len(line)}$"):
        connection_that_got(line).next_command()
    check_line(line[:100], most)


def test_a_long_line_of_an_unknown_verb_is_not_decoded():
    with pytest.raises(UnknownCommand, match=r"^unknown command NOPE$"):
        connection_that_got(b"NOPE " + b"\xff" * 5000).next_command()


def connection_that_got(line):
    connection = ServerConnection(max_command_bytes=16 * 1024 * 1024)
    connection.receive(b'HELLO {"v":2}\r\n' + line + b"\r\n")
    connection.next_command()
    return connection


def test_failure_texts_of_any_length_are_accepted():
    """The texts are cut when the report is made."""
    assert parse(f'FAIL {{"jid":"12345678","errtype":"{"e" * 5000}","message":"{"m" * 5000}"}}') == FailJob(
        "12345678", "e" * 5000, "m" * 5000
    )


def test_the_limits_page_lists_the_highest_cost_of_each_verb():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "command-limits.md").read_text(encoding="utf-8")
    section = page.partition("## What a command costs at most")[2].partition("\n## ")[0]
    named = set(
        re.findall(
            r"\b[A-Z]{3,6}\b", " ".join(row.split("|")[1] for row in section.splitlines() if row.startswith("|"))
        )
    )
    assert set(VERBS) <= named
