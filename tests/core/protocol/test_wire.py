"""Every verb and every kind of reply as bytes: written by one side, and parsed by the other at every split."""

import typing

import pytest

from django_faktory.core.job_parser import parse_job
from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import Beat, NewBatch, TrackUpdate, WorkerIdentity, parse_instant
from django_faktory.core.protocol import batches, commands, management, resp, tracking
from django_faktory.core.protocol.connection import ClientConnection, ServerConnection
from django_faktory.core.protocol.resp import BulkString, Error, Simple
from django_faktory.errors import JobNotFound, NotUnique, UnknownWorker
from tests.core.protocol.splits import every_split

pytestmark = pytest.mark.core

JOB = '{"jid":"12345678","jobtype":"t","queue":"default","args":[1,"é"],"retry":25}'
EVERY = Mutation(command="kill", target="retries", jids=("a", "b"), jobtype="t", regexp="*x*")

SENT = [
    (b'HELLO {"v":2}', commands.Hello()),
    (
        b'HELLO {"v":2,"wid":"w1","hostname":"h","pid":7,"labels":["a"],"pwdhash":"1e44"}',
        commands.Hello(identity=WorkerIdentity(wid="w1", hostname="h", pid=7, labels=("a",)), pwdhash="1e44"),
    ),
    (b"END", commands.End()),
    (b"INFO", commands.Info()),
    (f"PUSH {JOB}".encode(), commands.Push(parse_job(JOB))),
    (f"PUSHB [{JOB}]".encode(), commands.PushBulk([parse_job(JOB)])),
    (b"FETCH critical default", commands.Fetch(("critical", "default"))),
    (b'ACK {"jid":"12345678"}', commands.AckJob("12345678")),
    (
        b'FAIL {"jid":"12345678","errtype":"E","message":"m","backtrace":["a"]}',
        commands.FailJob("12345678", "E", "m", ("a",)),
    ),
    (
        b'BEAT {"wid":"w1","current_state":"quiet","rss_kb":5}',
        commands.BeatWorker(Beat(wid="w1", current_state="quiet", rss_kb=5)),
    ),
    (
        b'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":["a","b"],"jobtype":"t","regexp":"*x*"}}',
        management.Mutate(EVERY),
    ),
    (b"QUEUE PAUSE *", management.PauseQueues(None)),
    (b"QUEUE RESUME a b", management.ResumeQueues(("a", "b"))),
    (b"QUEUE REMOVE a", management.RemoveQueues(("a",))),
    (b"QUEUE LATENCY a", management.QueueLatency(("a",))),
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
    (b"TRACK GET 12345678", tracking.TrackGet("12345678")),
    (
        f'BATCH NEW {{"description":"d","parent_bid":"b-1","complete":{JOB},"success":{JOB}}}'.encode(),
        batches.BatchNew(NewBatch(description="d", parent_bid="b-1", complete=parse_job(JOB), success=parse_job(JOB))),
    ),
    (b"BATCH OPEN b-1", batches.BatchOpen("b-1")),
    (b"BATCH COMMIT b-1", batches.BatchCommit("b-1")),
    (b"BATCH STATUS b-1", batches.BatchAsk("b-1")),
]

ANSWERED = [
    (b"+OK", resp.OK, Simple("OK")),
    (b'+HI {"v":2}', resp.simple('HI {"v":2}'), Simple('HI {"v":2}')),
    (b"$-1", resp.NULL, BulkString(None)),
    (b"$2\r\n{}", resp.bulk("{}"), BulkString("{}")),
    (b'$17\r\n{"state":"quiet"}', resp.bulk('{"state":"quiet"}'), BulkString('{"state":"quiet"}')),
    (f"${len(JOB.encode())}\r\n{JOB}".encode(), resp.bulk(JOB), BulkString(JOB)),
    (b"-ERR unknown command NO", resp.error("unknown command NO"), Error("ERR", "unknown command NO")),
    (b"-ERR Job not found abcdefgh", resp.error(str(JobNotFound("abcdefgh"))), Error("ERR", "Job not found abcdefgh")),
    (b"-ERR unknown worker w1", resp.error(str(UnknownWorker("w1"))), Error("ERR", "unknown worker w1")),
    (
        b"-NOTUNIQUE Job not unique",
        resp.error(str(NotUnique()), code=NotUnique.code),
        Error("NOTUNIQUE", "Job not unique"),
    ),
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


def test_a_server_parses_pipelined_commands_at_every_split():
    """W6: the same for pipelined commands."""
    sent = [SENT[0], *SENT[2:]]  # one HELLO
    for pieces in every_split(b"\r\n".join(line for line, _ in sent) + b"\r\n"):
        assert understood(pieces) == [command for _, command in sent]


@pytest.mark.parametrize(("line", "written", "reply"), ANSWERED)
def test_each_reply_is_written_as_expected_and_parsed_at_every_split(line, written, reply):
    assert written == line + b"\r\n"
    for pieces in every_split(written):
        client, found = ClientConnection(identity=WorkerIdentity()), []
        for piece in pieces:
            client.receive(piece)
            while (one := client.next_reply()) is not None:
                found.append(one)
        assert found == [reply]
