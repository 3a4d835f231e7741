"""Run a client in a separate process that makes or takes jobs over the wire, and notes each step.

`python -m tests.faults.client FOLDER NAME make QUEUE JOBTYPE` or `… take QUEUE`. It picks a node from FOLDER/nodes for
each connection, and ends when the file FOLDER/make-ends or FOLDER/take-ends exists. Uses neither Django nor the store.
"""

import json
import random
import sys
import time
from pathlib import Path

from tests.faults.history import Scribe, Tally
from tests.server.raw import RawClient, worker

TIMEOUT_S = 5
BEAT_EVERY_S = 1.0
FAILING = 40
"""One job in this many fails, and has no retry."""
MOST_AHEAD, LOOK_EVERY, PAUSE_S = 1000, 50, 0.2
"""Makers slow down while more than `MOST_AHEAD` jobs wait; a slow machine would run them long after all faults."""


class Client:
    def __init__(self, folder, name):
        self.folder, self.name = Path(folder), name
        self.scribe = Scribe(folder, name)
        self.chance = random.Random()
        self._client = None

    def hello(self):
        """Return the fields that it sends in HELLO."""
        return {}

    def ask(self, line):
        """Return the reply, or b"" if there was none. Repeat the connection attempt until it succeeds."""
        while self._client is None:
            self._connect()
        try:
            reply = self._client.ask(line)
        except OSError:
            reply = b""
        if reply == b"":
            self.leave()
        return reply

    def insist(self, line):
        """Repeat the command until it succeeds or the job is gone; the latter means that an earlier answer was lost."""
        while True:
            reply = self.ask(line)
            if reply[:1] == b"+" or reply.startswith(b"-ERR Job not found"):
                return
            if reply:
                self.scribe.note("error-reply", reply.decode(errors="replace").replace(" ", "_"))
                time.sleep(0.05)

    def leave(self):
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect(self):
        try:
            host, port = self.chance.choice((self.folder / "nodes").read_text().split()).rsplit(":", 1)
            self._client = RawClient.identified((host, int(port)), timeout_s=TIMEOUT_S, **self.hello())
        except (OSError, AssertionError):  # refused, reset, or closed before HELLO was answered
            time.sleep(0.05)


class Maker(Client):
    """Push each job once: without an answer it is unknown whether the job is stored."""

    def __init__(self, *args):
        super().__init__(*args)
        self._tally = Tally(self.folder)
        self._is_ahead = False

    def pace(self, number):
        if self._is_ahead or number % LOOK_EVERY == 0:
            noted = self._tally.look()
            self._is_ahead = noted["ok"] - noted["end"] > MOST_AHEAD
            time.sleep(PAUSE_S if self._is_ahead else 0)

    def run(self, queue, jobtype):
        number = 0
        while not (self.folder / "make-ends").exists():
            self.pace(number)
            while self._client is None:
                self._connect()
            jid = f"{self.name}-{number:06d}"
            job = {"jid": jid, "jobtype": jobtype, "queue": queue, "args": [number]}
            if number % FAILING == 0:
                job["retry"] = 0
            self.scribe.note("sent", jid)
            reply = self.ask("PUSH " + json.dumps(job))
            number += 1
            if reply == b"+OK":
                self.scribe.note("ok", jid)
            elif reply:
                self.scribe.note("refused", jid, reply.decode(errors="replace").replace(" ", "_"))


class Taker(Client):
    """Run one job at a time.

    After a FETCH without an answer it continues as a new worker: the old one is lost, and its job is enqueued again.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._lives = 0
        self._begin_anew()

    def hello(self):
        return worker(self.wid)

    def run(self, queue):
        while not (self.folder / "take-ends").exists():
            if time.monotonic() - self._beaten_at > BEAT_EVERY_S:
                self.beat()
            reply = self.ask(f"FETCH {queue}")
            if reply == b"":
                self._begin_anew()
            elif reply is None:
                pass
            elif reply.startswith(b"-"):
                self.scribe.note("error-reply", reply.decode(errors="replace").replace(" ", "_"))
                self._begin_anew()
            else:
                self._work(json.loads(reply))

    def beat(self):
        reply = self.ask("BEAT " + json.dumps({"wid": self.wid}))
        if reply and not reply.startswith(b"-"):
            self._beaten_at = time.monotonic()

    def _begin_anew(self):
        self.leave()
        self._lives += 1
        self.wid = f"{self.name}-{self._lives}"
        self._beaten_at = float("-inf")

    def _work(self, job):
        jid = job["jid"]
        self.scribe.note("begin", jid, self.wid)
        time.sleep(self.chance.choice((0.0, 0.0, 0.0, 0.02)))
        self.scribe.note("end", jid, self.wid)
        if job.get("retry") == 0:
            self.insist("FAIL " + json.dumps({"jid": jid, "errtype": "E", "message": "fails on purpose"}))
        else:
            self.insist("ACK " + json.dumps({"jid": jid}))
        self.scribe.note("acked", jid, self.wid)


ROLES = {"make": Maker, "take": Taker}

if __name__ == "__main__":
    folder, name, role, *more = sys.argv[1:]
    ROLES[role](folder, name).run(*more)
