"""Stop, kill and restart workers and the database under jobs with steps and walks: each effect happens exactly once.

`FAKTORY_SOAK_ROWS` is the number of rows of the longest walk; `make soak` sets it.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from django.db import connection
from django.db.models import Max, Min

from django_faktory.models import Job, JobStep
from tests.faults import tasks
from tests.faults.arena import SOON_S
from tests.faults.stores import TestDatabase
from tests.project.models import Effect, Mark
from tests.runtime.processes.conftest import meeting  # noqa: F401  (a fixture)
from tests.settings import KIND
from tests.standing import suspend_process
from tests.waiting import wait_until

ROWS = int(os.environ.get("FAKTORY_SOAK_ROWS", "3000"))
BY = min(500, ROWS // 200)
KILLS = max(2, ROWS // 20_000)
RESTARTS = max(1, ROWS // 100_000)
LINE_BYTES = 19
"""Size of a line of tries: the process in 7 places, and a number of 10 digits."""
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + ROWS // 400)]


@pytest.fixture
def workers(arena, database):
    """Start a pool of workers that run one job at a time. If one is lost, another one takes its job at once."""
    return arena(database).start_workers(processes=3, concurrency=1)


def end_of(result):
    """Wait until the job has ended; return its row."""
    return wait_until(
        lambda: Job.objects.filter(jid=result.id, state__in=["succeeded", "dead"]).first(), SOON_S, what="its end"
    )


def tries(folder):
    """Return the process and the number of each try, in their order."""
    lines = (folder / "tries").read_bytes().split(b"\n")[:-1] if (folder / "tries").exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def effects():
    return sorted(Effect.objects.values_list("number", flat=True))


# --- losses


@pytest.mark.skipif(KIND == "sqlite", reason="a stopped transaction that writes holds the whole file: no job moves on")
def test_a_worker_stopped_in_a_step_that_loses_its_job_commits_nothing(arena, database, meeting):  # noqa: F811
    pools = [arena(database).start_workers(concurrency=1) for _ in range(2)]  # the maintenance of one stops too
    job = tasks.waits_in_a_step.enqueue(str(meeting))
    pid = meeting.pid()
    [pool] = [pool for pool in pools if pid in {child.pid for child in pool.children()}]
    suspend_process(pid, transactions=1)
    other = meeting.pid(but=pid)
    (meeting.folder / "go on").touch()
    assert end_of(job).state == "succeeded"
    os.kill(pid, signal.SIGCONT)
    pool.wait_for_log("when a step ended: rolled back", f" {pid} ", job.id)
    pool.wait_for_log("worker stopped", f" {pid} ")
    done = sorted([f"charged by {other}", "reserved", f"sent by {other}"])
    assert sorted(Mark.objects.values_list("text", flat=True)) == done
    assert len([line for line in pool.lines if job.id in line and f" {pid} " in line]) == 1
    assert "Traceback" not in "".join(one.text for one in pools)


def test_a_job_that_kills_its_worker_at_one_place_is_dead_after_three_losses(workers, tmp_path):
    job = end_of(tasks.dies_in_one_step.enqueue(str(tmp_path)))
    assert (job.state, job.errtype, job.losses) == ("dead", "WorkerLost", 3)
    assert len(tries(tmp_path)) == 3
    assert effects() == [1]


def test_a_job_that_commits_a_step_before_each_loss_ends(workers, tmp_path):
    job = end_of(tasks.dies_in_its_second_step.enqueue(str(tmp_path), 6))
    assert (job.state, job.losses, job.failures) == ("succeeded", 1, 0)
    assert [number for _, number in tries(tmp_path)] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len({pid for pid, _ in tries(tmp_path)}) == 6, "it lost five workers"
    assert effects() == [*range(6)]


# --- walks


@pytest.mark.parametrize(("way", "done"), [("break", 250), ("return", 250), ("error", 500)])
def test_leaving_a_walk_early_commits_what_was_done_and_an_error_its_whole_chunks(workers, way, done):
    job = end_of(tasks.leaves_early.enqueue(200, 249, way))
    assert (job.state, job.failures) == ("succeeded", int(way == "error"))
    assert effects() == [*range(done)]
    assert JobStep.objects.get().done == done


@contextmanager
def connected_to(cluster):
    """Lead the test's own queries to this server, as its programs'."""
    connection.close()
    own = connection.settings_dict
    connection.settings_dict = own | {
        "HOST": "127.0.0.1", "PORT": cluster.port, "USER": "postgres", "PASSWORD": "", "NAME": cluster.database
    }  # fmt: skip
    yield cluster
    connection.close()
    connection.settings_dict = own


@pytest.fixture
def store(request, transactional_db):
    """Return the test's database, or a PostgreSQL server that the test may restart."""
    if KIND != "postgresql":
        yield TestDatabase()
        return
    with connected_to(request.getfixturevalue("cluster")) as cluster:
        yield cluster


class Walk:
    """A job that walks over all marks, the pools with one worker each that may run it, and what disturbs them."""

    def __init__(self, arena, store, folder):
        self.tries, self._allowed, self._store = folder / "tries", folder / "allowed", store
        self.arena = arena(store)
        self._pools = [self.arena.start_workers(concurrency=1) for _ in range(3)]
        self.stopped = []
        self._disturbed_at = 0
        self.result = tasks.walks.enqueue(str(folder), BY)
        connection.close()  # it would not survive a restart

    def allow(self, number):
        """Let the walk make so many tries: it must not end before it is disturbed."""
        new = self._allowed.with_suffix(".new")
        new.write_text(str(number * LINE_BYTES))
        new.replace(self._allowed)

    def disturb(self, fault, number, then):
        """Cause a fault after so many tries, and after the current run has committed a chunk; then allow more."""

        def find():
            size = self.tries.stat().st_size if self.tries.exists() else 0
            lines = latest_lines(self.tries, min(size - self._disturbed_at, LINE_BYTES * (BY + 2)))[-BY - 1 :]
            pids = {int(line.split()[0]) for line in lines}
            if len(lines) <= BY or len(pids) > 1 or size < number * LINE_BYTES:
                return None
            pid = pids.pop()
            pools = [pool for pool in self._pools if f"pid={pid}\n" in f"{pool.text}\n"]
            return pools and (pid, pools[0])

        pid, pool = wait_until(find, SOON_S + ROWS / 500, every_s=0.005, what=f"{number} tries")
        # The supervisor of a worker that was killed would wait longer after each further kill.
        recovered = [one for one in self._pools if one is not pool and one.text.count("worker started") > 1]
        self._disturbed_at = self.tries.stat().st_size
        self.allow(then)  # first: a worker that is told to stop ends its chunk
        fault(pid, pool)
        for one in recovered:
            self._replace(one)

    def terminate(self, _, pool):
        """Stop the pool of this worker, as a deployment does."""
        self._replace(pool)

    def kill(self, pid, _):
        os.kill(pid, signal.SIGKILL)

    def restart(self, *_):
        self._store.stop(random.choice(["fast", "immediate"]))
        self._store.start()

    def _replace(self, pool):
        pool.signal(signal.SIGTERM)
        self.stopped.append(pool)
        self._pools[self._pools.index(pool)] = self.arena.begin_workers(concurrency=1)


def latest_lines(path, size):
    """Return the whole lines in the latest bytes of a file."""
    if size <= 0:
        return []
    with path.open("rb") as file:
        file.seek(-size, os.SEEK_END)
        return file.read().split(b"\n")[1:-1]


def test_a_walk_does_each_row_once_while_workers_and_the_database_are_stopped(arena, store, tmp_path):
    first = 10**9  # all numbers have as many digits
    for begin in range(0, ROWS, 10_000):
        Mark.objects.bulk_create(
            [Mark(pk=first + number, text="a row") for number in range(begin, min(begin + 10_000, ROWS))],
            batch_size=500,
        )
    (tmp_path / "allowed").write_text("0")
    walk = Walk(arena, store, tmp_path)
    faults = [walk.terminate] * KILLS + [walk.kill] * KILLS + [walk.restart] * (RESTARTS if KIND == "postgresql" else 0)
    random.shuffle(faults)
    walk.allow(ROWS // (len(faults) + 1))
    begun = time.monotonic()
    for place, fault in enumerate(faults, 1):
        at, then = (ROWS * number // (len(faults) + 1) for number in (place, place + 1))
        walk.disturb(fault, at, then if place < len(faults) else 2 * ROWS)
    job = end_of(walk.result)
    seconds = time.monotonic() - begun

    numbers = Effect.objects.aggregate(Min("number"), Max("number"))
    assert (job.state, job.failures) == ("succeeded", 0)
    assert (Effect.objects.count(), *numbers.values()) == (ROWS, first, first + ROWS - 1)
    assert (JobStep.objects.get().done, JobStep.objects.get().is_finished) == (ROWS, True)
    times = Counter(number for _, number in tries(tmp_path))
    most = Counter()
    for number, count in times.items():
        most[(number - first) // BY] = max(most[(number - first) // BY], count - 1)
    redone = most.total()
    print(  # noqa: T201  (pytest -s shows it)
        f"{ROWS:,} rows in chunks of {BY} in {seconds:.0f} s: {Counter(fault.__name__ for fault in faults)}, "
        f"{redone} chunks redone with {times.total() - len(times):,} rows; losses={job.losses}"
    )
    assert redone <= len(faults) - KILLS, "a stopped worker commits its chunk"
    assert {pool.code() for pool in walk.stopped} == {0}
    assert "Traceback" not in walk.arena.logs()
