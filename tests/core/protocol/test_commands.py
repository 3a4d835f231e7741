"""Command lines and their meaning: one table read in both directions, and what is rejected with which message."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Beat, JobPayload, WorkerIdentity
from django_faktory.core.protocol import resp
from django_faktory.core.protocol.commands import (
    VERBS,
    AckJob,
    BeatWorker,
    End,
    FailJob,
    Fetch,
    Hello,
    Info,
    PushBulk,
    parse,
    parse_hello,
)
from django_faktory.errors import InvalidPayload, UnknownCommand

pytestmark = pytest.mark.core

JOB = '{"jid":"12345678","jobtype":"mail","queue":"default","args":[1,"é",null],"retry":25}'
OTHER = '{"jid":"abcdefgh","jobtype":"mail","queue":"q","args":[],"retry":-1,"custom":{"n":1.0}}'


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("END of it", End()),
        ("INFO {}", Info()),
        ("FETCH", Fetch(("default",))),
        ("FETCH b a b", Fetch(("b", "a"))),
        (f"FETCH {'a ' * 1000}", Fetch(("a",))),
        ("FETCH *bad{} ok", Fetch(("ok",))),
        (f"FETCH {'q' * 255} {'q' * 256} a/b", Fetch(("q" * 255,))),
        ("FETCH *", Fetch(())),
        ("PUSHB null", PushBulk([])),
        (' ACK {"jid":"12345678"}'[1:], AckJob("12345678")),
        ('ACK  { "jid" : "12345678" , "more" : [1] } ', AckJob("12345678")),
        ('ACK {"jid":""}', AckJob("")),
        ('FAIL {"jid":"12345678"}', FailJob("12345678")),
        ('FAIL {"jid":"12345678","errtype":null,"message":null,"backtrace":null}', FailJob("12345678")),
        ('FAIL {"jid":"12345678","backtrace":[null,"a",1,["b"]]}', FailJob("12345678", backtrace=("a",))),
        (f'FAIL {{"jid":"12345678","backtrace":[{"null," * 5000}"a"]}}', FailJob("12345678", backtrace=("a",))),
        ('FAIL {"jid":"12345678","errtype":" E\\n","message":" m ","x":1}', FailJob("12345678", "E", "m")),
        ('BEAT {"wid":"w","current_state":null,"rss_kb":null,"x":1}', BeatWorker(Beat(wid="w"))),
    ],
)
def test_variations_between_clients_are_accepted(line, command):
    assert parse(line) == command


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        ("{}", WorkerIdentity()),
        ('{"v":2,"wid":null,"hostname":null,"pid":null,"labels":null,"pwdhash":null}', WorkerIdentity()),
        ('{"hostname":"h","v":2,"username":"u","random":[{}]}', WorkerIdentity(hostname="h")),
        (json.dumps({"v": 2, "wid": "w" * 255}), WorkerIdentity(wid="w" * 255)),
        ('{"wid":"w","queues":"a","threads":5}', WorkerIdentity(wid="w")),
        ('{"wid":"w","queues":["a"],"threads":"5"}', WorkerIdentity(wid="w")),
        ('{"wid":"w","queues":["a"],"threads":true}', WorkerIdentity(wid="w")),
        ('{"wid":"w","queues":["a"],"threads":99999999999}', WorkerIdentity(wid="w")),
    ],
)
def test_a_hello_can_omit_fields_or_add_unknown_ones(text, identity):
    """W2: unknown fields are ignored, missing ones are optional."""
    assert parse_hello(text) == Hello(identity=identity)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid HELLO"),
        ("[]", "expected an object"),
        ('{"v":3}', "v: expected 2"),
        ('{"v":"2"}', "v: expected 2"),
        ('{"v":true}', "v: expected 2"),
        ('{"v":2,"wid":7}', "wid: expected a string, got 7"),
        (json.dumps({"v": 2, "wid": "w" * 256}), "wid: expected at most 255"),
        ('{"v":2,"wid":"a\\u0000"}', "wid: expected"),
        ('{"v":2,"hostname":[]}', "hostname: expected a string"),
        ('{"v":2,"pid":"7"}', "pid: expected an integer"),
        ('{"v":2,"pid":true}', "pid: expected an integer"),
        ('{"v":2,"labels":"python"}', "labels: expected an array"),
        ('{"v":2,"labels":[1]}', "labels: expected an array of strings"),
        ('{"v":2,"pwdhash":7}', "pwdhash: expected a string"),
        ("[" * 2000, "nested deeper"),
    ],
)
def test_an_invalid_hello_is_refused_with_the_wrong_field(text, message):
    """W2: the error names the wrong field."""
    with pytest.raises(InvalidPayload, match=message):
        parse_hello(text)


@pytest.mark.parametrize("verb", ["", "push", "Fetch", "PING", "CRON", "CONFIG", "HELLO", "PUSH\t{}", "\x00", "FETCHX"])
def test_an_unknown_verb_is_refused_by_name(verb):
    """W5: the error repeats the unknown verb."""
    with pytest.raises(UnknownCommand) as caught:
        parse(f"{verb} {{}}" if verb else "")
    assert str(caught.value) == f"unknown command {verb}"


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("ACK", "invalid ACK "),
        ("ACK 12345678", "invalid ACK 12345678"),
        ('ACK {"jid":7}', 'invalid ACK {"jid":7}'),
        ('ACK {"jid":null}', 'invalid ACK {"jid":null}'),
        ('ACK {"jid":NaN}', "invalid ACK "),
        ("ACK " + "[" * 200, "invalid JSON: nested deeper than 128"),
        (f"FETCH {'a ' * 1001}", "invalid FETCH: queues: expected at most 1000, got 1001"),
        ("FAIL", "invalid FAIL "),
        ("FAIL nonsense", "invalid FAIL nonsense"),
        ("FAIL {}", "missing JID"),
        ('FAIL {"jid":""}', "missing JID"),
        ('FAIL {"jid":7}', "invalid FAIL"),
        ('FAIL {"jid":"12345678","errtype":7}', "invalid FAIL"),
        ('FAIL {"jid":"12345678","message":{}}', "invalid FAIL"),
        ('FAIL {"jid":"12345678","backtrace":"line"}', "invalid FAIL"),
        ("BEAT", "invalid BEAT "),
        ('BEAT {"wid":""}', "invalid BEAT"),
        ('BEAT {"wid":7}', "invalid BEAT"),
        ('BEAT {"wid":"w","rss_kb":"7"}', "invalid BEAT"),
        ('BEAT {"wid":"w","current_state":7}', "invalid BEAT"),
        ("PUSH", "invalid JSON: "),
        ("PUSH []", "invalid JSON: "),
        ("PUSH {}", "jobs must have a reasonable jid parameter"),
        ('PUSH {"jid":"12345678"}', "jobs must have a jobtype parameter"),
        ('PUSH {"jid":"12345678","jobtype":"t"}', "jobs must have an args parameter"),
        ("PUSHB", "invalid JSON: "),
        ("PUSHB {}", "invalid JSON: "),
        ("PUSHB [{]", "invalid JSON: "),
    ],
)
def test_malformed_commands_are_refused_with_the_original_servers_message(line, start):
    with pytest.raises(InvalidPayload) as caught:
        parse(line)
    assert str(caught.value).startswith(start)


def test_the_error_about_an_overlong_verb_is_truncated():
    with pytest.raises(UnknownCommand) as caught:
        parse("X" * 1_000_000)
    assert str(caught.value) == f"unknown command {'X' * 100}"


@pytest.mark.parametrize("verb", ["ACK", "FAIL", "BEAT"])
def test_the_error_about_a_huge_command_is_short(verb):
    with pytest.raises(InvalidPayload) as caught:
        parse(f'{verb} {{"x":"{"y" * 1_000_000}","jid":7,"wid":7}}')
    assert len(str(caught.value)) < 500


def test_an_invalid_job_in_pushb_does_not_affect_the_others():
    """W12: each refused job is reported by its jid, or by "" if it has none."""
    deep = f'{{"jid":"deepdeep","jobtype":"t","args":{"[" * 200}{"]" * 200}}}'
    bad = ['{"jid":"badbadba"}', "7", "null", '{"jid":"short"}', '{"jobtype":"t"}', deep, '{"jid":"twice123","jid":""}']
    command = parse(f"PUSHB [{','.join([JOB, *bad, OTHER])}]")
    assert [job.jid for job in command.jobs if isinstance(job, JobPayload)] == ["12345678", "abcdefgh"]
    refused = [job for job in command.jobs if isinstance(job, InvalidPayload)]
    assert [refusal.jid for refusal in refused] == ["badbadba", "", "short"], "one reason for each"
    assert all(str(refusal) for refusal in refused)


def test_pushb_does_not_send_refused_jobs():
    assert PushBulk([InvalidPayload("no"), parse_job(JOB)]).line() == f"PUSHB [{JOB}]\r\n".encode()


@pytest.mark.parametrize(
    "command",
    [
        AckJob('"\\\r\n\x00é\u2028'),
        FailJob("12345678", "E\r\n", "\r\nEND\r\n", ("a\nb", "\ud800", "\x00")),
        BeatWorker(Beat(wid="é\u2028")),
        Hello(identity=WorkerIdentity(wid="w", hostname="a\r\nEND", labels=("\n",))),
    ],
)
def test_no_content_adds_a_line_break_to_a_command(command):
    sent = command.line()
    assert sent.endswith(b"\r\n")
    assert not {*b"\r\n\0"} & {*sent[:-2]}


@given(
    st.sampled_from([*VERBS, "", "NO"]),
    st.one_of(
        st.text(max_size=40),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.dictionaries(
                    st.sampled_from(["jid", "wid", "args", "jobtype", "errtype", "backtrace", "queue", "at", "x"]),
                    inner,
                ),
            ),
        ).map(json.dumps),
    ),
)
def test_any_line_parses_to_a_command_or_is_refused(verb, rest):
    try:
        sent = parse(f"{verb} {rest}").line()
    except (InvalidPayload, UnknownCommand) as refusal:
        sent = resp.error(str(refusal))
    assert sent.endswith(b"\r\n")
