"""BATCH over the wire: the sub-verbs, who may add, the seed's parent and child, and what is refused (W26)."""

import json

import pytest

from django_faktory.models import Batch, Job

NEW = {"success": {"jobtype": "Success", "args": [1]}}


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture
def worker(connect):
    return connect(wid="worker-1", hostname="h", pid=1, labels=[])


def ask(client, line):
    """The reply as text, without the sign of its kind."""
    reply = client.ask(line).decode()
    return reply[1:] if reply[:1] in "+-" else reply


def new(client, **batch):
    return ask(client, "BATCH NEW " + json.dumps(batch or NEW))


def push(client, jobtype, bid, number):
    job = {"jid": f"member-{number:04d}", "jobtype": jobtype, "args": [], "custom": {"bid": bid}}
    return ask(client, "PUSH " + json.dumps(job))


def work(worker):
    """Take a job and do it; returns it."""
    job = json.loads(ask(worker, "FETCH default"))
    assert ask(worker, "ACK " + json.dumps({"jid": job["jid"]})) == "OK"
    return job


def status(client, bid):
    return json.loads(ask(client, f"BATCH STATUS {bid}"))


def test_a_batch_from_new_to_its_callback(client, worker):
    bid = new(client, description="d", success={"jobtype": "Done", "args": [1], "queue": "default"})
    assert bid.startswith("b-")
    assert push(client, "Member", bid, 1) == "OK"
    assert ask(client, f"BATCH COMMIT {bid}") == "OK"
    told = status(client, bid)
    assert told.pop("created_at")
    assert told == {
        "bid": bid, "description": "d", "total": 1, "pending": 1, "failed": 0, "complete_st": "", "success_st": "",
    }  # fmt: skip
    assert work(worker)["custom"] == {"bid": bid}
    callback = work(worker)
    assert callback["jobtype"] == "Done"
    assert callback["args"] == [1]
    assert callback["custom"] == {"_bid": bid, "_cb": "success"}
    assert status(client, bid)["success_st"] == "2"


def test_the_seeds_example_bar_always_runs_before_foo(client, worker):
    parent = new(client, success={"jobtype": "FooJob"})
    push(client, "BatchJob", parent, 1)
    child = new(client, parent_bid=parent, success={"jobtype": "BarJob"})
    push(client, "BatchJob", child, 2)
    assert ask(client, f"BATCH COMMIT {child}") == "OK"
    assert ask(client, f"BATCH COMMIT {parent}") == "OK"
    assert [work(worker)["jobtype"] for _ in range(4)] == ["BatchJob", "BatchJob", "BarJob", "FooJob"]
    assert status(client, child)["parent_bid"] == parent


def test_who_waits_for_a_callbacks_queue_gets_it_at_once(client, worker, connect):
    bid = new(client, success={"jobtype": "Done", "queue": "rare"})
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    waiting = connect(wid="worker-2", hostname="h", pid=2, labels=[])
    waiting.send("FETCH rare")
    work(worker)
    assert json.loads(waiting.reply())["jobtype"] == "Done"


def test_only_who_runs_a_member_may_add_after_commit(client, worker, connect):
    bid = new(client)
    push(client, "Member", bid, 1)
    ask(client, f"BATCH COMMIT {bid}")
    assert push(client, "Outsider", bid, 2).startswith(f"ERR batch {bid}: it is committed")
    assert ask(client, f"BATCH OPEN {bid}").startswith(f"ERR batch {bid}")
    json.loads(ask(worker, "FETCH default"))
    assert ask(worker, f"BATCH OPEN {bid}") == bid
    assert push(worker, "Inside", bid, 3) == "OK"
    stranger = connect(wid="worker-2", hostname="h", pid=2, labels=[])
    assert push(stranger, "Outsider", bid, 4).startswith("ERR batch")
    assert push(client, "Inside too", bid, 5) == "OK", "a job often pushes over a connection without a wid"
    assert Batch.objects.get().total == 3


def test_a_refused_member_refuses_no_other_of_its_bulk(client):
    good, bad = new(client), "b-unknown"
    jobs = [
        {"jid": f"member-{number:04d}", "jobtype": "M", "args": [], "custom": {"bid": bid}}
        for number, bid in enumerate([good, bad, good])
    ]
    refused = json.loads(ask(client, "PUSHB " + json.dumps(jobs)))
    assert refused == {"member-0001": "no such batch b-unknown"}
    assert status(client, good)["total"] == 2


@pytest.mark.parametrize(
    ("line", "told"),
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
        ('BATCH NEW {"parent_bid":"b-unknown","success":{"jobtype":"A"}}', "no such batch b-unknown"),
        ("BATCH OPEN", "BATCH OPEN: expected the id of a batch, got nothing"),
        ("BATCH COMMIT b-unknown", "no such batch b-unknown"),
        ("BATCH STATUS b-unknown", "no such batch b-unknown"),
        ("BATCH STATUS a b", "expected the id of a batch"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_made(client, line, told):
    reply = ask(client, line)
    assert reply.startswith("ERR ")
    assert told in reply
    assert not Batch.objects.exists()
    assert not Job.objects.exists()
    assert ask(client, "batch new {}".replace("batch", "BATCH")).startswith("ERR"), "the connection goes on"


def test_sub_verbs_take_any_case(client):
    bid = ask(client, "BATCH new " + json.dumps(NEW))
    assert ask(client, f"BATCH commit {bid}") == "OK"
    assert json.loads(ask(client, f"BATCH Status {bid}"))["success_st"] == "1"
