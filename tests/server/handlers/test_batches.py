"""BATCH over the wire: sub-verbs, permission to add members, parent and child batches, and refusals (W26)."""

import json
from contextlib import contextmanager

import pytest
from django.db import connection, transaction

from django_faktory.models import Batch, Job
from django_faktory.store.maintenance import due
from django_faktory.store.store import Store
from tests.waiting import wait_until

pytestmark = pytest.mark.once_if_quick

NEW = {"success": {"jobtype": "Success", "args": [1]}}


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture
def worker(connect):
    return connect(wid="worker-1", hostname="h", pid=1, labels=[])


def ask(client, line):
    """Send a line and return the reply as text, without its `+` or `-` sign."""
    reply = client.ask(line).decode()
    return reply[1:] if reply[:1] in "+-" else reply


def new(client, **batch):
    return ask(client, "BATCH NEW " + json.dumps(batch or NEW))


def push(client, jobtype, bid, number, **fields):
    custom = {"bid": bid} | fields.pop("custom", {})
    job = {"jid": f"member-{number:04d}", "jobtype": jobtype, "args": [], "custom": custom} | fields
    return ask(client, "PUSH " + json.dumps(job))


def work(worker):
    """Fetch a job and acknowledge it; return the job."""
    job = json.loads(ask(worker, "FETCH default"))
    assert ask(worker, "ACK " + json.dumps({"jid": job["jid"]})) == "OK"
    return job


def fail(worker):
    job = json.loads(ask(worker, "FETCH default"))
    assert ask(worker, "FAIL " + json.dumps({"jid": job["jid"], "errtype": "E", "message": "m"})) == "OK"


def progress(client, bid):
    fields = status(client, bid)
    return fields["pending"], fields["failed"], fields["complete_st"], fields["success_st"], "broken" in fields


def status(client, bid):
    return json.loads(ask(client, f"BATCH STATUS {bid}"))


def test_a_batch_runs_its_callback_after_its_member_succeeds(client, worker):
    bid = new(client, description="d", success={"jobtype": "Done", "args": [1], "queue": "default"})
    assert bid.startswith("b-")
    assert push(client, "Member", bid, 1) == "OK"
    assert ask(client, f"BATCH COMMIT {bid}") == "OK"
    fields = status(client, bid)
    assert fields.pop("created_at")
    assert fields == {
        "bid": bid, "description": "d", "total": 1, "pending": 1, "failed": 0, "complete_st": "", "success_st": "",
    }  # fmt: skip
    assert work(worker)["custom"] == {"bid": bid}
    callback = work(worker)
    assert callback["jobtype"] == "Done"
    assert callback["args"] == [1]
    assert callback["custom"] == {"_bid": bid, "_cb": "success"}
    assert status(client, bid)["success_st"] == "2"


def test_a_child_batch_callback_runs_before_the_parent_callback(client, worker):
    parent = new(client, success={"jobtype": "FooJob"})
    push(client, "BatchJob", parent, 1)
    child = new(client, parent_bid=parent, success={"jobtype": "BarJob"})
    push(client, "BatchJob", child, 2)
    assert ask(client, f"BATCH COMMIT {child}") == "OK"
    assert ask(client, f"BATCH COMMIT {parent}") == "OK"
    assert [work(worker)["jobtype"] for _ in range(4)] == ["BatchJob", "BatchJob", "BarJob", "FooJob"]
    assert status(client, child)["parent_bid"] == parent


def test_a_waiting_fetch_gets_a_callback_as_soon_as_it_is_enqueued(client, worker, connect):
    bid = new(client, success={"jobtype": "Done", "queue": "rare"})
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    waiting = connect(wid="worker-2", hostname="h", pid=2, labels=[])
    waiting.send("FETCH rare")
    work(worker)
    assert json.loads(waiting.reply())["jobtype"] == "Done"


def test_a_committed_batch_accepts_jobs_only_from_the_worker_of_a_member(client, worker, connect):
    bid = new(client)
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    assert push(client, "Outsider", bid, 2).startswith(f"ERR batch {bid}: it is committed")
    assert ask(client, f"BATCH OPEN {bid}").startswith(f"ERR batch {bid}")
    json.loads(ask(worker, "FETCH default"))
    assert push(worker, "Inside", bid, 3) == "OK"
    stranger = connect(wid="worker-2", hostname="h", pid=2, labels=[])
    assert push(stranger, "Outsider", bid, 4).startswith("ERR batch")
    assert ask(stranger, f"BATCH OPEN {bid}").startswith(f"ERR batch {bid}")
    assert push(client, "Inside too", bid, 5) == "OK", "a job often pushes over a connection without a wid"
    assert Batch.objects.get().total == 3


def test_no_callback_is_enqueued_between_batch_open_and_commit(client, worker):
    bid = new(client)
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    job = json.loads(ask(worker, "FETCH default"))
    assert ask(worker, f"BATCH OPEN {bid}") == bid
    assert push(worker, "Second", bid, 2) == "OK"
    for jid in (job["jid"], json.loads(ask(worker, "FETCH default"))["jid"]):
        assert ask(worker, "ACK " + json.dumps({"jid": jid})) == "OK"
    assert progress(client, bid) == (0, 0, "", "", False)
    assert push(client, "Third", bid, 3) == "OK", "it is open"
    assert ask(client, f"BATCH COMMIT {bid}") == "OK"
    assert push(client, "Fourth", bid, 4).startswith("ERR batch")
    assert [work(worker)["jobtype"] for _ in range(2)] == ["Third", "Success"]


def test_opening_an_uncommitted_batch_changes_nothing(client):
    bid = new(client)
    before = Batch.objects.values().get()
    assert ask(client, f"BATCH OPEN {bid}") == bid
    assert Batch.objects.values().get() == before


def test_a_commit_after_the_deadline_is_refused_before_maintenance_runs(client):
    bid = new(client)
    Batch.objects.update(expires_at="2020-01-01T00:00:00Z")
    expected = f"ERR batch {bid}: it was not committed in time, and expired"
    assert ask(client, f"BATCH COMMIT {bid}") == expected
    assert push(client, "Late", bid, 1) == expected


def test_a_child_callback_can_reopen_the_parent_and_add_the_next_step(client, worker):
    """Add steps to a parent batch, as in faktory_worker_ruby's complex batch example, over the worker's connection."""

    def add_a_step(parent, success, *members):
        assert ask(worker, f"BATCH OPEN {parent}") == parent
        step = new(worker, parent_bid=parent, success={"jobtype": success})
        assert step.startswith("b-"), step
        for number, member in members:
            assert push(worker, member, step, number) == "OK"
        assert ask(worker, f"BATCH COMMIT {step}") == "OK"
        assert ask(worker, f"BATCH COMMIT {parent}") == "OK"

    def take():
        return json.loads(ask(worker, "FETCH default"))

    def end(job):
        assert ask(worker, "ACK " + json.dumps({"jid": job["jid"]})) == "OK"

    overall = new(client, success={"jobtype": "Done"})
    push(client, "OverallWorkflow", overall, 1)
    ask(client, f"BATCH COMMIT {overall}")
    job = take()
    add_a_step(job["custom"]["bid"], "Step1Done", (2, "A"))
    end(job)
    assert work(worker)["jobtype"] == "A"
    for success, members in (("Step2Done", [(3, "B"), (4, "C")]), ("NoOp", [(5, "H"), (6, "I")])):
        callback = take()
        assert callback["custom"]["_pbid"] == overall
        add_a_step(callback["custom"]["_pbid"], success, *members)
        end(callback)
        assert [work(worker)["jobtype"] for _ in members] == [member for _, member in members]
    assert [work(worker)["jobtype"] for _ in range(2)] == ["NoOp", "Done"]
    assert not Job.objects.exists()


def test_pushb_refuses_only_the_member_of_an_unknown_batch(client):
    good, bad = new(client), "b-unknown"
    jobs = [
        {"jid": f"member-{number:04d}", "jobtype": "M", "args": [], "custom": {"bid": bid}}
        for number, bid in enumerate([good, bad, good])
    ]
    refused = json.loads(ask(client, "PUSHB " + json.dumps(jobs)))
    assert refused == {"member-0001": "no such batch b-unknown"}
    assert status(client, good)["total"] == 2


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("BATCH", "expected NEW {…}, OPEN bid, COMMIT bid or STATUS bid, got nothing"),
        ("BATCH CLOSE b-1", "got CLOSE"),
        ("BATCH NEW", "BATCH NEW"),
        ("BATCH NEW {}", 'expected a "success" or a "complete" callback'),
        ('BATCH NEW {"success":null}', 'expected a "success" or a "complete" callback'),
        ('BATCH NEW {"success":3}', "success: expected a job, got 3"),
        ('BATCH NEW {"success":{}}', "success: jobs must have a jobtype parameter"),
        ('BATCH NEW {"complete":{"jobtype":"A","custom":{"bid":"b-1"}}}', "custom.bid: expected none in a callback"),
        ('BATCH NEW {"description":4,"success":{"jobtype":"A"}}', "description"),
        ('BATCH NEW {"bid":"b-1","parent_bid":"b-1","success":{"jobtype":"A"}}', "bid: expected none"),
        ('BATCH NEW {"parent_bid":"b-unknown","success":{"jobtype":"A"}}', "no such batch b-unknown"),
        ("BATCH OPEN", "BATCH OPEN: expected the id of a batch, got nothing"),
        ("BATCH COMMIT b-unknown", "no such batch b-unknown"),
        ("BATCH STATUS b-unknown", "no such batch b-unknown"),
        ("BATCH STATUS a b", "expected the id of a batch"),
    ],
)
def test_an_invalid_batch_command_is_refused_and_creates_nothing(client, line, error):
    reply = ask(client, line)
    assert reply.startswith("ERR ")
    assert error in reply
    assert not Batch.objects.exists()
    assert not Job.objects.exists()
    assert ask(client, "batch new {}".replace("batch", "BATCH")).startswith("ERR"), "the connection stays open"


def test_batch_subcommands_are_case_insensitive(client):
    bid = ask(client, "BATCH new " + json.dumps(NEW))
    assert ask(client, f"BATCH commit {bid}") == "OK"
    assert json.loads(ask(client, f"BATCH Status {bid}"))["success_st"] == "1"


BOTH = {"complete": {"jobtype": "Complete"}, "success": {"jobtype": "Success"}}
LATER = "2999-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"at": LATER}, 'MUTATE {"cmd":"discard","target":"scheduled"}'),
        ({"at": LATER}, 'MUTATE {"cmd":"clear","target":"scheduled"}'),
        ({}, "QUEUE REMOVE default"),
        ({"retry": 0}, "FAIL"),
        ({"retry": -1}, 'MUTATE {"cmd":"clear","target":"dead"}'),
        ({"custom": {"expires_at": "2020-01-01T00:00:00Z"}}, "expiry"),
    ],
)
def test_a_member_removed_without_success_completes_its_batch(client, worker, fields, line):
    """A batch always settles: the complete callback runs, the success callback does not, as BATCH STATUS reports."""
    bid = new(client, **BOTH)
    assert push(client, "Member", bid, 1, **fields) == "OK"
    assert ask(client, f"BATCH COMMIT {bid}") == "OK"
    if "retry" in fields:
        fail(worker)
    if line == "expiry":
        due.expire(Store())
    elif line != "FAIL":
        assert ask(client, line) == "OK"
    wait_until(lambda: progress(client, bid) == (0, 0, "1", "", True))
    assert work(worker)["jobtype"] == "Complete"
    assert progress(client, bid) == (0, 0, "2", "", True)
    assert not Job.objects.exists()


@pytest.mark.parametrize("way", ["killed", "died"])
def test_a_dead_member_delays_the_success_callback_until_it_is_requeued(client, worker, way):
    bid = new(client, **BOTH)
    if way == "killed":
        push(client, "Member", bid, 1, at=LATER)
        ask(client, 'MUTATE {"cmd":"kill","target":"scheduled"}')
    else:
        push(client, "Member", bid, 1, retry=-1)
        fail(worker)
    ask(client, f"BATCH COMMIT {bid}")
    assert work(worker)["jobtype"] == "Complete"
    assert progress(client, bid) == (1, 1, "2", "", False)
    assert ask(client, 'MUTATE {"cmd":"requeue","target":"dead"}') == "OK"
    assert [work(worker)["jobtype"] for _ in range(2)] == ["Member", "Success"]
    assert progress(client, bid) == (0, 0, "2", "2", False)


def test_flush_removes_batches_and_their_callbacks(client, worker, settings):
    settings.FAKTORY = {"ALLOW_FLUSH": True}
    bid = new(client, **BOTH)
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    job = json.loads(ask(worker, "FETCH default"))
    assert ask(client, "FLUSH") == "OK"
    assert ask(worker, "ACK " + json.dumps({"jid": job["jid"]})) == "OK"
    assert ask(client, f"BATCH STATUS {bid}") == f"ERR no such batch {bid}"
    assert not Job.objects.exists()


def test_a_batch_refuses_new_members_once_a_callback_is_enqueued(client, worker):
    bid = new(client, **BOTH)
    for number in (1, 2):
        push(client, "Member", bid, number)
    ask(client, f"BATCH COMMIT {bid}")
    fail(worker)
    work(worker)
    assert ask(client, 'MUTATE {"cmd":"requeue","target":"retries"}') == "OK"
    assert work(worker)["jobtype"] == "Complete"
    again = json.loads(ask(worker, "FETCH default"))
    assert again["custom"]["bid"] == bid
    expected = f"ERR batch {bid}: a callback of it was enqueued already, nothing can be added any more"
    assert ask(worker, f"BATCH OPEN {bid}") == expected
    assert push(worker, "Late", bid, 3) == expected
    assert new(worker, parent_bid=bid, **NEW) == expected
    assert (Batch.objects.count(), Job.objects.count()) == (1, 1)


def test_a_finished_batch_refuses_a_child_and_accepts_a_second_commit(client, worker):
    bid = new(client)
    ask(client, f"BATCH COMMIT {bid}")
    work(worker)
    assert new(client, parent_bid=bid, **NEW).startswith(f"ERR batch {bid}: a callback of it was enqueued already")
    assert ask(client, f"BATCH COMMIT {bid}") == "OK"
    assert Batch.objects.count() == 1
    assert not Job.objects.exists()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
class TestDuringATransactionOfTheProject:
    """A transaction of the project locks a batch and stays open."""

    @pytest.mark.each_database
    def test_other_clients_are_answered_while_a_commit_waits_for_the_batch_lock(self, client, connect):
        committer, other = connect(), connect(wid="worker-2", hostname="h", pid=1, labels=[])
        bid = new(client)
        with taken(bid):
            committer.send(f"BATCH COMMIT {bid}")
            assert ask(other, 'BEAT {"wid":"worker-2"}') == "OK"
            assert json.loads(ask(other, "INFO"))["faktory"]
        assert committer.reply() == b"+OK"

    @pytest.mark.each_database
    def test_other_jobs_proceed_while_member_reports_wait_for_the_batch_lock(self, client, connect):
        bid = new(client)
        workers = [connect(wid=f"worker-{n}", hostname="h", pid=1, labels=[]) for n in range(3)]
        for number, worker in enumerate(workers):
            push(client, "Member", bid, number)
            assert json.loads(ask(worker, "FETCH default"))["jid"] == f"member-{number:04d}"
        with taken(bid):
            for number, (worker, verb) in enumerate(zip(workers, ["ACK", "FAIL", "ACK"], strict=True)):
                worker.send(f"{verb} " + json.dumps({"jid": f"member-{number:04d}"}))
            assert ask(client, 'PUSH {"jid":"plain-0001","jobtype":"T","args":[]}') == "OK"
            other = connect(wid="worker-4", hostname="h", pid=1, labels=[])
            assert json.loads(ask(other, "FETCH default"))["jid"] == "plain-0001"
            assert ask(other, 'FAIL {"jid":"plain-0001"}') == "OK"
        assert {worker.reply() for worker in workers} == {b"+OK"}
        fields = status(client, bid)
        assert (fields["pending"], fields["failed"]) == (1, 1)

    @pytest.mark.each_database
    def test_a_refused_commit_does_not_repeat_batch_new_of_the_same_set(self, client, connect):
        """The commands wait in the same queue, so the server runs them in one set."""
        first, wrong, maker = connect(), connect(), connect()
        bid = new(client)
        with taken(bid):
            first.send(f"BATCH COMMIT {bid}")
            wait_until(is_waited_for, every_s=0.2, what="the commit waits")  # MariaDB reports the state of 0.1 s ago
            maker.send("BATCH NEW " + json.dumps(NEW))
            wrong.send("BATCH COMMIT b-unknown")
            assert ask(connect(), "INFO")  # the server has read all earlier commands
        assert first.reply() == b"+OK"
        assert wrong.reply().startswith(b"-")
        assert Batch.objects.get(bid=maker.reply().decode())
        assert Batch.objects.count() == 2


def test_the_server_tracks_delivered_batch_members_until_they_end(server, client, connect):
    bid = new(client)
    workers = [connect(wid=f"worker-{n}", hostname="h", pid=1, labels=[]) for n in range(3)]
    for number, worker in enumerate(workers):
        push(client, "Member", bid, number)
        assert json.loads(ask(worker, "FETCH default"))["jid"] == f"member-{number:04d}"
    push(client, "Plain", "", 3)
    assert json.loads(ask(connect(wid="worker-3", hostname="h", pid=1, labels=[]), "FETCH default"))
    known = [server.deliveries.is_batch_member(f"member-{number:04d}") for number in range(4)]
    assert known == [True, True, True, False]
    for verb, number in (("ACK", 0), ("FAIL", 1)):
        assert ask(workers[number], f"{verb} " + json.dumps({"jid": f"member-{number:04d}"})) == "OK"
    known = [server.deliveries.is_batch_member(f"member-{number:04d}") for number in range(3)]
    assert known == [False, False, True]


@contextmanager
def taken(bid):
    with transaction.atomic():
        Batch.objects.select_for_update().get(bid=bid)
        yield


def is_waited_for():
    """Return True if a transaction waits for a row lock."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
        else:
            cursor.execute("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
        return cursor.fetchone()[0]
