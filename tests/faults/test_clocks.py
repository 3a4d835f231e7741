"""Run programs with clocks that are hours off or jump, and some that are right: only the database's clock counts."""

import json
import shutil
import struct
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest

from tests.faults.history import Scribe
from tests.faults.size import JOBS, scaled
from tests.server.raw import RawClient, worker
from tests.settings import KIND
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(600 + JOBS // 5),
    pytest.mark.skipif(KIND == "sqlite", reason="left out: SQLite has no clock but that of its programs"),
]
STEP = "tests.faults.tasks.step"
LEASE_S = 8
AHEAD, BEHIND = timedelta(hours=3), timedelta(hours=-3)
EARLY_S, LATE_S = 1.0, 5.0
SOURCE = Path(__file__).with_name("clock.c")


@pytest.fixture(scope="session")
def _shim(tmp_path_factory):
    """Build `clock.c`; libfaketime also changes monotonic time, or breaks sleeps until a moment."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("left out: a program's clock is moved by a library made on the spot; needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def clock(_shim, tmp_path):
    """Return a function that makes a clock with this offset, as environment of a program; `set_clock` changes it."""
    numbers = count()

    def new(offset):
        path = tmp_path / f"clock-{next(numbers)}"
        path.write_bytes(struct.pack("q", int(offset.total_seconds())))
        return {"LD_PRELOAD": str(_shim), "FAKTORY_TEST_CLOCK": str(path)}

    return new


def set_clock(environment, offset):
    """Change the clock of the program that was started with this environment; it applies at once."""
    with open(environment["FAKTORY_TEST_CLOCK"], "r+b") as file:
        file.write(struct.pack("q", int(offset.total_seconds())))


def off_by(run, node):
    """Return how far a node's clock is from ours, according to its INFO."""
    client = RawClient.identified(run.address(node))
    now = json.loads(client.ask("INFO"))["now"]
    client.close()
    return datetime.fromisoformat(now) - datetime.now(UTC)


def is_about(found, expected):
    return abs(found - expected) < timedelta(minutes=5)


def three_nodes(run, clock):
    """Start a node with a correct clock, one ahead and one behind, and check their offsets."""
    nodes = [run.start_node(environment=at and clock(at)) for at in (None, AHEAD, BEHIND)]
    for node, expected in zip(nodes, (timedelta(0), AHEAD, BEHIND), strict=True):
        assert is_about(off_by(run, node), expected)
    return nodes


def test_wrong_clocks_cause_no_lost_or_duplicate_jobs(arena, database, clock):
    """FI-7: a node that used its own clock would treat every worker as lost, or none."""
    run = arena(database)
    three_nodes(run, clock)
    for at in (None, AHEAD, BEHIND):
        run.start_workers(concurrency=2, environment=at and clock(at))
    run.start_makers(3, jobtype=STEP)
    run.start_makers(1, queue="wire")
    run.start_takers(2, queue="wire")
    run.await_progress("end", max(JOBS, 500))
    found = run.verdict()
    assert found.lost == found.made_up == found.unsure == found.stuck == set()
    assert found.doubled.total() == 0
    assert run.all_alive()


def test_jumping_clocks_cause_no_lost_or_duplicate_jobs(arena, database, clock):
    """FI-7: the clocks of a server and of workers jump forward and back at once, while jobs run."""
    run = arena(database)
    environments = [clock(timedelta(0)) for _ in range(2)]
    run.start_node()
    jumping = run.start_node(environment=environments[0])
    run.start_workers(concurrency=2)
    run.start_workers(concurrency=2, environment=environments[1])
    run.start_makers(2, jobtype=STEP)
    run.start_makers(1, queue="wire")
    run.start_takers(2, queue="wire")
    for _ in range(scaled(10)):
        for offset in (AHEAD, BEHIND, timedelta(0)):
            for environment in environments:
                set_clock(environment, offset)
            wait_until(lambda offset=offset: is_about(off_by(run, jumping), offset))
            run.await_progress("end", 20)
    found = run.verdict()
    assert found.lost == found.made_up == found.unsure == found.stuck == set()
    assert found.doubled.total() == 0
    assert run.all_alive()


def test_scheduled_jobs_run_by_the_clock_of_the_database(arena, database, clock):
    """FI-7: jobs are pushed to any node, and become due on any node."""
    run = arena(database)
    nodes = three_nodes(run, clock)
    run.start_takers(3)
    scribe, due = Scribe(run.folder, "by-hand"), {}
    for number in range(scaled(300)):
        client = RawClient.identified(run.address(nodes[number % 3]))
        jid, in_s = f"due-{number:06d}", 2 + number % 40 / 10
        due[jid] = time.monotonic() + in_s
        at = (datetime.now(UTC) + timedelta(seconds=in_s)).isoformat()
        scribe.note("sent", jid)
        assert client.ask(f"PUSH {json.dumps({'jid': jid, 'jobtype': 'noop', 'args': [], 'at': at})}") == b"+OK"
        scribe.note("ok", jid)
        client.close()
    found = run.verdict()
    late = [note.at - due[note.rest[0]] for note in run.history()["begin"]]
    print(f"{len(late)} jobs: {min(late):+.2f} s to {max(late):+.2f} s from their time")  # noqa: T201
    assert found.lost == found.made_up == found.stuck == set()
    assert found.doubled.total() == 0
    assert min(late) > -EARLY_S
    assert max(late) < LATE_S


def test_a_node_with_a_fast_clock_does_not_expire_locks_early(arena, database, clock):
    """FI-7: the holder is alive and sends BEAT; each node, and its maintenance, compares with the database's clock."""
    lease = {"ENABLED": True, "HEARTBEAT_FREQUENCY": 1, "JOB_LOCK_DURATION": LEASE_S}
    run = arena(database, LOCKET=lease, WORKER_TIMEOUT=30)  # a FETCH on each of two nodes comes between two BEATs
    good, *wrong = three_nodes(run, clock)
    holder = RawClient.identified(run.address(good), **worker("holder"))
    for jid in ("locked-1", "locked-2"):
        job = {"jid": jid, "jobtype": "noop", "args": [], "custom": {"lock": "one-at-a-time"}}
        assert holder.ask(f"PUSH {json.dumps(job)}") == b"+OK"
    assert json.loads(holder.ask("FETCH default"))["jid"] == "locked-1"
    others = [RawClient.identified(run.address(node), **worker(f"other-{node}")) for node in wrong]
    ends_at = time.monotonic() + 1.5 * LEASE_S
    while time.monotonic() < ends_at:
        assert holder.ask('BEAT {"wid":"holder"}') == b"+OK"
        for node, other in zip(wrong, others, strict=True):
            assert other.ask(f'BEAT {{"wid":"other-{node}"}}') == b"+OK"
            assert other.ask("FETCH default") is None, "the lock is held"
    assert holder.ask('ACK {"jid":"locked-1"}') == b"+OK"
    got = [other.ask("FETCH default") for other in others]
    assert [json.loads(job)["jid"] for job in got if job] == ["locked-2"]
    for client in (holder, *others):
        client.close()
