"""Run a Django process that uses the public API: `python -m tests.outside.enqueuers FOLDER NAME SEED PROFILE`.

Its threads enqueue tasks and batches. One more thread changes limits, one holds a unique key, and one records when
the database is slow. All threads end when the file FOLDER/make-ends exists.
"""

import itertools
import random
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import django

django.setup()

from django.db import Error, connections, transaction  # noqa: E402  (after the setup)
from django.utils import timezone  # noqa: E402

from django_faktory import Batch, NotUnique  # noqa: E402
from django_faktory.errors import FaktoryError  # noqa: E402
from django_faktory.tasks import limits  # noqa: E402
from tests.faults.history import Scribe, Tally  # noqa: E402
from tests.outside import profiles, tasks  # noqa: E402
from tests.outside.evidence import STALL_S  # noqa: E402
from tests.outside.playing import ALWAYS  # noqa: E402
from tests.outside.wire import CALL_SCRIPT, UNIQUE_SCRIPT, compact  # noqa: E402
from tests.project.models import Mark  # noqa: E402

PAUSE_S, LOOK_S = 0.05, 0.2
CANARY_ROW = 10**9


class Undone(Exception):
    """Raise this to roll a transaction back."""


class Thread(threading.Thread):
    def __init__(self, folder, name, seed, profile):
        super().__init__(name=name)
        self.folder, self.profile = Path(folder), profile
        self.chance = random.Random(f"{seed} {name}")
        self.note = Scribe(folder, name).note

    def is_over(self):
        return (self.folder / "make-ends").exists()

    def run(self):
        while not self.is_over():
            self.turn()
        self.at_end()
        connections.close_all()

    def at_end(self):
        pass

    def undo(self, jid):
        self.note("undone", jid)
        raise Undone

    def insist(self, verb):
        """Retry `verb` until the database executes it."""
        while True:
            try:
                return verb()
            except (Error, FaktoryError) as error:
                self.note("trouble", type(error).__name__)
                connections.close_all()
                time.sleep(PAUSE_S)


class Enqueuer(Thread):
    def __init__(self, *args):
        super().__init__(*args)
        self._count = itertools.count()
        self._tally = Tally(self.folder)

    def turn(self):
        noted = self._tally.look()
        if noted["ok"] - noted["end"] > self.profile.most_ahead:
            time.sleep(PAUSE_S)
            return
        [kind] = self.chance.choices(list(self.profile.jobs), list(self.profile.jobs.values()))
        try:
            getattr(self, kind)()
        except (Error, FaktoryError) as error:
            self.note("trouble", type(error).__name__)
            connections.close_all()

    def script(self, fails=0):
        return {"ms": self.chance.choice((1, 5, 20, 60, 200)), "fails": fails}

    def sent(self, task, result, **spec):
        known = {"task": task.jobtype, "queue": "default", "fails": 0, "kind": "django"}
        self.note("sent", result.id, compact(known | spec))
        return result.id

    @contextmanager
    def committed(self):
        """Open a transaction; when it is committed, note each jid of the yielded list as acknowledged."""
        jids = []
        with transaction.atomic():
            yield jids
        for jid in jids:
            self.note("ok", jid)

    def one(self, task, *args, **spec):
        with self.committed() as jids:
            jids.append(self.sent(task, task.enqueue(*args), **spec))

    def work(self):
        self.one(tasks.work, self.script())

    def write(self):
        self.one(tasks.write, self.script(), effect=1)

    def stepped(self):
        self.one(tasks.stepped, self.script(), effect=1, parts=3)

    def long(self):
        self.one(tasks.long, {"ms": int(self.profile.long_s * 1000), "fails": 0})

    def locked(self):
        key = self.chance.randrange(profiles.LOCK_KEYS)
        self.one(tasks.locked, key, self.script(), lock=f"lock {key}".replace(" ", "_"))

    def unique(self):
        key = self.chance.randrange(1, profiles.UNIQUE_KEYS)
        try:
            self.one(tasks.unique, key, UNIQUE_SCRIPT, unique=key)
        except NotUnique:
            time.sleep(PAUSE_S)

    def later(self):
        in_s = self.chance.uniform(0.2, 1.5)
        task = tasks.work.using(run_after=timezone.now() + timedelta(seconds=in_s))
        at = time.monotonic() + in_s
        with self.committed() as jids:
            jids.append(self.sent(tasks.work, task.enqueue(self.script()), at=at))

    def fails(self):
        if self.chance.random() < 0.5:
            self.one(tasks.fails, self.script(2), fails=2)
        else:
            self.one(tasks.fails, self.script(ALWAYS), fails=ALWAYS, dies=1)

    def many(self):
        task = self.chance.choice((tasks.work, tasks.write))
        with self.committed() as jids:
            for result in task.enqueue_many([(self.script(),) for _ in range(4)]):
                jids.append(self.sent(task, result, **({"effect": 1} if task is tasks.write else {})))

    def undone(self):
        """Roll a transaction back: its job must never run."""
        try:
            with transaction.atomic():
                result = tasks.work.enqueue(self.script())
                self.sent(tasks.work, result)
                self.undo(result.id)
        except Undone:
            pass

    def batch(self):
        """Create a batch of one to three members in one transaction; half of the batches have a child."""
        tags, made = [], []
        with self.committed() as jids:
            with self.new_batch("", tags) as (tag, _):
                made += self.members(tag, jids)
                if self.chance.random() < 0.5:
                    with self.new_batch(tag, tags) as (child, _):
                        made += self.members(child, jids)
            for tag in tags:
                self.note("commit", tag)
        for tag in tags:
            self.note("committed", tag)

    @contextmanager
    def new_batch(self, parent, tags):
        tag = f"{self.name}-b{next(self._count)}"
        kinds = self.chance.choice((["complete", "success"], ["success"], ["complete"]))
        calls = {kind: tasks.called.callback(tag, kind, CALL_SCRIPT) for kind in kinds}
        self.note("new", tag, compact({"parent": parent, "kinds": kinds}))
        with Batch(description=tag, **calls) as batch:
            self.note("new-ok", tag, batch.bid)
            tags.append(tag)
            yield tag, batch

    def members(self, tag, jids):
        made = []
        for _ in range(self.chance.randint(1, 3)):
            task = self.chance.choice((tasks.member, tasks.write))
            fails = self.chance.choice((0, 0, 1)) if task is tasks.member else 0
            spec = {"fails": fails, "tag": tag} | ({"effect": 1} if task is tasks.write else {})
            made.append(self.sent(task, task.enqueue(self.script(fails)), **spec))
        jids += made
        return made


class Holder(Thread):
    """Hold a unique key in a transaction every 0.5 s; roll half of these transactions back."""

    def turn(self):
        time.sleep(0.5)
        try:
            with transaction.atomic():
                result = tasks.unique.enqueue(profiles.HELD_KEY, UNIQUE_SCRIPT)
                self.note("hold", result.id)
                spec = {"task": tasks.unique.jobtype, "queue": "default", "fails": 0, "kind": "django", "unique": 0}
                self.note("sent", result.id, compact(spec))
                until = time.monotonic() + profiles.HOLD_S
                while time.monotonic() < until and not self.is_over():
                    time.sleep(LOOK_S)
                if self.chance.random() < 0.5:
                    self.undo(result.id)
            self.note("ok", result.id)
        except (Undone, NotUnique):
            pass
        except (Error, FaktoryError) as error:
            self.note("trouble", type(error).__name__)
            connections.close_all()
        self.note("unhold")


class Limiter(Thread):
    """Set, change, pause and remove limits, one change at a time."""

    def __init__(self, *args):
        super().__init__(*args)
        self._now = dict.fromkeys(self.profile.limits)

    def turn(self):
        place = self.chance.choice(self.profile.limits)
        self.change(place)
        until = time.monotonic() + self.chance.uniform(*self.profile.limit_pause_s)
        while time.monotonic() < until and not self.is_over():
            time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))

    def change(self, place):
        scope, name = place
        before = self._now[place]
        if self.profile.is_limit_steady:
            self.do(place, str(profiles.STEADY_LIMIT), lambda: self.set_slowly(place))
        elif scope == "task" and self.chance.random() < 0.2:
            self.do(place, "0", lambda: limits.pause(name))
            time.sleep(self.chance.uniform(*self.profile.limit_pause_s))
            self.do(place, "none" if before is None else str(before), lambda: limits.resume(name))
        elif before is not None and self.chance.random() < 0.3:
            self.do(place, "none", lambda: limits.remove_limit(scope, name))
            self._now[place] = None
        else:
            self.set(place, self.chance.randint(1, 5))

    def set(self, place, number):
        self.do(place, str(number), lambda: limits.set_limit(*place, number))
        self._now[place] = number

    def set_slowly(self, place):
        """Set the limit twice in a slow transaction of the project: the count at its end meets half-done claims."""
        with transaction.atomic():
            limits.set_limit(*place, profiles.STEADY_LIMIT)
            time.sleep(PAUSE_S)
            limits.set_limit(*place, profiles.STEADY_LIMIT)

    def do(self, place, value, verb):
        self.note("limit", *place, value)
        self.insist(verb)
        self.note("limited", *place, value)

    def at_end(self):
        for place in self.profile.limits:
            self.set(place, profiles.STEADY_LIMIT)


class Canary(Thread):
    """Write its own row every `LOOK_S`; note each write that takes longer than `STALL_S`."""

    def turn(self):
        begun = time.monotonic()
        try:
            Mark.objects.update_or_create(pk=CANARY_ROW, defaults={"text": f"canary {begun}"})
        except Error:
            connections.close_all()
        took = time.monotonic() - begun
        if took > STALL_S:
            self.note("stall", f"{begun:.6f}", f"{took:.3f}")
        time.sleep(LOOK_S)


def main(folder, name, seed, profile_name):
    profile = profiles.on(django.db.connection.vendor, profiles.PROFILES[profile_name])
    threads = [Enqueuer(folder, f"{name}-{n}", seed, profile) for n in range(profile.enqueuers)]
    threads += [Limiter(folder, f"{name}-limits", seed, profile)] * bool(profile.limits)
    threads += [Holder(folder, f"{name}-holds", seed, profile)] * profile.holds
    threads.append(Canary(folder, f"{name}-canary", seed, profile))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
