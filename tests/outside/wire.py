"""Run clients over the wire in a separate process: `python -m tests.outside.wire FOLDER NAME SEED PROFILE ROLE`.

ROLE is `push`, `take` or `requeue`. Producers end when the file FOLDER/make-ends exists, other roles when
FOLDER/take-ends exists. Uses neither Django nor the store.
"""

import itertools
import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.faults.client import Client
from tests.faults.history import Tally
from tests.outside import profiles
from tests.outside.playing import ALWAYS, Stage
from tests.server.raw import RawClient, worker

ANSWER_S = 12.0
BEAT_EVERY_S, MUTE_S = 0.5, 4.5
"""A worker without an answer to its BEATs for `MUTE_S` notes that: its jobs may be given to other workers."""
PAUSE_S, PACE_S = 0.05, 0.005
UNIQUE_SCRIPT = {"ms": 30, "fails": 0}
CALL_SCRIPT = {"ms": 5, "fails": 0}
QUEUE = "wire"
QUEUES = tuple(f"wire-{number}" for number in range(6))
KEPT_S = 3600


def compact(value):
    return json.dumps(value, separators=(",", ":"))


class Talker(Client):
    """Send one command at a time to a random node; note the errors."""

    def __init__(self, folder, name, seed, profile):
        super().__init__(folder, name)
        self.chance = random.Random(f"{seed} {name}")
        self.profile = profile

    def _connect(self):
        try:
            host, port = self.chance.choice((self.folder / "nodes").read_text().split()).rsplit(":", 1)
            self._client = RawClient.identified((host, int(port)), timeout_s=ANSWER_S, **self.hello())
        except (
            OSError,
            AssertionError,
            IndexError,
        ):  # refused, reset, closed before HELLO was answered; or no node is listed
            time.sleep(PAUSE_S)

    def note(self, *words):
        self.scribe.note(*words)

    def asked(self, line):
        """Return the reply, b"" if none came. Note every error reply, because no note of a jid contains it."""
        begun = time.monotonic()
        reply = self.ask(line)
        if reply is not None and reply.startswith(b"-"):
            verb = "_".join(line.split()[: 2 if line.startswith("BATCH") else 1])
            self.note("error", verb, f"{begun:.6f}", reply.decode(errors="replace").replace(" ", "_"))
        return reply

    def until_ok(self, line):
        """Repeat the command until it succeeds; return False if it is refused for good."""
        while True:
            reply = self.asked(line)
            if reply[:1] == b"+" or reply.startswith(b"-ERR Job not found"):
                return reply[:1] == b"+"
            if reply and b"batch" in reply:
                return False
            time.sleep(PAUSE_S)

    def is_over(self, name="make-ends"):
        return (self.folder / name).exists()


class Pusher(Talker):
    def __init__(self, *args):
        super().__init__(*args)
        self._count = itertools.count()
        self._tally = Tally(self.folder)

    def run(self):
        wire = {"plain": 1} if self.profile.holds and self.name.endswith("-1") else self.profile.wire
        kinds, often = list(wire), list(wire.values())
        while not self.is_over():
            noted = self._tally.look()
            if noted["ok"] - noted["end"] > self.profile.most_ahead:
                time.sleep(PAUSE_S)
                continue
            [kind] = self.chance.choices(kinds, often)
            getattr(self, kind)()
            time.sleep(PACE_S)

    def script(self, fails=0):
        return {"ms": self.chance.choice((1, 5, 20, 60, 200)), "fails": fails}

    def job(self, spec=None, *, script=None, queue=QUEUE, jobtype="wire", args=(), **fields):
        """Return a job and its spec: the facts about it that the referee needs."""
        jid = f"{self.name}-{next(self._count):06d}"
        script = script or self.script()
        custom = fields.pop("custom", {}) | {"result_ttl": KEPT_S}
        job = {"jid": jid, "jobtype": jobtype, "queue": queue, "args": [*args, script], "custom": custom, **fields}
        known = {"task": jobtype, "queue": queue, "fails": script["fails"], "kind": "plain"}
        return job, known | (spec or {})

    def push(self, job, spec):
        self.note("sent", job["jid"], compact(spec))
        reply = self.ask("PUSH " + compact(job))
        if reply == b"+OK":
            self.note("ok", job["jid"])
        elif reply:
            self.note("refused", job["jid"], reply.decode(errors="replace").replace(" ", "_"))
        return reply == b"+OK"

    def plain(self):
        self.push(*self.job(priority=self.chance.randint(1, 9)))

    def bulk(self):
        self.push_together([self.job() for _ in range(5)])

    def push_together(self, made):
        for job, spec in made:
            self.note("sent", job["jid"], compact(spec))
        reply = self.ask("PUSHB " + compact([job for job, _ in made]))
        refused = json.loads(reply) if reply and not reply.startswith(b"-") else {}
        for job, _ in made if reply else []:
            why = refused.get(job["jid"], "") or (reply.decode(errors="replace") if reply.startswith(b"-") else "")
            self.note(*(("refused", job["jid"], why.replace(" ", "_")) if why else ("ok", job["jid"])))

    def lock(self):
        key = f"wire{self.chance.randrange(profiles.LOCK_KEYS)}"
        self.push(*self.job({"lock": key}, custom={"lock": key}))

    def limit(self):
        custom, script = {"limit": profiles.LIMIT_KEY}, {"ms": self.chance.choice((40, 80)), "fails": 0}
        self.push(*self.job(dict(custom), script=script, custom=custom, queue=self.chance.choice(QUEUES)))

    def both(self):
        """Push a job with a lock and a limit.

        When a lock becomes free, each queue has a ready job with that lock: most of these are claimed in vain.
        """
        custom = {"lock": f"both{self.chance.randrange(2)}", "limit": profiles.LIMIT_KEY}
        script = {"ms": self.chance.choice((40, 80)), "fails": 0}
        self.push(*self.job(dict(custom), script=script, custom=custom, queue=self.chance.choice(QUEUES)))

    def later(self):
        in_s = self.chance.uniform(0.2, 1.5)
        at = datetime.now(UTC) + timedelta(seconds=in_s)
        self.push(*self.job({"at": time.monotonic() + in_s}, at=at.isoformat()))

    def fails(self):
        """Push a job that fails once or always; `requeue` runs its retry early."""
        if self.chance.random() < 0.5:
            self.push(*self.job(script=self.script(1), retry=3))
        else:
            self.push(*self.job({"dies": 1}, script=self.script(ALWAYS), retry=1))

    def task(self):
        self.push(*self.job(queue="default", jobtype=self.chance.choice((profiles.WORK, profiles.WRITE))))

    def unique(self):
        held = self.profile.holds and self.name.endswith("-0") and self.chance.random() < 0.2
        key = profiles.HELD_KEY if held else self.chance.randrange(1, profiles.UNIQUE_KEYS)
        spec = {"unique": key, "kind": "held" if held else "may_block"}
        fields = {"queue": "default", "jobtype": f"{profiles.TASKS}.unique", "custom": {"unique_for": KEPT_S}}
        self.push(*self.job(spec, script=UNIQUE_SCRIPT, args=[key], **fields))

    # --- batches ---

    def batch(self, parent="", depth=0):
        """Create a batch with members, sometimes with a child or a member that reopens it, and commit it."""
        tag = f"{self.name}-b{next(self._count)}"
        kinds = self.chance.choice((["complete", "success"], ["success"], ["complete"]))
        bid = self.new(tag, parent, kinds)
        if not bid:
            return
        for _ in range(self.chance.randint(1, 4)):
            self.push_member(tag, bid)
        if depth == 0 and self.chance.random() < 0.4:
            self.batch(parent=f"{bid} {tag}", depth=1)
        if depth == 0 and self.chance.random() < 0.3:
            self.push_member(tag, bid, reopens=True)
        self.note("commit", tag)
        self.note("committed" if self.until_ok(f"BATCH COMMIT {bid}") else "uncommitted", tag)

    def new(self, tag, parent, kinds):
        parent_bid, _, parent_tag = parent.partition(" ")
        callbacks = {
            kind: {"jobtype": f"{profiles.TASKS}.called", "queue": "default", "args": [tag, kind, CALL_SCRIPT],
                   "custom": {"result_ttl": KEPT_S}}
            for kind in kinds
        }  # fmt: skip
        self.note("new", tag, compact({"parent": parent_tag, "kinds": kinds}))
        reply = self.ask("BATCH NEW " + compact({"description": tag, "parent_bid": parent_bid, **callbacks}))
        if reply.startswith(b"-"):
            self.note("new-refused", tag, reply.decode(errors="replace").replace(" ", "_"))
            return ""
        if reply:
            self.note("new-ok", tag, reply.decode())
        return reply.decode()

    def push_member(self, tag, bid, *, reopens=False):
        script = self.script(self.chance.choice((0, 0, 0, 1)))
        fields = {"custom": {"bid": bid}, "retry": 3}
        if reopens:  # scheduled, so that the batch is already committed when it runs
            script |= {"reopens": bid, "tag": tag, "fails": 0}
            fields["at"] = (datetime.now(UTC) + timedelta(seconds=0.4)).isoformat()
        if not reopens and self.chance.random() < 0.5:
            fields |= {"queue": "default", "jobtype": f"{profiles.TASKS}.member"}
        self.push(*self.job({"tag": tag, "kind": "may_block"}, script=script, **fields))


class Taker(Talker):
    """Run one job at a time. After a FETCH without an answer it continues as a new worker."""

    def __init__(self, stage, *args):
        super().__init__(*args)
        self.stage = stage
        self._lives, self._count = 0, itertools.count()
        self._begin_anew()

    def hello(self):
        return worker(self.wid)

    def run(self):
        while not self.is_over("take-ends"):
            self.beat()
            reply = self.ask(f"FETCH {' '.join(self.chance.sample((QUEUE, *QUEUES), 1 + len(QUEUES)))}")
            if reply == b"" or (reply is not None and reply.startswith(b"-")):
                self._begin_anew()
            elif reply is not None:
                self._work(json.loads(reply))

    def beat(self):
        asked_at = time.monotonic()
        if asked_at - self._beaten_at < BEAT_EVERY_S:
            return
        reply = self.ask("BEAT " + compact({"wid": self.wid}))
        if reply.startswith(b"-ERR unknown worker"):
            self.note("mute", self.wid, f"{asked_at - 60:.6f}")
            self._begin_anew()
        elif reply and not reply.startswith(b"-"):
            self._look_back()
            self._beaten_at = asked_at

    def _look_back(self):
        if time.monotonic() - self._beaten_at > MUTE_S:
            self.note("mute", self.wid, f"{self._beaten_at:.6f}")

    def _begin_anew(self):
        self.leave()
        self._lives += 1
        self.wid = f"{self.name}.{self._lives}"
        self._beaten_at = time.monotonic() - BEAT_EVERY_S

    def _work(self, job):
        jid, script = job["jid"], job["args"][-1]
        if job["jobtype"].endswith("called"):
            self.stage.note("called", jid, *job["args"][:2])
        fails = self.stage.play(jid, self.wid, script)
        self.beat()
        is_open = "reopens" in script and self.reopen(script)
        if fails:
            done = self.until_ok("FAIL " + compact({"jid": jid, "errtype": "E", "message": "as the script says"}))
        else:
            done = self.until_ok("ACK " + compact({"jid": jid}))
        self._look_back()
        self.note("acked" if done else "gone", jid, self.wid)
        if is_open:
            self.close_again(script)

    def reopen(self, script):
        reply = self.ask(f"BATCH OPEN {script['reopens']}")
        if reply == script["reopens"].encode():
            self.note("reopened", script["tag"])
            return True
        return False

    def close_again(self, script):
        """Add one more member to the reopened batch after the job's own end, then commit the batch."""
        jid = f"{self.name}-r{next(self._count):06d}"
        more = {"ms": 5, "fails": 0}
        job = {"jid": jid, "jobtype": "wire", "queue": QUEUE, "args": [more], "custom": {"bid": script["reopens"]}}
        job["custom"]["result_ttl"] = KEPT_S
        spec = {"task": "wire", "queue": QUEUE, "fails": 0, "kind": "may_block", "tag": script["tag"], "adds": 1}
        time.sleep(self.chance.uniform(0, 0.3))
        self.note("sent", jid, compact(spec))
        reply = self.ask("PUSH " + compact(job))
        if reply == b"+OK":
            self.note("ok", jid)
        elif reply:
            self.note("refused", jid, reply.decode(errors="replace").replace(" ", "_"))
        self.note("recommit", script["tag"])
        if self.until_ok(f"BATCH COMMIT {script['reopens']}"):
            self.note("recommitted", script["tag"])


class Requeuer(Talker):
    """Requeue all retries every 0.3 s."""

    def run(self):
        while not self.is_over("take-ends"):
            self.ask('MUTATE {"cmd":"requeue","target":"retries"}')
            time.sleep(0.3)


def main(folder, name, seed, profile_name, role):
    profile = profiles.PROFILES[profile_name]
    if role == "take":
        stage = Stage(folder, f"{name}-runs")
        workers = [Taker(stage, folder, f"{name}-{n}", seed, profile) for n in range(profile.threads)]
        stage.note("process", str(os.getpid()))
    elif role == "push":
        workers = [Pusher(folder, f"{name}-{n}", seed, profile) for n in range(profile.pushers)]
    else:
        workers = [Requeuer(folder, name, seed, profile)]
    threads = [threading.Thread(target=one.run) for one in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in workers:
        with suppress(OSError):
            one.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
