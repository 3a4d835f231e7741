"""A client in a process of its own, to be stopped and killed: fetches jobs over the wire and enters their keys' places.

It moves from node to node, as clients do when their node has ended. From the view of a client, a lease ends when its
duration has passed since the client sent the last command that extends it: then it reports the lock as lost. It imports
neither Django nor the store. Its log lines for the test are a word, and a jid, a wid or the ids of runs.
"""

import json
import random
import sys
import time
from pathlib import Path

from tests.server.raw import RawClient, worker
from tests.store.locks.places import Place


class LockClient:
    def __init__(self, folder, name, lease_s):
        self.folder, self.name, self.lease_s = Path(folder), name, lease_s
        self.chance = random.Random()
        self.wid, self._client = "", None
        self._lives = self._runs = 0
        self._valid_until = 0.0

    def run(self):
        while not (self.folder / "enough").exists():
            self._live()
        if self._client is not None:
            self._client.ask("END")

    def _live(self):
        self._connect()
        asked_at = time.monotonic()
        try:
            reply = self._client.ask("FETCH a b")
        except OSError:
            reply = b""
        if reply == b"" or (reply is not None and reply.startswith(b"-")):
            self._client, self.wid = None, ""  # a job in the lost reply is left to the lease of the old worker id
            return
        if reply is not None:
            self._valid_until = asked_at + self.lease_s
            job = json.loads(reply)
            self._work(job["jid"], job["custom"]["lock"])

    def _work(self, jid, key):
        self._runs += 1
        run = f"{jid}@{self.wid}/{self._runs}"
        place = Place(self.folder, key)
        inside = place.enter(run)
        if inside is not None:
            self._log("overlap", inside, run)
        is_lost = not self._extended()
        until = time.monotonic() + self.chance.choice((0.0, 0.0, 0.02, 0.1))
        while (rest_s := until - time.monotonic()) > 0 or self.chance.random() < 0.3:
            time.sleep(max(0.0, min(rest_s, self.lease_s / 4)))
            is_lost |= not self._extended()
        if is_lost or time.monotonic() > self._valid_until:
            self._log("lost", run)
        place.leave()
        if self.chance.random() < 0.1:
            self._insist("FAIL", {"jid": jid, "errtype": "E", "message": "by chance"})
        else:
            self._log("ends", jid)
            self._insist("ACK", {"jid": jid})

    def _extended(self):
        """Send BEAT, and return True if the reply arrived before the lease ended."""
        asked_at = time.monotonic()
        self._insist("BEAT", {"wid": self.wid})
        is_in_time = time.monotonic() < self._valid_until
        self._valid_until = asked_at + self.lease_s
        return is_in_time

    def _insist(self, verb, fields):
        """Send a command until a node answers it: with `+OK`, or with the notice that the worker is given up."""
        while True:
            self._connect()
            try:
                reply = self._client.ask(f"{verb} {json.dumps(fields)}")
            except OSError:
                reply = b""
            if reply is not None and reply.startswith(b"+"):
                return
            self._client = None

    def _connect(self):
        while self._client is None:
            if not self.wid:
                self._lives += 1
                self.wid = f"{self.name}-{self._lives}"
                self._log("wid", self.wid)
            try:
                host, port = self.chance.choice((self.folder / "nodes").read_text().split()).rsplit(":", 1)
                self._client = RawClient.identified((host, int(port)), timeout_s=5, **worker(self.wid))
            except (OSError, AssertionError):  # refused, reset, or closed before HELLO was answered
                time.sleep(0.02)

    def _log(self, *words):
        with (self.folder / f"{self.name}.log").open("a") as log:
            log.write(" ".join(words) + "\n")


if __name__ == "__main__":
    LockClient(sys.argv[1], sys.argv[2], float(sys.argv[3])).run()
