"""PUSH, PUSHB, FETCH, ACK, FAIL, BEAT and INFO over raw sockets. Rules: W9 to W22."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory import __version__
from django_faktory.core.protocol.versions import semantic
from django_faktory.models import Job, WorkerProcess
from tests.server.raw import over_both, push, worker
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick


def fetched(client, *queues):
    reply = client.ask(f"FETCH {' '.join(queues) or 'default'}")
    return reply and json.loads(reply)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"jid": "short"}, "jobs must have a reasonable jid parameter: jid: expected a string of 8 to 255"),
        ({"jid": 12345678}, "jobs must have a reasonable jid parameter"),
        ({"jobtype": ""}, "jobs must have a jobtype parameter"),
        ({"args": {}}, "jobs must have an args parameter"),
        ({"queue": "bad queue"}, 'cannot get "bad queue" queue: queue names must match'),
        ({"queue": 5}, "queue: expected a string"),
        ({"priority": 10}, "priority: expected an integer from 1 to 9, got 10"),
        ({"priority": 0}, "priority: expected an integer from 1 to 9, got 0"),
        ({"reserve_for": 86401}, "jobs cannot be reserved for more than one day"),
        ({"retry": "5"}, "retry: expected an integer"),
        ({"at": "tomorrow"}, "invalid timestamp for 'at': "),
        ({"at": "2099-01-01T00:00:00"}, "invalid timestamp for 'at': "),
        ({"at": "2099-01-01T00:00:00Z", "queue": "bad queue"}, "cannot get "),
        ({"created_at": "yesterday"}, "invalid timestamp for 'created_at': "),
        ({"custom": []}, "custom: expected an object"),
        ({"custom": {"expires_at": "soon"}}, "invalid timestamp for 'custom.expires_at': "),
    ],
)
def test_an_invalid_push_is_refused_with_the_reason_and_stores_nothing(connect, fields, message):
    """W9: the error names the broken rule."""
    client = connect()
    answer = client.ask(push(**{"jid": "abcdefgh"} | fields)).decode()
    assert answer.startswith(f"-ERR {message}")
    assert not Job.objects.exists()
    assert client.ask(push(jid="abcdefgh")) == b"+OK"


@pytest.mark.parametrize(
    "fields",
    [
        {"queue": ""},
        {"at": ""},
        {"retry": None},
        {"reserve_for": 1},
        {"retry": -5},
        {"custom": None},
        {"priority": None},
    ],
)
def test_null_and_empty_members_are_accepted_as_defaults(connect, fields):
    """W9: null and empty values select the default; a shorter `reserve_for` is raised to 60 s."""
    client = connect()
    assert client.ask(push(jid="abcdefgh", **fields)) == b"+OK"
    row = Job.objects.get()
    assert (row.queue, row.state) == ("default", "enqueued")
    assert row.reserve_for == (60 if "reserve_for" in fields else 1800)


def test_a_fetched_job_keeps_the_text_that_was_pushed(connect):
    """W11: the server only appends members."""
    args = '[9007199254740993,1.0,"\\u0000é",1e400]'
    sent = f'{{"jid":"verbatim1","zz":1.0,"jobtype":"t","args":{args},"custom":{{"b":1,"a":2}}}}'
    client = connect(**worker())
    assert client.ask(f"PUSH {sent}") == b"+OK"
    reply = client.ask("FETCH default").decode()
    assert reply.startswith(f'{sent[:-1]},"queue":"default","retry":25,"created_at":"')
    assert '"enqueued_at":"' in reply


def test_created_at_is_kept_but_enqueued_at_and_failure_are_replaced(connect):
    """W11: `created_at` is the client's, `enqueued_at` and `failure` are the server's."""
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", created_at="2020-02-02T02:02:02Z", enqueued_at="never", failure={"retry_count": 9}))
    job = fetched(client)
    assert job["created_at"] == "2020-02-02T02:02:02Z"
    assert job["enqueued_at"].startswith(timezone.now().isoformat()[:10])
    assert "failure" not in job


def test_pushb_reports_refused_jobs_and_stores_the_others(connect):
    """W12: errors by jid, "" for jobs without one."""
    client = connect()
    jobs = [
        {"jid": "good-one", "jobtype": "t", "args": []},
        {"jid": "bad-one!", "jobtype": "", "args": []},
        {"jobtype": "t", "args": []},
        5,
        {"jid": "good-two", "jobtype": "t", "args": []},
    ]
    errors = json.loads(client.ask(f"PUSHB {json.dumps(jobs)}"))
    assert set(errors) == {"bad-one!", ""}
    assert errors["bad-one!"].startswith("jobs must have a jobtype parameter")
    assert set(Job.objects.values_list("jid", flat=True)) == {"good-one", "good-two"}


@pytest.mark.parametrize("text", ["[]", "null", "[ ]"])
def test_an_empty_pushb_is_accepted(connect, text):
    """W12: an empty list and null are accepted."""
    assert connect().ask(f"PUSHB {text}") == b"{}"


@pytest.mark.parametrize("text", ["[]", "[1]"])
def test_many_pipelined_pushbs_without_a_valid_job_are_answered(connect, text):
    client = connect()
    client.socket.sendall(f"PUSHB {text}\r\n".encode() * 1000)
    assert all(client.reply() for _ in range(1000))


@pytest.mark.parametrize("text", ["", "{}", "[", '[{"jid":]', "5"])
def test_pushb_of_anything_but_a_json_list_is_refused_as_a_whole(connect, text):
    """W12: other errors are reported per job."""
    assert connect().ask(f"PUSHB {text}").startswith(b"-ERR invalid JSON: ")


def test_fetch_without_a_queue_uses_the_default_queue(connect):
    """W13: the default queue is "default"."""
    client = connect(**worker())
    client.ask(push(jid="abcdefgh"))
    assert json.loads(client.ask("FETCH"))["jid"] == "abcdefgh"


def test_fetch_waits_two_seconds_for_all_its_queues_and_then_returns_null(connect):
    """W13: an empty FETCH returns null after 2 s."""
    client, other = connect(**worker()), connect()
    start = timezone.now()
    assert fetched(client, "first", "second") is None
    assert timedelta(seconds=1.9) < timezone.now() - start < timedelta(seconds=3.5)
    client.send("FETCH first second")
    other.ask(push(jid="abcdefgh", queue="second"))
    assert json.loads(client.reply())["queue"] == "second"


def test_waiting_fetches_are_served_in_order_of_arrival(connect, server):
    clients = [connect(**worker(f"wid-{n}")) for n in range(3)]
    for number, client in enumerate(clients, 1):
        client.send("FETCH default")
        wait_until(lambda number=number: len(server.fetch_queue._waiting) == number)
    wait_until(
        lambda: all(
            waiting_fetch.is_kept and not waiting_fetch.in_claim for waiting_fetch in list(server.fetch_queue._waiting)
        )
    )
    producer = connect()
    for number in range(3):
        producer.ask(push(jid=f"in-order-{number}"))
    assert [json.loads(client.reply())["jid"] for client in clients] == ["in-order-0", "in-order-1", "in-order-2"]


@pytest.mark.parametrize("way", ["close", "half-close"])
def test_a_client_that_disconnects_while_it_waits_takes_no_job(connect, server, way):
    """W14: after a close and after a half-close."""
    gone, producer, stays = connect(**worker("gone")), connect(), connect(**worker("stays"))
    gone.send("FETCH default")
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    if way == "close":
        gone.close()
    else:
        gone.socket.shutdown(1)
        assert gone.reply() is None
        assert gone.is_closed()
    wait_until(lambda: not server.fetch_queue._waiting)
    producer.ask(push(jid="abcdefgh"))
    assert fetched(stays)["jid"] == "abcdefgh"


@pytest.mark.slow
@over_both
def test_clients_that_disconnect_during_a_fetch_lose_no_job(connect, server):
    """W14: closing races with the claim."""
    producer = connect()
    for number in range(60):
        leaver = connect(**worker("leaver"))
        leaver.send("FETCH default")
        producer.send(push(jid=f"raced-{number:03d}"))
        leaver.close()
        assert producer.reply() == b"+OK"
    stays = connect(**worker("stays"))
    seen = set()
    while job := fetched(stays):
        seen.add(job["jid"])
    left = set(Job.objects.filter(wid="leaver").values_list("jid", flat=True))
    assert len(seen | left) == 60
    assert not Job.objects.filter(wid="stays").exclude(jid__in=seen).exists()
    # A reply that the system accepted before it saw the client's reset counts as delivered; only few can be.
    assert len(left) < 60


def test_commands_sent_before_a_half_close_are_answered(connect):
    """W14: a half-close does not cancel commands."""
    client = connect()
    client.send(push(jid="abcdefgh"))
    client.socket.shutdown(1)
    assert client.reply() == b"+OK"
    assert client.is_closed()


def test_fetches_on_all_connections_of_a_quiet_worker_return_null(connect, server):
    """W15: also a FETCH that already waited."""
    first, second = connect(**worker()), connect(**worker())
    first.send("FETCH default")
    wait_until(lambda: len(server.fetch_queue._waiting) == 1)
    assert second.ask('BEAT {"wid":"wid-1","current_state":"quiet"}') == b'{"state":"quiet"}'
    connect().ask(push(jid="abcdefgh"))
    second.send("FETCH default")
    assert first.reply() is None
    assert second.reply() is None
    assert Job.objects.get().state == "enqueued"


@pytest.mark.parametrize("line", ['ACK {"jid":"never-heard-of"}', 'ACK {"jid":""}'])
def test_a_well_formed_ack_of_an_unknown_jid_is_answered_ok(connect, line):
    """W16: unknown jids are accepted too."""
    assert connect().ask(line) == b"+OK"


@pytest.mark.parametrize("line", ["ACK", "ACK {}", "ACK []", 'ACK {"jid":5}', "ACK {"])
def test_a_malformed_ack_is_refused(connect, line):
    assert connect().ask(line).startswith(b"-ERR invalid ACK")


def test_ack_and_fail_of_another_worker_are_ok_and_change_nothing(connect):
    """W16, W17: only the job's worker, or a connection without wid, may end the job."""
    holder, stranger = connect(**worker("holder")), connect(**worker("stranger"))
    holder.ask(push(jid="abcdefgh"))
    fetched(holder)
    assert stranger.ask('ACK {"jid":"abcdefgh"}') == b"+OK"
    assert stranger.ask('FAIL {"jid":"abcdefgh"}') == b"+OK"
    assert Job.objects.get().state == "working"
    assert connect().ask('ACK {"jid":"abcdefgh"}') == b"+OK"
    assert not Job.objects.exists()


def test_a_backtrace_with_null_does_not_leave_its_job_working(connect):
    client = connect(**worker())
    client.ask(push(jid="abcdefgh"))
    fetched(client)
    assert client.ask('FAIL {"jid":"abcdefgh","backtrace":[null]}') == b"+OK"
    assert Job.objects.get().state == "retries"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('FAIL {"jid":"never-heard-of"}', b"-ERR Job not found never-heard-of"),
        ("FAIL {}", b"-ERR missing JID"),
        ('FAIL {"jid":"abcdefgh","backtrace":"x"}', b"-ERR invalid FAIL"),
        ('FAIL {"jid":"abcdefgh","message":5}', b"-ERR invalid FAIL"),
    ],
)
def test_an_invalid_fail_is_refused_with_the_reason(connect, line, answer):
    """W17: the error line gives the reason."""
    assert connect().ask(line).startswith(answer)


def test_a_failure_report_is_truncated_at_character_boundaries(connect):
    """W17: errtype and message are limited in bytes, the backtrace in lines."""
    client = connect(**worker())
    client.ask(push(jid="abcdefgh"))
    fetched(client)
    report = {"jid": "abcdefgh", "errtype": "é" * 90, "message": "é" * 900, "backtrace": ["x"] * 50}
    assert client.ask(f"FAIL {json.dumps(report)}") == b"+OK"
    failure = json.loads(Job.objects.get().failure)
    assert (failure["errtype"], failure["message"], len(failure["backtrace"])) == ("é" * 50, "é" * 500, 30)


def test_a_retried_job_is_fetched_with_its_failure(connect):
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", retry=1))
    fetched(client)
    client.ask('FAIL {"jid":"abcdefgh","errtype":"E","message":"m"}')
    Job.objects.update(state="enqueued", enqueued_at=timezone.now(), run_at=None)
    failure = fetched(client)["failure"]
    assert (failure["errtype"], failure["message"], failure["retry_count"], failure["remaining"]) == ("E", "m", 0, 1)
    assert "backtrace" not in failure  # the original server leaves an empty one out


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('BEAT {"wid":"wid-1","rss_kb":5}', b"+OK"),
        ('BEAT {"wid":"wid-1","current_state":"strange"}', b"+OK"),
        ('BEAT {"wid":"wid-1","current_state":"terminate"}', b'{"state":"terminate"}'),
        ("BEAT {}", b"-ERR invalid BEAT"),
        ("BEAT", b"-ERR invalid BEAT"),
        ('BEAT {"wid":5}', b"-ERR invalid BEAT"),
    ],
)
def test_a_beat_is_answered_with_the_state_to_enter(connect, line, answer):
    """W21: the reply is a state or OK."""
    client = connect(**worker())
    assert client.ask(line).startswith(answer)


def test_beat_needs_a_connection_with_a_wid_but_may_name_another(connect):
    """W21: a worker may beat for another wid."""
    connect(**worker("wid-2"))
    assert connect().ask('BEAT {"wid":"wid-2"}').startswith(b"-ERR BEAT: expected a connection that gave its wid")
    assert connect(**worker("wid-1")).ask('BEAT {"wid":"wid-2"}') == b"+OK"


def test_a_beat_of_a_lost_worker_is_refused_and_closes_its_connections(connect):
    """W20, W21: the server closes every connection of that wid."""
    first, second, other = connect(**worker()), connect(**worker()), connect(**worker("other"))
    WorkerProcess.objects.filter(wid="wid-1").delete()
    assert first.ask('BEAT {"wid":"wid-1"}') == b"-ERR unknown worker wid-1"
    assert first.is_closed()
    assert second.is_closed()
    assert other.ask('BEAT {"wid":"other"}') == b"+OK"


def test_info_has_the_same_members_as_the_original_server(connect):
    """W22: the same members as the original server."""
    client = connect(**worker())
    client.ask(push(jid="abcdefgh", queue="mail"))
    info = json.loads(client.ask("INFO please"))
    assert set(info) == {"now", "server_utc_time", "faktory", "server"}
    assert set(info["faktory"]) == {
        "queues", "sets", "tasks", "total_failures", "total_processed", "total_enqueued", "total_queues",
    }  # fmt: skip
    assert info["faktory"]["queues"]["mail"] == 1
    assert set(info["faktory"]["tasks"]) == {"Busy", "Dead", "Retries", "Scheduled", "Workers"}
    assert set(info["server"]) == {
        "description", "faktory_version", "uptime", "connections", "command_count", "used_memory_mb",
    }  # fmt: skip
    assert info["server"]["faktory_version"] == semantic(__version__)
    assert info["server"]["connections"] == 1
    assert info["server"]["command_count"] == 3
