"""RemoteBroker, byte by byte, against a scripted server on loopback: exchanges, lost connections, refusals."""

import json
import logging
import os
import re
import threading

import pytest

from django_faktory.brokers import client as connections
from django_faktory.brokers.remote import BULK_BYTES, BULK_JOBS, MUTATE_JIDS, RemoteBroker
from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import (
    Ack,
    Beat,
    FetchRequest,
    Reservation,
    WorkerIdentity,
    failure,
    new_job,
    parse_instant,
)
from django_faktory.core.protocol import resp
from django_faktory.core.protocol.management import Mutate
from django_faktory.errors import (
    BrokerUnavailable,
    CommandRefused,
    JobNotFound,
    NotUnique,
    ProtocolError,
    UnknownWorker,
)
from tests.brokers.scripted import CLOSE, RESET, Talk, scripted, session
from tests.waiting import wait_until

pytestmark = pytest.mark.core

ME = WorkerIdentity(wid="wid-me", hostname="localhost", pid=7, labels=("python",))
MY_HELLO = b'HELLO {"v":2,"wid":"wid-me","hostname":"localhost","pid":7,"labels":["python"]}\r\n'
OK = resp.OK
NULL = resp.NULL
ANY = FetchRequest(queues=("default",), wid="wid-me")


def job(jid="job-0001", args=(1,)):
    return new_job(jid=jid, jobtype="t", args=list(args))


def push(one):
    return f"PUSH {one.text}\r\n".encode()


def ack(jid):
    return f'ACK {{"jid":"{jid}"}}\r\n'.encode()


def fail(jid, errtype="E", message="m", backtrace=""):
    details = f'{{"jid":"{jid}","errtype":"{errtype}","message":"{message}","backtrace":[{backtrace}]}}'
    return f"FAIL {details}\r\n".encode()


# --- the verbs ---


def test_several_jobs_are_pushed_in_one_pushb_with_a_result_each():
    """W12: one reply names the refused jobs, and each caller gets its result."""
    jobs = [job(f"job-000{number}") for number in range(3)]
    line = f"PUSHB [{','.join(one.text for one in jobs)}]\r\n".encode()
    with Talk(session((line, resp.bulk('{"job-0001":"no such queue"}')), (line, resp.bulk("{}")))) as broker:
        first, second, third = broker.push(jobs)
        assert (first, third) == (None, None)
        assert isinstance(second, CommandRefused)
        assert str(second) == "no such queue"
        assert broker.push(jobs) == [None] * 3


def test_a_large_push_is_split_into_several_pushb_commands():
    jobs = [job(f"job-{number:05}") for number in range(BULK_JOBS + 2)]
    chunks = [jobs[:BULK_JOBS], jobs[BULK_JOBS:]]
    lines = [f"PUSHB [{','.join(one.text for one in chunk)}]\r\n".encode() for chunk in chunks]
    with Talk(session(*((line, resp.bulk("{}")) for line in lines))) as broker:
        assert broker.push(jobs) == [None] * len(jobs)


def test_a_mutation_of_many_jids_is_sent_in_chunks():
    jids = tuple(f"job-{number:05}" for number in range(MUTATE_JIDS + 1))
    parts = [Mutation(command="kill", target="dead", jids=chunk) for chunk in (jids[:MUTATE_JIDS], jids[MUTATE_JIDS:])]
    with Talk(session(*((Mutate(part).line(), OK) for part in parts))) as broker:
        broker.mutate(Mutation(command="kill", target="dead", jids=jids))


def test_a_job_larger_than_the_bulk_limit_is_pushed_alone():
    large, small = job("job-large", ["é" * (BULK_BYTES // 2)]), job("job-small")
    with Talk(session((push(small), OK), (push(large), OK), (push(small), OK))) as broker:
        assert broker.push([small, large, small]) == [None] * 3


def test_a_refused_push_carries_the_code_and_message_of_the_server():
    text = "jobs must have a jobtype parameter"
    with Talk(session((push(job()), resp.error(text, code="ODD")))) as broker:
        [refusal] = broker.push([job()])
    assert isinstance(refusal, CommandRefused)
    assert (refusal.code, str(refusal)) == ("ODD", text)


def test_notunique_is_reported_for_single_and_bulk_pushes():
    """W27: for both kinds of reply the result is NotUnique."""
    one, other = job(), job("job-0002")
    both = f"PUSHB [{one.text},{other.text}]\r\n".encode()
    reply = resp.bulk('{"job-0002":"NOTUNIQUE Job not unique"}')
    with Talk(session((push(one), b"-NOTUNIQUE Job not unique\r\n"), (both, reply))) as broker:
        [refusal] = broker.push([one])
        assert isinstance(refusal, NotUnique)
        assert (refusal.jid, str(refusal)) == (one.jid, "Job not unique")
        taken, refused = broker.push([one, other])
    assert taken is None
    assert isinstance(refused, NotUnique)


FETCHED = (
    '{"retry":24,"failure":{"retry_count":0,"remaining":24,"message":"m"},"jid":"job-0001","queue":"q","jobtype":"t",'
    '"created_at":"2026-05-01T12:00:00.5Z","enqueued_at":"2026-05-01T12:00:01Z","args":[9007199254740993,1.0,"é"],'
    '"reserve_for":60}'
)


def test_a_fetched_job_is_a_reservation_with_its_text_verbatim():
    with Talk(session((b"FETCH q default\r\n", resp.bulk(FETCHED)))) as broker:
        [[got]] = broker.fetch([FetchRequest(queues=("q", "default"), wid="wid-me", count=5)])
    assert got == Reservation(
        jid="job-0001",
        queue="q",
        text=FETCHED,
        wid="wid-me",
        attempt=2,
        created_at=parse_instant("created_at", "2026-05-01T12:00:00.5Z"),
        failure='{"retry_count":0,"remaining":24,"message":"m"}',
        reserve_for=60,
    )


@pytest.mark.parametrize(
    "members",
    [
        "",
        f',"reserve_for":{"9" * 5000}',
        ',"queue":7,"reserve_for":"x","created_at":"garbage","failure":[]',
        ',"reserve_for":-1,"created_at":5',
    ],
)
def test_a_fetched_job_with_invalid_members_is_still_returned(members):
    """The job is reserved already: a member that cannot be parsed must not lose it."""
    text = f'{{"jid":"job-0001","args":[{"9" * 5000}]{members}}}'
    with Talk(session((b"FETCH default\r\n", resp.bulk(text)))) as broker:
        [[got]] = broker.fetch([ANY])
    assert got == Reservation(jid="job-0001", queue="default", text=text, wid="wid-me", attempt=1)


@pytest.mark.parametrize("reply", [resp.bulk("nonsense"), resp.bulk('{"jid":7}'), resp.bulk("{}"), resp.OK])
def test_a_fetch_reply_that_is_not_a_job_raises_protocol_error(reply):
    with Talk(session((b"FETCH default\r\n", reply))) as broker, pytest.raises(ProtocolError, match="expected a"):
        broker.fetch([ANY])


def test_a_refused_fetch_raises_command_refused_with_the_reason():
    said = b"-ERR must call fetch with at least one queue\r\n"
    with Talk(session((b"FETCH default\r\n", said))) as broker, pytest.raises(CommandRefused, match="must call fetch"):
        broker.fetch([ANY])


def test_acks_are_pipelined_and_answered_in_order(caplog):
    sent = ack("job-0001") + ack("job-0002") + ack("job-0003")
    with Talk(session((sent, OK + b"-ERR invalid ACK {}\r\n" + OK))) as broker:
        assert broker.ack([Ack(jid=f"job-000{number}") for number in (1, 2, 3)]) == [True, False, True]
    assert "ACK refused jid=job-0002" in caplog.text


def test_failures_are_pipelined_and_answered_in_order():
    sent = fail("job-0001", backtrace='"a","b"') + fail("job-0002") + fail("job-0003")
    reports = [failure(jid=f"job-000{number}", errtype="E", message="m") for number in (2, 3)]
    first = failure(jid="job-0001", errtype="E", message="m", backtrace=["a", "b"])
    replies = OK + resp.error("Job not found job-0002") + resp.error("invalid FAIL {}", code="ODD")
    with Talk(session((sent, replies))) as broker:
        done, unknown, refused = broker.fail([first, *reports])
    assert done is True
    assert isinstance(unknown, JobNotFound)
    assert unknown.jid == "job-0002"
    assert isinstance(refused, CommandRefused)
    assert (refused.code, str(refused)) == ("ODD", "invalid FAIL {}")


def test_a_thousand_acks_are_pipelined_in_chunks():
    jids = [f"job-{number:05}" for number in range(1000)]
    goes = [jids[start : start + connections.PIPELINE] for start in range(0, 1000, connections.PIPELINE)]
    with Talk(session(*((b"".join(map(ack, go)), OK * len(go)) for go in goes))) as broker:
        assert broker.ack([Ack(jid=jid) for jid in jids]) == [True] * 1000


def test_release_sends_a_fail_so_that_the_job_runs_again():
    held = [Reservation(jid=f"job-000{number}", queue="q", text="{}", wid="w", attempt=1) for number in (1, 2)]
    sent = b"".join(fail(one.jid, "WorkerShutdown", "released before it began") for one in held)
    with Talk(session((sent, OK + b"-ERR Job not found job-0002\r\n"))) as broker:
        assert broker.release(held) == 1


def test_beat_returns_the_state_to_enter():
    """W21: real servers send a bulk string, the specification has a simple string."""
    sent = b"".join(b'BEAT {"wid":"w%d"}\r\n' % number for number in range(6))
    replies = OK + resp.bulk('{"state":"quiet"}') + b'+{"state": "terminate"}\r\n' + resp.error("unknown worker w3")
    with Talk(session((sent, replies + b"-ERR Unknown worker w4\r\n-ERR invalid BEAT {}\r\n"))) as broker:
        *states, gone, gone_too, refused = broker.beat([Beat(wid=f"w{number}") for number in range(6)])
    assert states == ["", "quiet", "terminate"]
    assert isinstance(gone, UnknownWorker)
    assert isinstance(gone_too, UnknownWorker)
    assert gone_too.wid == "w4"
    assert isinstance(refused, CommandRefused)


@pytest.mark.parametrize(("reply", "answer"), [(resp.bulk("[]"), ""), (resp.bulk("{}"), ""), (resp.bulk(None), "")])
def test_a_beat_reply_without_a_state_returns_an_empty_state(reply, answer):
    with Talk(session((b'BEAT {"wid":"w","rss_kb":5}\r\n', reply))) as broker:
        assert broker.beat([Beat(wid="w", rss_kb=5)]) == [answer]


def test_a_garbled_beat_reply_is_returned_as_a_protocol_error():
    with Talk(session((b'BEAT {"wid":"w"}\r\n', resp.simple("what")))) as broker:
        [answer] = broker.beat([Beat(wid="w")])
    assert isinstance(answer, ProtocolError)


@pytest.mark.parametrize(
    ("info", "numbers"),
    [({"faktory": {"queues": {"q": 1}}, "now": ""}, {"queues": {"q": 1}}), ({}, {}), ({"faktory": 7}, {})],
)
def test_info_returns_the_faktory_section_of_the_reply(info, numbers):
    with Talk(session((b"INFO\r\n", resp.bulk(json.dumps(info))))) as broker:
        assert broker.info() == numbers


@pytest.mark.parametrize("reply", [resp.bulk("[]"), resp.OK])
def test_an_info_reply_of_another_shape_raises_protocol_error(reply):
    with Talk(session((b"INFO\r\n", reply))) as broker, pytest.raises(ProtocolError, match="expected a"):
        broker.info()


# --- identity


def test_a_second_hello_registers_the_worker_again():
    """This happens after UnknownWorker: the server has forgotten the worker, though the connection is open."""
    with Talk(session(hello=MY_HELLO), session((b'BEAT {"wid":"wid-me"}\r\n', OK), hello=MY_HELLO)) as broker:
        broker.hello(ME)
        broker.hello(ME)
        assert broker.beat([Beat(wid="wid-me")]) == [""]


def test_each_thread_has_its_own_connection_and_bye_sends_end_on_all():
    """W4: every connection is closed with END."""
    last = (b"END\r\n", OK)
    with Talk(*[session((b"FETCH default\r\n", NULL), last, hello=MY_HELLO)] * 2, identity=ME) as broker:
        fetched, leave = threading.Barrier(2), threading.Event()

        def other():
            broker.fetch([ANY])
            fetched.wait(60)
            leave.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        broker.fetch([ANY])
        fetched.wait(60)
        broker.bye(["wid-me"])
        leave.set()
        thread.join(60)


def test_bye_keeps_the_connections_of_other_workers_open():
    with Talk(
        session((b"FETCH default\r\n", NULL), (b"FETCH default\r\n", NULL), hello=MY_HELLO), identity=ME
    ) as broker:
        broker.fetch([ANY])
        broker.bye(["wid-other"])
        broker.fetch([ANY])


def test_bye_interrupts_a_thread_that_waits_for_a_reply():
    ended = []

    def fetch():
        with pytest.raises(BrokerUnavailable):
            broker.fetch([ANY])
        ended.append(True)

    talk = Talk(session((b"FETCH default\r\n", None), hello=MY_HELLO), identity=ME, goodbye_timeout_s=0.02)
    with talk as broker:
        thread = threading.Thread(target=fetch)
        thread.start()
        wait_until(lambda: talk.server.heard[-1:] == [b"FETCH default\r\n"])
        broker.bye(["wid-me"])
        thread.join(10)  # less than the time limit of a reply
    assert ended


def test_a_locally_closed_connection_is_replaced():
    with Talk(session((push(job()), OK)), session((push(job()), OK))) as broker:
        broker.push([job()])
        broker._local.connection._socket.close()
        assert broker.push([job()]) == [None]


def test_bye_accepts_a_server_that_closes_without_replying_to_end():
    """The original server closes that way."""
    with Talk(session((b"FETCH default\r\n", NULL), (b"END\r\n", CLOSE), hello=MY_HELLO), identity=ME) as broker:
        broker.fetch([ANY])
        broker.bye(["wid-me"])
        broker.bye(["wid-me"])


def test_the_broker_can_be_used_again_after_bye():
    with Talk(session((b"END\r\n", OK), hello=MY_HELLO), session((push(job()), OK), hello=MY_HELLO)) as broker:
        broker.hello(ME)
        broker.bye(["wid-me"])
        assert broker.push([job()]) == [None]


def test_the_connection_of_an_ended_thread_is_closed():
    with Talk(session((push(job()), OK))) as broker:
        thread = threading.Thread(target=broker.push, args=[[job()]])
        thread.start()
        thread.join(60)
        # The script ends only when the connection was closed; an unclosed socket would be a warning, so an error.


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # of the script, not the broker
def test_a_forked_process_opens_its_own_connection_and_leaves_the_parents_alone():
    with Talk(session((push(job()), OK), (push(job()), OK)), session((push(job()), OK))) as broker:
        broker.push([job()])
        if (pid := os.fork()) == 0:
            try:
                broker.bye([""])
                os._exit(0 if broker.push([job()]) == [None] else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert broker.push([job()]) == [None]


WRONG = [NULL, b"+PONG\r\n", resp.bulk("OK"), resp.bulk("[1]")]
"""Replies that are no error, and say nothing about the command."""

ALONE = {
    "ack": (lambda broker: broker.ack([Ack(jid="job-0001")]), ack("job-0001")),
    "fail": (lambda broker: broker.fail([failure(jid="job-0001", errtype="E", message="m")]), fail("job-0001")),
    "push": (lambda broker: broker.push([job()]), push(job())),
    "pushb": (lambda broker: broker.push([job()] * 2), f"PUSHB [{job().text},{job().text}]\r\n".encode()),
    "flush": (lambda broker: broker.flush(), b"FLUSH\r\n"),
    "open": (lambda broker: broker.open_batch("b-1"), b"BATCH OPEN b-1\r\n"),
    "commit": (lambda broker: broker.commit_batch("b-1"), b"BATCH COMMIT b-1\r\n"),
}


@pytest.mark.parametrize(
    ("verb", "reply"),
    # Any text may be the id of a batch.
    [(verb, reply) for verb in ALONE for reply in (WRONG[:2] if verb == "open" else WRONG)],
)
def test_a_reply_of_another_shape_is_no_success_and_drops_the_connection(verb, reply):
    call, line = ALONE[verb]
    with Talk(session((line, reply)), session((b"INFO\r\n", resp.bulk("{}")))) as broker:
        with pytest.raises(BrokerUnavailable, match=r"expected (OK|a bulk|a JSON|the id)"):
            call(broker)
        broker.info()


def test_a_hello_without_ok_is_no_connection():
    with Talk(session(welcome=NULL)) as broker, pytest.raises(BrokerUnavailable, match="expected OK, got null"):
        broker.info()


# --- failures


@pytest.mark.parametrize("verb", ["push", "ack", "fail", "info", "beat"])
@pytest.mark.parametrize("how", [CLOSE, RESET])
def test_an_idempotent_command_is_retried_after_a_lost_connection(verb, how, caplog):
    """W10, W16: the command is sent again over a new connection, without an error for the caller."""
    caplog.set_level(logging.INFO)
    call, line, reply = {
        "push": (lambda broker: broker.push([job()]), push(job()), OK),
        "ack": (lambda broker: broker.ack([Ack(jid="job-0001")]), ack("job-0001"), OK),
        "fail": (
            lambda broker: broker.fail([failure(jid="job-0001", errtype="E", message="m")]),
            fail("job-0001"),
            OK,
        ),
        "info": (lambda broker: broker.info(), b"INFO\r\n", resp.bulk("{}")),
        "beat": (lambda broker: broker.beat([Beat(wid="w")]), b'BEAT {"wid":"w"}\r\n', OK),
    }[verb]
    with Talk(session((line, reply), (line, how)), session((line, reply))) as broker:
        first = call(broker)
        assert call(broker) == first
    assert "connection lost, trying once more" in caplog.text


def test_a_command_is_retried_only_once():
    with Talk(session((push(job()), OK), (push(job()), CLOSE)), session((push(job()), CLOSE))) as broker:
        broker.push([job()])
        with pytest.raises(BrokerUnavailable, match="closed the connection"):
            broker.push([job()])


def test_a_command_is_not_retried_if_a_new_connection_is_lost():
    with Talk(session((push(job()), CLOSE))) as broker, pytest.raises(BrokerUnavailable, match="closed"):
        broker.push([job()])


@pytest.mark.parametrize("how", [CLOSE, RESET])
def test_a_fetch_with_a_lost_reply_raises_and_is_not_retried(how):
    """The server may have reserved a job for the lost reply."""
    with Talk(session((b"FETCH default\r\n", NULL), (b"FETCH default\r\n", how))) as broker:
        assert broker.fetch([ANY]) == [[]]
        with pytest.raises(BrokerUnavailable):
            broker.fetch([ANY])


def test_a_connection_closed_while_idle_is_noticed_before_a_fetch_is_sent():
    with Talk(session((b"FETCH default\r\n", NULL), (b"", CLOSE)), session((b"FETCH default\r\n", NULL))) as broker:
        assert broker.fetch([ANY]) == [[]]
        connections.select.select([broker._local.connection._socket], [], [], 10)
        assert broker.fetch([ANY]) == [[]]


def test_a_fetched_job_is_returned_even_if_a_later_fetch_fails():
    found = (b"FETCH a\r\n", resp.bulk('{"jid":"job-0001"}'))
    with Talk(session(found, (b"FETCH b\r\n", CLOSE))) as broker:
        [[got], *others] = broker.fetch([FetchRequest(queues=(name,)) for name in "abc"])
    assert got.jid == "job-0001"
    assert others == [[], []]


TEMPORARY = [
    "database unavailable", "shutdown in progress", "Shutdown in progress", "too many connections: 2001",
    "redis: client is closed", "context deadline exceeded", "EOF", "unexpected EOF", "internal error", "no more today",
    "dial unix /db/redis.sock: connect: no such file or directory", "read: invalid argument",
    "MISCONF Redis is configured to save RDB snapshots", "LOADING Redis is loading the dataset in memory",
    "OOM command not allowed when used memory > 'maxmemory'",
]  # fmt: skip


@pytest.mark.parametrize("text", TEMPORARY)
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda broker: broker.push([job()]), push(job())),
        (lambda broker: broker.ack([Ack(jid="job-0001")]), ack("job-0001")),
        (lambda broker: broker.fail([failure(jid="job-0001", errtype="E", message="m")]), fail("job-0001")),
        (lambda broker: broker.fetch([ANY]), b"FETCH default\r\n"),
    ],
    ids=["push", "ack", "fail", "fetch"],
)
def test_server_errors_that_are_not_surely_permanent_raise_broker_unavailable(call, line, text):
    """W8, W28, W30: an ACK that counted as refused would let its job run twice."""
    with Talk(session((line, resp.error(text)))) as broker, pytest.raises(BrokerUnavailable, match=re.escape(text)):
        call(broker)


def test_one_report_that_the_server_cannot_take_now_holds_no_other_back():
    sent = ack("job-0001") + ack("job-0002")
    reports = [failure(jid=f"job-000{number}", errtype="E", message="m") for number in (3, 4)]
    with Talk(
        session((sent, OK + resp.error("EOF"))), session((fail("job-0003") + fail("job-0004"), resp.error("EOF") + OK))
    ) as broker:
        done, later = broker.ack([Ack(jid=f"job-000{number}") for number in (1, 2)])
        later_too, failed = broker.fail(reports)
    assert (done, failed) == (True, True)
    assert isinstance(later, BrokerUnavailable)
    assert isinstance(later_too, BrokerUnavailable)


PERMANENT = [
    "invalid JSON: unexpected end of JSON input", "jobs must have a reasonable jid parameter",
    "jobs cannot be reserved for more than one day", "unknown command PUSHX", "missing JID", "command too long",
    'cannot get "bad queue" queue: queue names must match \\A[a-zA-Z0-9._-]+\\z', "custom.lock: expected a key, got 5",
    "invalid timestamp for 'at': \"x\"", "batch b-1: it was not committed in time", "no such batch b-1",
    "invalid payload: the database cannot store a character that its encoding does not have", "MALFORMED job",
    "batch subsystem is only available in Faktory Enterprise",
]  # fmt: skip


@pytest.mark.parametrize("text", PERMANENT)
def test_server_errors_that_no_repetition_changes_refuse_a_job_alone_and_in_a_set(text):
    one, other = job(), job("job-0002")
    both = f"PUSHB [{one.text},{other.text}]\r\n".encode()
    reply = resp.bulk(json.dumps({"job-0002": text}))
    with Talk(session((push(one), resp.error(text)), (both, reply))) as broker:
        [alone], [_, in_set] = broker.push([one]), broker.push([one, other])
    assert isinstance(alone, CommandRefused)
    assert isinstance(in_set, CommandRefused)


def test_too_many_connections_as_a_greeting_raises_broker_unavailable():
    """W8: "too many connections" is a temporary error."""
    with Talk([(b"", b"-ERR too many connections\r\n")]) as broker, pytest.raises(BrokerUnavailable, match="too many"):
        broker.push([job()])


def test_a_silent_server_raises_broker_unavailable_after_the_timeout():
    sessions = [session((push(job()), None)), [(b"", b"")]]
    with Talk(*sessions, reply_timeout_s=1.0) as broker:
        for _ in sessions:
            with pytest.raises(BrokerUnavailable, match="timed out"):
                broker.push([job()])


def test_a_port_without_a_server_raises_broker_unavailable():
    with scripted() as server:
        url = server.url()
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:\d+ is unavailable"):
        RemoteBroker(url).push([job()])


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b'+HI {"v":3}\r\n', b"\x15\x03"]
)
def test_an_unexpected_greeting_raises_broker_unavailable(greeting):
    with Talk([(b"", greeting)]) as broker, pytest.raises(BrokerUnavailable, match="expected"):
        broker.push([job()])


def test_an_overlong_command_is_refused_even_if_the_server_disconnects():
    """W7: otherwise the job would be sent again without end."""
    large = job(args=["x" * 16 * 1024 * 1024])
    refused = b"-ERR command too long: expected at most 100 bytes in a line\r\n"
    with Talk(session((push(large)[:100], refused), (b"", CLOSE))) as broker:
        [refusal] = broker.push([large])
    assert isinstance(refusal, CommandRefused)


def test_a_partly_written_set_raises_broker_unavailable():
    reports = [failure(jid="job-0001", backtrace=["x" * 1000] * 200)] * 80
    with Talk(session((b'FAIL {"jid"', CLOSE))) as broker, pytest.raises(BrokerUnavailable):
        broker.fail(reports)
