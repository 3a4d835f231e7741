"""Execute one run: start nodes, workers and clients, cause faults, wait for all jobs to finish, and judge."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import closing, suppress
from typing import NamedTuple

import psutil
from django.db import connection

from django_faktory.models import Batch, Job, JobLock, Limiter
from tests import sessions
from tests.faults.arena import SOON_S, Arena, kill
from tests.faults.history import History, Scribe
from tests.outside import profiles
from tests.outside.evidence import STALL_S, Evidence
from tests.outside.referee import FINAL, callbacks, counters, judge
from tests.programs import Program
from tests.project.models import Mark
from tests.server.raw import RawClient
from tests.waiting import wait_until

FREEZE_S = {"worker": (0.5, 9.0), "consumer": (0.5, 9.0), "node": (0.3, 1.5)}
"""Range of seconds for which a process is suspended, by its kind.

A node is suspended for less than its clients' leases, because its suspension alone does not excuse a lost job.
"""

TICK_S = 0.05
SETTLED_S = 12
"""Seconds to wait after the last job: the counts of limits are checked every 10 s."""

SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND backend_type = 'client backend'",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


class Row(NamedTuple):
    state: str
    failures: int
    losses: int
    interruptions: int
    errtype: str
    errors: list[str]


class Left(NamedTuple):
    """The contents of the store at the end of a run."""

    jobs: dict[str, Row]
    callbacks: set[str]
    effects: Counter[str]
    descriptions: set[str]
    processed: int
    failed: int
    sizes: dict[str, int]
    held_locks: list[str]
    used_limits: list[str]
    wrong_batches: list[str]


class Match(Arena):
    def __init__(self, folder, store, profile_name, seed):
        timeout_s = profiles.PROFILES[profile_name].worker_timeout_s
        super().__init__(folder, store, **profiles.SETTINGS | {"WORKER_TIMEOUT": timeout_s})
        self.seed, self.profile_name = seed, profile_name
        self.profile = profiles.on(connection.vendor, profiles.PROFILES[profile_name])
        self.chance = random.Random(f"{seed} faults")
        self.pools, self.consumers, self._frozen = [], [], []
        self.faults = Counter()
        self.note = Scribe(folder, "faults").note

    # --- programs ---

    def begin(self):
        """Start all programs concurrently, and wait until each is ready."""
        nodes = [self._new_node() for _ in range(self.profile.nodes)]
        self.pools = [self._new_pool() for _ in range(self.profile.pools)]
        for program in nodes:
            self._await_node(program)
        self.consumers = [self._new_client("take") for _ in range(self.profile.consumers)]
        self._new_client("requeue")
        for program in self.pools:
            self._await_pool(program)
        if self.profile.pushers:
            self._makers.append(self._new_client("push"))
        self._makers.append(self._new_enqueuers())

    def _new_node(self):
        return self._runfaktory("127.0.0.1:0", "--server-only")

    def _await_node(self, program):
        [line, *_] = program.wait_for_log("server listens", timeout_s=SOON_S)
        self._nodes[program.pid] = re.search(r"address=(\S+)", line)[1], program
        self._write_nodes()

    def _new_pool(self):
        counts = ("--processes", str(self.profile.processes), "--concurrency", str(self.profile.concurrency))
        folder = {"FAKTORY_OUTSIDE_FOLDER": str(self.folder)}
        return self._runfaktory("--worker-only", "--queues", "default", *counts, environment=folder)

    def _await_pool(self, program):
        program.wait_for_log("worker started", times=self.profile.processes, timeout_s=SOON_S)

    def _runfaktory(self, *arguments, environment=None):
        return super()._runfaktory(*arguments, environment={"FAKTORY_TEST_APPS": "tests.outside"} | (environment or {}))

    def _new_client(self, role):
        name = f"{role[0]}{len(self._clients)}"
        arguments = ("-m", "tests.outside.wire", str(self.folder), name, str(self.seed), self.profile_name, role)
        self._clients.append(Program(*arguments))
        return self._clients[-1]

    def _new_enqueuers(self):
        name = f"e{len(self._clients)}"
        program = Program(
            *("-m", "tests.outside.enqueuers", str(self.folder), name, str(self.seed), self.profile_name),
            **{
                "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
                "FAKTORY_TEST_SETTINGS": json.dumps(profiles.PRODUCER_SETTINGS),
                "FAKTORY_TEST_APPS": "tests.outside",
                **self.store.environment,
            },
        )
        self._clients.append(program)
        return program

    # --- faults ---

    def play(self, jobs, faults=0, *, seconds=0.0):
        """Run until `jobs` attempts have ended, `faults` faults have happened and `seconds` have passed."""
        done, until = 0, time.monotonic() + seconds
        kinds, often = list(self.profile.faults), list(self.profile.faults.values())
        order = self.chance.sample(kinds, len(kinds))
        while done < faults or self.so_far("end") < jobs or time.monotonic() < until:
            self._thaw()
            assert self.is_making(), "a program that makes jobs has ended unexpectedly"
            if done < faults and self.so_far("end") >= jobs * done / (faults + 1):
                kind = order.pop() if order else self.chance.choices(kinds, often)[0]
                getattr(self, kind)()
                self.faults[kind] += 1
                done += 1
            if self.profile.stutters:
                self._stutter()
            time.sleep(TICK_S)
        self._thaw(at_once=True)

    def _stutter(self):
        """Suspend one server until the next tick, so that other nodes see its half-done work for longer."""
        self._thaw(at_once=True)
        for process in self.node(self.chance.choice(self.nodes())).children():
            self._freeze(process, "node")

    def kill_worker(self):
        """Kill one process of a pool, or the whole pool."""
        place = self.chance.randrange(len(self.pools))
        pool = self.pools[place]
        children = living(pool)
        if self.chance.random() < 0.7 and children:
            child = self.chance.choice(children)
            self.note("kill", str(child.pid))
            child.kill()
            return
        for child in children:
            self.note("kill", str(child.pid))
        self._ended.append(pool)
        kill(pool)
        self._replace_pool(place)

    def stop_pool(self):
        """Stop a pool with SIGTERM and start another, as a deployment does."""
        place = self.chance.randrange(len(self.pools))
        pool = self.pools[place]
        for child in living(pool):
            self.note("term", str(child.pid), f"{time.monotonic() + profiles.SETTINGS['SHUTDOWN_TIMEOUT']:.6f}")
        self._ended.append(pool)
        pool.signal(signal.SIGTERM)
        self._replace_pool(place)

    def _replace_pool(self, place):
        self.pools[place] = self._new_pool()
        self._await_pool(self.pools[place])

    def kill_consumer(self):
        place = self.chance.randrange(len(self.consumers))
        consumer = self.consumers[place]
        self.note("kill", str(consumer.pid))
        consumer.signal(signal.SIGKILL)
        consumer.code()
        self.consumers[place] = self._new_client("take")

    def freeze_worker(self):
        children = living(self.chance.choice(self.pools))
        if children:
            self._freeze(self.chance.choice(children), "worker")

    def freeze_consumer(self):
        self._freeze(psutil.Process(self.chance.choice(self.consumers).pid), "consumer")

    def freeze_node(self):
        program = self.node(self.chance.choice(self.nodes()))
        for process in program.children():
            self._freeze(process, "node")

    def _freeze(self, process, what):
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            now = time.monotonic()
            # MariaDB's transactions have several statements: a suspended process may hold their locks.
            holds_locks = connection.vendor == "mysql" and what != "consumer"
            self._frozen.append((now + self.chance.uniform(*FREEZE_S[what]), now, process, holds_locks))

    def _thaw(self, *, at_once=False):
        for one in list(self._frozen):
            until, since, process, holds_locks = one
            if at_once or time.monotonic() > until:
                self._frozen.remove(one)
                took_s = time.monotonic() - since
                self.note("frozen", str(process.pid), f"{since:.6f}", f"{took_s:.3f}")
                if holds_locks and took_s > STALL_S:
                    self.note("stall", f"{since:.6f}", f"{took_s:.3f}")
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill_node(self):
        self._replace_node(super().kill_node)

    def stop_node(self):
        self._replace_node(self._stop_node)

    def _stop_node(self, number):
        _, program = self._nodes.pop(number)
        self._ended.append(program)
        program.signal(signal.SIGTERM)

    def _replace_node(self, end):
        """End a node and start its replacement; with a single node, clients have none in between."""
        number = self.chance.choice(self.nodes())
        end(number)
        self._write_nodes()
        self._await_node(self._new_node())

    def end_sessions(self):
        """End one to four random sessions of the database."""
        with connection.cursor() as cursor:
            for _ in range(self.chance.randint(1, 4)):
                cursor.execute(SESSIONS[connection.vendor])
                open_ = [session for (session,) in cursor.fetchall()]
                if open_:
                    self.note("dbfault")
                    with suppress(Exception):  # the session has ended meanwhile
                        cursor.execute(sessions.END[connection.vendor], [self.chance.choice(open_)])

    # --- the end ---

    def finish(self, timeout_s):
        """Stop the producers, wait until all jobs are done, and judge; return the violations by rule."""
        self._thaw(at_once=True)
        (self.folder / "make-ends").touch()
        wait_until(lambda: not self.is_making(), SOON_S, every_s=0.05, what="the end of all makers")
        with suppress(AssertionError):  # the referee reports the jobs that are left
            wait_until(self._are_jobs_done, timeout_s, every_s=0.2)
            wait_until(self._is_settled, SETTLED_S, every_s=0.2)
        info = self._info()
        (self.folder / "take-ends").touch()
        for program in self.consumers:
            program.code(SOON_S)
        evidence, left = Evidence(History(self.folder)), self._left(info)
        wrong = judge(evidence, left)
        self._report(evidence, wrong)
        return wrong

    def _are_jobs_done(self):
        return set(self.store.rows().values()) <= FINAL

    def _is_settled(self):
        """Return True if the last callbacks have arrived, and no job holds a lock or a permit."""
        evidence, left = Evidence(History(self.folder)), self._left(self._info())
        return self._are_jobs_done() and not any(next(rule(evidence, left), None) for rule in (callbacks, counters))

    def _info(self):
        host, port = self.address(self.chance.choice(self.nodes()))
        with closing(RawClient.identified((host, port))) as client:
            return json.loads(client.ask("INFO"))["faktory"]

    def _left(self, info):
        names = ("jid", "state", "failures", "losses", "interruptions", "errtype", "history", "callback_of")
        jobs, callbacks = {}, set()
        for jid, state, failures, losses, interruptions, errtype, history, callback_of in Job.objects.values_list(
            *names
        ):
            errors = [one["errtype"] for one in json.loads(history or "[]")]
            jobs[jid] = Row(state, failures, losses, interruptions, errtype, errors)
            callbacks |= {jid} if callback_of else set()
        marks = Mark.objects.filter(text__startswith="effect ").values_list("text", flat=True)
        batches = list(Batch.objects.all())
        sets = info["tasks"] if "sets" not in info else info["sets"]
        sizes = {name: size for name, size in {**info["queues"], **sets}.items() if name != "dead"}
        return Left(
            jobs=jobs,
            callbacks=callbacks,
            effects=Counter(text.split()[1] for text in marks),
            descriptions={batch.description for batch in batches},
            processed=info["total_processed"],
            failed=info["total_failures"],
            sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
            held_locks=[str(key) for key in JobLock.objects.values_list("key", flat=True)],
            used_limits=[f"{limiter} {limiter.in_use}" for limiter in Limiter.objects.filter(in_use__gt=0)],
            wrong_batches=[
                f"{batch.description} {batch.pending} {batch.unrun} {batch.failed} {batch.open_children}"
                for batch in batches
                if batch.finished_at and (batch.pending, batch.unrun, batch.open_children) != (0, 0, 0)
            ],
        )

    def _report(self, evidence, wrong):
        attempts = evidence.all_attempts()
        print(  # noqa: T201  (pytest -s shows it, and pytest where the test failed)
            f"{self.profile_name} seed={self.seed}: {len(evidence.ok)} jobs accepted, {len(evidence.refused)} refused,"
            f" {len(attempts)} attempts ({sum(one.is_suspect for one in attempts)} suspect),"
            f" {len(evidence.batches)} batches, {sum(map(len, evidence.limits.values()))} limits,"
            f" faults {dict(self.faults)}"
        )
        for rule, found in wrong.items():
            print(f"  {rule}: {len(found)}")  # noqa: T201
            for one in found[:10]:
                print(f"    {one}")  # noqa: T201

    def clean_up(self):
        self._thaw(at_once=True)
        super().clean_up()


def living(program):
    """Return the child processes of the program that are neither zombies nor this process."""
    return [
        child for child in program.children() if child.status() != psutil.STATUS_ZOMBIE and child.pid != os.getpid()
    ]
