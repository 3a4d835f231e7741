"""Run old and new nodes, web processes and clients on one database, and find faults in the result."""

import json
import re
import secrets
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from django.db import connection
from django.db.utils import ConnectionHandler

from tests.faults.arena import SOON_S, Arena
from tests.programs import Program
from tests.settings import VIA

TASKS = "tests.deploys.tasks"
JOBS = "SELECT jid, state FROM django_faktory_job"
FAILURES = "SELECT jid, state, jobtype, errtype, failures, losses FROM django_faktory_job WHERE failures + losses > 0"
ROLLED_BACK = re.compile(r"job interrupted jid=(\w+) .*rolled back by the database")

EXCUSED = f"SELECT jid, failure FROM django_faktory_job WHERE jobtype = '{TASKS}.writes' AND failures > 0"
LINES = "SELECT jid, COUNT(*) FROM deploys_line GROUP BY jid"
KNOWN = {
    ("succeeded", f"{TASKS}.tried_again", "django_faktory.errors.Retry", 1, 0),
    ("dead", f"{TASKS}.fails", "builtins.ValueError", 1, 0),
    ("dead", "noop", "E", 1, 0),
}
TROUBLE = re.compile(r"^(\S+ \S+ (WARNING|ERROR|CRITICAL) |Traceback|\S*(Error|Warning):)")
EXPECTED = re.compile(
    rf" job dead jid=\S+ jobtype={TASKS}.fails | workers lost wids=from-\S+ jobs=0$"
    + "| NOTIFY does not come through, as behind a pooler" * (VIA == "bouncer")
)
WORKERS = ("--processes", "1", "--concurrency", "4")
FAST = {"WORKER_TIMEOUT": 30, "MIGRATIONS_WAIT": 0}


def another_connection(name):
    """Return a Django connection to a database of the same server; the caller closes it."""
    options = {word: value for word, value in connection.settings_dict["OPTIONS"].items() if word != "pool"}
    return ConnectionHandler({"default": {**connection.settings_dict, "NAME": name, "OPTIONS": options}})["default"]


class Database:
    """An empty database; a store with the same interface as the ones in `tests.faults.stores`."""

    def __init__(self, folder):
        name = f"{connection.settings_dict['NAME']}_{secrets.token_hex(4)}"
        self.name = str(Path(folder) / "rollout.sqlite3") if connection.vendor == "sqlite" else name
        self.environment = {"FAKTORY_TEST_NAME": self.name}
        self._administer(f"CREATE DATABASE {self.name}")
        self.connection = another_connection(self.name)

    def query(self, statement, *values):
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()

    def rows(self):
        return dict(self.query(JOBS))

    def drop(self):
        self.connection.close()
        self._administer(f"DROP DATABASE {self.name}" + " WITH (FORCE)" * (connection.vendor == "postgresql"))

    @staticmethod
    def _administer(statement):
        if connection.vendor != "sqlite":
            with connection._nodb_cursor() as cursor:
                cursor.execute(statement)


class Rollout(Arena):
    """An arena in which each program has a version."""

    def __init__(self, folder, store):
        super().__init__(folder, store, **FAST)

    def migrate(self, version):
        program = self._of(version, "-m", "django", "migrate", "--run-syncdb")
        self._clients.append(program)
        assert program.code(SOON_S) == 0, program.text

    def start(self, version):
        """Start a node of a version with server and workers, and a web process.

        Return the node's number and the web process once all of it works.
        """
        name = f"web{len(self._clients)}"
        web = self._of(version, "-m", "tests.deploys.load", str(self.folder), name, "web")
        web.name = name
        self._clients.append(web)
        self._makers.append(web)
        node = self._of(version, "-m", "django", "runfaktory", "127.0.0.1:0", "--no-reload", *WORKERS)
        self._programs.append(node)
        node.wait_for_log("worker started", timeout_s=SOON_S)
        [line] = node.wait_for_log("server listens", timeout_s=SOON_S)
        self._nodes[number := len(self._programs)] = re.search(r"address=(\S+)", line)[1], node
        self._write_nodes()
        return number, web

    def stop_all(self, number, web):
        """Stop a node and its web process as an operator does; return the exit codes."""
        (self.folder / f"{web.name}-ends").touch()
        return [web.code(SOON_S), self.stop_node(number)[0]]

    def environment(self, version):
        return {
            "DJANGO_SETTINGS_MODULE": "tests.deploys.settings",
            "FAKTORY_DEPLOYS_FOLDER": str(self.folder),
            "FAKTORY_TEST_SETTINGS": json.dumps(self._settings),
            **self.store.environment,
            **version.environment,
        }

    def _of(self, version, *arguments):
        return Program(*arguments, **self.environment(version))

    def _client(self, name, *arguments):
        program = Program("-m", "tests.deploys.load", str(self.folder), name, *arguments)
        self._clients.append(program)
        return program

    def faults(self, verdict):
        """Return what went wrong with the jobs, by kind, once all have ended; empty if nothing did."""
        excused = self._excused()
        history = self.history()
        batches, called = len(history["batch"]), {note.rest[0] for word in CALLS for note in history[word]}
        found = {
            "lost": verdict.lost,
            "made up": verdict.made_up - called,
            "unsure": verdict.unsure,
            "begun again": {jid: times for jid, times in verdict.doubled.items() if jid not in excused},
            "stuck": verdict.stuck,
            "refused": history["refused"] + history["error-reply"],
            "tried again": [jid for jid, times in _times(history["first"]).items() if times > 1],
            "called": {
                word: f"{len(jids)} for {batches} batches"
                for word in CALLS
                if len(jids := [note.rest[0] for note in history[word]]) != batches or len({*jids}) != batches
            },
            "written": [line for line in self.store.query(LINES) if line[1] != 1],
            "failed": {row[1:] for row in self.store.query(FAILURES) if row[0] not in excused} - KNOWN,
            "two at once": _overlaps(history),
            "logs": [line for line in self.trouble() if not any(jid in line for jid in excused)],
        }
        return {what: wrong for what, wrong in found.items() if wrong}

    def _excused(self):
        """Return the jids of atomic tasks that ran again as victims of a MariaDB deadlock.

        MariaDB may choose any transaction as the victim: during the task, which is a failure, or at its end, which is
        an interruption.
        """
        if self.store.connection.vendor != "mysql":
            return set()
        failed = {jid for jid, failure in self.store.query(EXCUSED) if "(1213, 'Deadlock" in failure}
        return failed | {found[1] for line in self.trouble() if (found := ROLLED_BACK.search(line))}

    def trouble(self):
        """Return the warnings and errors in all logs, except those of tasks that fail on purpose."""
        programs = [*self._programs, *self._clients]
        return [
            line for program in programs for line in program.lines if TROUBLE.match(line) and not EXPECTED.search(line)
        ]

    def crossings(self):
        """Return pairs of versions for jobs of web processes: the one that pushed it, and the one that ran it."""
        history = self.history()
        pushed = {note.rest[0]: note.rest[1] for note in history["ok"] if len(note.rest) > 1}
        return {(pushed[note.rest[0]], note.rest[1]) for note in history["begin"] if note.rest[0] in pushed}


CALLS = ("complete", "success")


def _times(notes):
    return Counter(note.rest[0] for note in notes)


def _overlaps(history):
    """Return jobs that began before the previous job with the same lock key had ended."""
    ends = {note.rest[0]: note.at for note in history["end"]}
    runs = defaultdict(list)
    for at, _, (jid, _version, *key) in history["begin"]:
        if key:
            runs[key[0]].append((at, ends.get(jid, float("inf")), jid))
    return [after[2] for of_key in runs.values() for before, after in pairwise(sorted(of_key)) if after[0] < before[1]]
