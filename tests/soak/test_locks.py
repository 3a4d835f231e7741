"""Check that one job per key runs at a time on two nodes, while nodes and clients are killed and clients are paused.

Two jobs may overlap only if a client was paused for longer than its lease, which it reports. `make soak` runs it with
2,000 jobs.
"""

import json
import math
import os
import random
import signal
import time
from collections import Counter, defaultdict

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.models import Job, JobLock
from django_faktory.store.transactions import run
from tests.programs import Program
from tests.runtime.processes.test_nodes import kill
from tests.server.raw import RawClient
from tests.store import by_ids
from tests.waiting import wait_until

JOBS = int(os.environ.get("FAKTORY_SOAK_LOCKS", "160"))
KEYS, CLIENTS, SET = 20, 16, 40
LEASE_S = 3
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + JOBS)]
SETTINGS = {
    "LOCKET": {"ENABLED": True, "HEARTBEAT_FREQUENCY": 1, "JOB_LOCK_DURATION": LEASE_S},
    "WORKER_TIMEOUT": 3 * LEASE_S,
}


class Fleet:
    """Two nodes and their clients, with methods to kill and pause them."""

    def __init__(self, folder, runfaktory, address):
        self.folder, self._run, self._address = folder, runfaktory, address
        self.pushed = self.killed = self.stopped = self.nodes_killed = 0
        self.clients, self._still, self._spared = {}, {}, {}
        self.nodes = [self._node(), self._node()]
        self._publish_addresses()

    def _node(self):
        program = self._run("127.0.0.1:0", "--server-only", "--no-reload", **SETTINGS)
        return self._address(program), program

    def _publish_addresses(self):
        """Write the addresses of the nodes to the file that the clients read."""
        (self.folder / "new").write_text(" ".join(f"{host}:{port}" for (host, port), _ in self.nodes))
        (self.folder / "new").replace(self.folder / "nodes")

    def start_client(self):
        name = f"c{len(self.clients)}"
        arguments = ("-m", "tests.soak.lock_client", str(self.folder), name, str(LEASE_S))
        self.clients[name] = Program(*arguments)

    def living(self):
        return [name for name, program in self.clients.items() if program.is_alive()]

    def victims(self):
        """Return the clients that may be stopped or killed.

        A resumed client is spared until it has had time to report the locks it lost.
        """
        ended = Counter(name for name, _ in self.read_logs()["ends"])
        return [name for name in self.living() if ended[name] > self._spared.get(name, -1)]

    def kill_client(self):
        name = wait_until(lambda: (found := self.victims()) and random.choice(found))
        self.clients[name].signal(signal.SIGKILL)
        self.clients[name].code()
        self.killed += 1
        self.start_client()

    def stop_client(self):
        """Pause a client that has or just had a lock, for longer than its lease."""
        victims = self.victims()
        name = wait_until(lambda: next((name for name in holders() if name in victims), None))
        self.clients[name].signal(signal.SIGSTOP)
        self._spared[name] = math.inf
        self._still[name] = time.monotonic() + LEASE_S + 1
        self.stopped += 1

    def resume_paused(self, *, at_once=False):
        for name, until in list(self._still.items()):
            if at_once or time.monotonic() > until:
                del self._still[name]
                self._spared[name] = Counter(name for name, _ in self.read_logs()["ends"])[name]
                self.clients[name].signal(signal.SIGCONT)

    def kill_node(self):
        place = random.randrange(2)
        kill(self.nodes[place])
        self.nodes[place] = self._node()
        self._publish_addresses()
        self.nodes_killed += 1

    def read_logs(self):
        """Return the log lines of the clients: for each word, the client's name and the other words."""
        found = defaultdict(list)
        for path in self.folder.glob("*.log"):
            for line in path.read_text().splitlines():
                word, *rest = line.split()
                found[word].append((path.stem, *rest))
        return found

    def gone_wids(self):
        """Return the worker ids of killed clients, and the ids that living clients no longer use."""
        of = defaultdict(list)
        for name, wid in self.read_logs()["wid"]:
            of[name].append(wid)
        living = self.living()
        return [wid for name, wids in of.items() for wid in (wids[:-1] if name in living else wids)]

    def end(self):
        self.resume_paused(at_once=True)
        (self.folder / "enough").touch()
        assert [self.clients[name].code() for name in self.living()].count(0) == CLIENTS

    def clean_up(self):
        for program in self.clients.values():
            program.clean_up()


def holders():
    """Return the names of the clients that hold locks."""
    wids = JobLock.objects.filter(is_lapsed=False).values_list("wid", flat=True)
    return [wid.rpartition("-")[0] for wid in wids]


def push(fleet, count):
    """Push `count` jobs, in sets of `SET`."""
    client = RawClient.identified(fleet.nodes[0][0])
    for start in range(fleet.pushed, fleet.pushed + count, SET):
        jobs = [
            {"jid": f"lock-{n:06d}", "jobtype": "noop", "queue": "ab"[n % 2], "args": [n % KEYS]}
            for n in range(start, start + SET)
        ]
        for job in jobs:
            job["custom"] = {"lock": f"key {job['args'][0]}"}
        assert client.ask(f"PUSHB {json.dumps(jobs)}") == b"{}"
    client.close()
    fleet.pushed += count


def left(fleet, *, gives_up=False):
    """Return how many jobs are left. Requeue failed jobs, and reset losses so that no job is a poison pill."""
    if gives_up:
        OrmBroker("default").lost(fleet.gone_wids())
    run("default", lambda _: Job.objects.filter(losses__gt=0).update(losses=0))  # run() retries it after a deadlock
    failed = Job.objects.filter(state__in=["retries", "dead"]).values_list("pk", flat=True)
    by_ids.requeue(list(failed), using="default")
    return Job.objects.count()


def test_no_two_jobs_of_a_lock_key_overlap_while_clients_and_nodes_die(runfaktory, address, tmp_path):
    """Check that no two jobs of a key run at once although clients and nodes are killed (L24)."""
    fleet = Fleet(tmp_path, runfaktory, address)
    try:
        push(fleet, JOBS)
        for _ in range(CLIENTS):
            fleet.start_client()
        wait_until(lambda: left(fleet) < JOBS, 60)
        acts = [fleet.kill_client, fleet.kill_client, fleet.stop_client, fleet.kill_node]
        chances = [fleet.kill_client] * 8 + [fleet.stop_client] * 2 + [fleet.kill_node]
        for act in acts + random.choices(chances, k=JOBS // 80):
            if left(fleet) <= JOBS // 2:
                push(fleet, SET)  # no action may find that all jobs are done
            act()
            before = left(fleet)
            wait_until(lambda before=before: left(fleet) < max(before, 1), 60, every_s=random.uniform(0.1, 0.4))
            fleet.resume_paused()
        wait_until(lambda: fleet.resume_paused() or left(fleet, gives_up=True) == 0, 60 + JOBS / 10, every_s=0.2)
        fleet.end()
    finally:
        fleet.clean_up()
    events = fleet.read_logs()
    lost = {run for _, run in events["lost"]}
    overlaps = [runs for _, *runs in events["overlap"]]
    print(  # noqa: T201  (pytest -s shows it)
        f"{fleet.pushed} jobs, killed {fleet.killed} clients and {fleet.nodes_killed} nodes, stopped {fleet.stopped}"
        f" clients: {len(lost)} locks reported lost, {len(overlaps)} overlaps"
    )
    assert [runs for runs in overlaps if lost.isdisjoint(runs)] == []
    assert {jid for _, jid in events["ends"]} == {f"lock-{n:06d}" for n in range(fleet.pushed)}
    assert list(JobLock.objects.values_list("key", "jid")) == []
    assert min(fleet.killed, fleet.nodes_killed, fleet.stopped) > 0
