"""Differences from the specification and the original server; docs/reference/protocol-rules.md has a row for each."""

import hashlib
import json

import pytest

from django_faktory.models import Job, WorkerProcess
from tests.server.raw import RawClient, push, worker

pytestmark = pytest.mark.once_if_quick

JID = '{"jid":"abcdefgh"}'


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("END now", b"+OK"),
        ("END ", b"+OK"),
        ("INFO all", b'{"now"'),
        (" INFO", b"-ERR unknown command"),
        ("info", b"-ERR unknown command"),
        (f"ACK  {JID}", b"+OK"),
        (f"ACK {JID} ", b"+OK"),
        ('ACK {"jid":"abcdefgh","more":1}', b"+OK"),
        (f"ACK {JID} {JID}", b"-ERR invalid"),
        ("ACK", b"-ERR invalid"),
        (f"FAIL  {JID}", b"-ERR Job not found"),
        ('FAIL {"jid":"abcdefgh","more":1}', b"-ERR Job not found"),
        ('BEAT  {"wid":"wid-1"}', b"+OK"),
        ('BEAT {"wid":"wid-1","more":1}', b"+OK"),
        ('PUSH   {"jid":"abcdefgh","jobtype":"a","args":[]} ', b"+OK"),
        ('PUSH {"jid":"abcdefgh","jobtype":"a","args":[]} more', b"-ERR invalid"),
        ("PUSHB  [] ", b"{}"),
        ("QUEUE  PAUSE  some   ", b"+OK"),
        ("TRACK GET  abcdefgh  ", b"{"),
        ("BATCH STATUS  b-none ", b"-ERR no such batch"),
    ],
)
def test_extra_spaces_and_arguments_are_accepted_except_behind_json(connect, line, answer):
    assert connect(**worker()).ask(line).startswith(answer)


def test_queues_of_a_fetch_may_be_separated_by_any_spaces(connect):
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", queue="second"))
    assert b"abcdefgh" in client.ask("FETCH   first  second  ")


def test_a_line_may_end_in_lf_alone(connect):
    client = connect()
    client.send(push(jid="abcdefgh"), end="\n")
    assert client.reply() == b"+OK"


@pytest.mark.parametrize("hello", [{}, {"wid": "w-1"}, {"wid": "w-1", "hostname": "a"}])
def test_a_hello_needs_neither_version_nor_hostname_nor_pid_nor_labels(server, hello):
    client = RawClient(server.address)
    client.reply()
    assert client.ask(f"HELLO {json.dumps(hello)}") == b"+OK"
    client.close()


def test_connections_of_a_wid_may_give_different_hosts(connect):
    connect(**worker("w-1", hostname="one", pid=1))
    connect(**worker("w-1", hostname="two", pid=2))
    [row] = WorkerProcess.objects.all()
    assert (row.hostname, row.pid) == ("one", 1)


@pytest.mark.parametrize(("spelled", "answer"), [(str.lower, b"+OK"), (str.upper, b"-ERR Invalid password")])
def test_a_password_hash_must_be_lower_case(serve, spelled, answer):
    client = RawClient(serve(password="s3cret").address)
    asked = json.loads(client.reply()[4:])
    digest = f"s3cret{asked['s']}".encode()
    for _ in range(asked["i"]):
        digest = hashlib.sha256(digest).digest()
    assert client.ask(f'HELLO {{"v":2,"pwdhash":"{spelled(digest.hex())}"}}') == answer
    client.close()


def test_a_stopping_server_closes_idle_connections_without_a_message(serve):
    server = serve()
    client = RawClient.identified(server.address, **worker())
    server.stop()
    assert client.is_closed()
    client.close()


def test_a_connection_without_wid_may_fetch_and_end_jobs(connect):
    client = connect()
    client.ask(push(jid="abcdefgh"))
    assert b"abcdefgh" in client.ask("FETCH")
    assert client.ask(f"ACK {JID}") == b"+OK"
    assert not Job.objects.exists()


@pytest.mark.parametrize(("retry", "state"), [(0, None), (-1, "dead"), (1, "retries")])
def test_a_job_with_retry_0_is_dropped_when_it_fails(connect, retry, state):
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", retry=retry))
    client.ask("FETCH")
    assert client.ask(f"FAIL {JID}") == b"+OK"
    assert [job.state for job in Job.objects.all()] == ([state] if state else [])


@pytest.mark.parametrize(("sent", "kept"), [(0, 30), (5, 5), (-1, None)])
def test_backtrace_0_keeps_thirty_lines(connect, sent, kept):
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", backtrace=sent))
    client.ask("FETCH")
    report = {"jid": "abcdefgh", "backtrace": [f"line {number}" for number in range(50)]}
    assert client.ask(f"FAIL {json.dumps(report)}") == b"+OK"
    found = json.loads(Job.objects.get().failure).get("backtrace")
    assert (found and len(found)) == kept


@pytest.mark.parametrize("version", [0, 1, 3, "2", True])
def test_a_hello_version_other_than_2_is_refused(server, version):
    client = RawClient(server.address)
    client.reply()
    assert client.ask(f"HELLO {json.dumps({'v': version})}").startswith(b"-ERR invalid HELLO: v: expected 2")
    assert client.is_closed()
    client.close()


def test_track_get_reports_untracked_jobs_and_unknown_for_missing_ones(connect):
    client = connect()
    client.ask(push(jid="abcdefgh"))
    assert json.loads(client.ask("TRACK GET abcdefgh"))["state"] == "enqueued"
    assert json.loads(client.ask("TRACK GET unknown-1"))["state"] == "unknown"


def test_only_the_same_unique_job_may_be_pushed_twice(connect):
    client = connect()
    unique = {"custom": {"unique_for": 60}}
    assert client.ask(push(jid="abcdefgh", **unique)) == b"+OK"
    assert client.ask(push(jid="abcdefgh", **unique)) == b"+OK"
    assert client.ask(push(jid="another-1", **unique)) == b"-NOTUNIQUE Job not unique"
    assert Job.objects.count() == 1


def test_a_committed_batch_is_opened_only_by_a_worker_of_a_member(connect):
    outside = connect(**worker("outside"))
    bid = outside.ask('BATCH NEW {"success":{"jobtype":"after","args":[]}}').decode()
    outside.ask(push(jid="abcdefgh", custom={"bid": bid}))
    assert outside.ask(f"BATCH COMMIT {bid}") == b"+OK"
    assert outside.ask(f"BATCH OPEN {bid}").startswith(f"-ERR batch {bid}: ".encode())
    inside = connect(**worker("inside"))
    inside.ask("FETCH")
    assert inside.ask(f"BATCH OPEN {bid}").decode() == bid


@pytest.mark.parametrize(
    ("line", "text"), [('BEAT {"wid":"wid-9"}', "-ERR unknown worker wid-9"), ("PUSH {", "-ERR invalid JSON: ")]
)
def test_errors_append_the_reason_to_the_standard_wording(connect, line, text):
    assert connect(**worker()).ask(line).decode().startswith(text)
