"""Every verb as bytes: written by one side, and parsed by the other at every split."""

import typing

import pytest

from django_faktory.core.job_parser import parse_job
from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import Beat, NewBatch, TrackUpdate, WorkerIdentity, parse_instant
from django_faktory.core.protocol import batches, commands, management, tracking
from django_faktory.core.protocol.connection import ServerConnection
from tests.core.protocol.splits import every_split

pytestmark = pytest.mark.core

JOB = '{"jid":"12345678","jobtype":"t","queue":"default","args":[1,"é"],"retry":25}'
OTHER = '{"jid":"abcdefgh","jobtype":"t","queue":"q","args":[],"retry":-1,"custom":{"n":1.0}}'
EVERY = Mutation(command="kill", target="retries", jids=("a", "b"), jobtype="t", regexp='*"é ? [a]*')

SENT = [
    (b'HELLO {"v":2}', commands.Hello()),
    (
        b'HELLO {"v":2,"wid":"w1","hostname":"h","pid":7,"labels":["a"],"pwdhash":"1e44"}',
        commands.Hello(identity=WorkerIdentity(wid="w1", hostname="h", pid=7, labels=("a",)), pwdhash="1e44"),
    ),
    (
        b'HELLO {"v":2,"wid":"w","hostname":"h","pid":7,"labels":[],"queues":["mail","default"],"threads":5}',
        commands.Hello(
            identity=WorkerIdentity(wid="w", hostname="h", pid=7, queues=("mail", "default"), threads=5),
        ),
    ),
    (b"END", commands.End()),
    (b"INFO", commands.Info()),
    (f"PUSH {JOB}".encode(), commands.Push(parse_job(JOB))),
    (b"PUSHB []", commands.PushBulk([])),
    (f"PUSHB [{JOB},{OTHER}]".encode(), commands.PushBulk([parse_job(JOB), parse_job(OTHER)])),
    (b"FETCH default", commands.Fetch()),
    (b"FETCH critical default", commands.Fetch(("critical", "default"))),
    (b'ACK {"jid":"12345678"}', commands.AckJob("12345678")),
    (
        b'FAIL {"jid":"12345678","errtype":"E","message":"m","backtrace":["a"]}',
        commands.FailJob("12345678", "E", "m", ("a",)),
    ),
    (b'BEAT {"wid":"w1"}', commands.BeatWorker(Beat(wid="w1"))),
    (
        b'BEAT {"wid":"w1","current_state":"quiet","rss_kb":5}',
        commands.BeatWorker(Beat(wid="w1", current_state="quiet", rss_kb=5)),
    ),
    (
        b'MUTATE {"cmd":"clear","target":"dead","filter":{}}',
        management.Mutate(Mutation(command="clear", target="dead")),
    ),
    (
        'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":["a","b"],"jobtype":"t","regexp":'
        '"*\\"é\\u0020?\\u0020[a]*"}}'.encode(),
        management.Mutate(EVERY),
    ),
    (b"QUEUE PAUSE *", management.PauseQueues(None)),
    (b"QUEUE RESUME a b", management.ResumeQueues(("a", "b"))),
    (b"QUEUE REMOVE a", management.RemoveQueues(("a",))),
    (b"QUEUE LATENCY a b.c-d", management.QueueLatency(("a", "b.c-d"))),
    (b"FLUSH", management.Flush()),
    (
        b'TRACK SET {"jid":"12345678","percent":5,"desc":"d","reserve_until":"2026-05-01T12:00:00Z"}',
        tracking.TrackSet(
            TrackUpdate(
                jid="12345678",
                percent=5,
                desc="d",
                reserve_until=parse_instant("reserve_until", "2026-05-01T12:00:00Z"),
            )
        ),
    ),
    (b'TRACK SET {"jid":"12345678"}', tracking.TrackSet(TrackUpdate(jid="12345678"))),
    (
        b'TRACK SET {"jid":"12345678","percent":0,"desc":""}',
        tracking.TrackSet(TrackUpdate(jid="12345678", percent=0, desc="")),
    ),
    (b"TRACK GET 12345678", tracking.TrackGet("12345678")),
    (
        f'BATCH NEW {{"description":"d","parent_bid":"b-1","complete":{JOB},"success":{JOB}}}'.encode(),
        batches.BatchNew(NewBatch(description="d", parent_bid="b-1", complete=parse_job(JOB), success=parse_job(JOB))),
    ),
    (b"BATCH OPEN b-1", batches.BatchOpen("b-1")),
    (b"BATCH COMMIT b-1", batches.BatchCommit("b-1")),
    (b"BATCH STATUS b-1", batches.BatchAsk("b-1")),
]


def understood(pieces):
    """Return the commands that the server side parses from these pieces."""
    connection, found = ServerConnection(max_command_bytes=1 << 20), []
    for piece in pieces:
        connection.receive(piece)
        while (command := connection.next_command()) is not None:
            found.append(command)
    return found


def test_the_tables_cover_every_verb_and_command_class():
    assert {line.split()[0].decode() for line, _ in SENT} == set(commands.VERBS)
    assert {type(command) for _, command in SENT} == set(typing.get_args(commands.Command))


@pytest.mark.parametrize(("line", "command"), SENT)
def test_each_command_is_written_as_the_expected_bytes(line, command):
    assert command.line() == line + b"\r\n"


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize(("line", "command"), SENT)
def test_a_server_parses_each_command_at_every_split(line, command, end):
    """W6: the result does not depend on the split."""
    hello = [] if isinstance(command, commands.Hello) else [b'HELLO {"v":2}\r\n']
    for pieces in every_split(line + end):
        assert understood(hello + pieces)[len(hello) :] == [command]
