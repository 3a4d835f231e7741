"""Attack a server with every input at full size, and measure a good client: `python -m tests.attacks`.

    python -m tests.attacks [--only PushBulk …] [--database sqlite,postgresql] [--connections 1,60] [--commands 400]

An attack lasts until the good client has enough answers for a p99: at least `LEAST_S`, at most `MOST_S` seconds, and
longer if the attackers have fewer than `LEAST_REPLIES` replies. The next one begins when its commands are executed.
Prints a Markdown table. The exit code is 1 if a figure exceeds its bound, a worker was lost, or a reply was wrong.
The attackers run on the same machine at a lower priority, because they represent clients on other machines.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass

P99_MS, MAX_MS, LEFT_MB = 100.0, 500.0, 64.0
SIZE = 16 * 2**20
"""The default of `MAX_COMMAND_BYTES`."""

WARM_UP_S = 1.0
LEAST_S, MOST_S = 1.2, 15.0
"""Seconds of an attack."""

LEAST_REPLIES = 3
"""Replies of an attack: with them the good client is measured while the server executes the commands, too."""

QUEUES = ["good", "kept"]
"""Queues of the good client."""

DRAIN_S = 60.0
"""Seconds within which the server must execute what the attackers have sent."""

IDLE_S = 2.0
"""Seconds without a new job after which it has: to parse and store one line takes less than one."""

NO_WORK_S = 0.4
IDLE_CPU = 0.1
"""It also has if it uses at most this share of a core for so many seconds: MUTATE and QUEUE REMOVE store no job."""

SETTLE_S = 30.0
"""Seconds within which the server must return memory."""

HEAD = (
    "| verb | input | connections | database | p50 ms | p99 ms | max ms | RSS delta MB | |\n"
    "|---|---|---:|---|---:|---:|---:|---:|---|"
)


@dataclass
class Measured:
    """The figures of one attack. `trouble` describes failures that no figure shows."""

    attack: object
    connections: int
    database: str
    ms: list
    left_mb: float
    trouble: str
    replies: list

    def figures(self):
        ordered = sorted(self.ms) or [float("nan")]
        return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1]

    def is_good(self):
        _, p99, most = self.figures()
        return not self.trouble and p99 < P99_MS and most < MAX_MS and self.left_mb < LEFT_MB

    def row(self):
        verb = self.attack.verb.__name__ if self.attack.verb else "connection"
        p50, p99, most = self.figures()
        verdict = "" if self.is_good() else f"**missed** {self.trouble}".strip()
        name = self.attack.name if self.attack.is_legal else f"{self.attack.name} (refused)"
        return (
            f"| {verb} | {name} | {self.connections} | {self.database} | {p50:.1f} | {p99:.1f} | {most:.0f}"
            f" | {self.left_mb:.0f} | {verdict} |"
        )


class Attackers:
    """The process that sends one attack after another."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.attackers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, **asked):
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ready\n", "the attack did not begin"
        self._is_asked_to_end = False

    def ask_to_end(self):
        """Ask to end once a reply has arrived; idempotent."""
        if not self._is_asked_to_end:
            self._is_asked_to_end = True
            self._process.stdin.write("end\n")
            self._process.stdin.flush()

    def has_ended(self):
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def result(self):
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)


class Campaign:
    """Run all chosen attacks on one database."""

    def __init__(self, database, options):
        from django.db import connection

        self.database, self.options = database, options
        self._creation, self._old_name = connection.creation, connection.settings_dict["NAME"]
        self._creation.create_test_db(verbosity=0, autoclobber=True)
        self._name = str(connection.settings_dict["NAME"])
        connection.close()
        self._attackers = Attackers()

    def run(self):
        from tests.attacks.inputs import ATTACKS

        chosen = [
            one for one in ATTACKS if not self.options.only or any(word in str(one) for word in self.options.only)
        ]
        self.target = self.good = None
        for kind in ("plain", "password", "tls"):
            for attack in (one for one in chosen if one.server == kind):
                for connections in self.options.connections:
                    yield self._attacked(attack, connections)
            self._stop()

    def close(self):
        self._stop()
        self._attackers.close()
        self._creation.destroy_test_db(self._old_name, verbosity=0)

    def _attacked(self, attack, connections):
        self._start(attack.server)
        before_mb = self.target.rss_mb()
        least_replies = LEAST_REPLIES if attack.reads and attack.server != "tls" else 0
        asked = {"connections": connections, "size": SIZE, "seconds": 2 * MOST_S, "least_replies": least_replies}
        trouble = ""
        self._attackers.begin(name=str(attack), port=self.target.port, **asked)
        try:
            self.good.work_for(LEAST_S, commands=self.options.commands, at_most=MOST_S)
            self._attackers.ask_to_end()
            self.good.work_until(self._attackers.has_ended)
        except (AssertionError, OSError, ValueError) as error:
            trouble = f"good client: {error}"[:120].replace("|", "/")
            self._attackers.ask_to_end()
        found = self._attackers.result()
        left_mb = self._left_mb(before_mb)
        if found["wrong"]:
            trouble += f" wrong reply: {found['wrong']}"[:120].replace("|", "/")
        trouble += self._losses()
        trouble = trouble or self._wait_until_executed()
        measured = Measured(attack, connections, self.database, self.good.ms, left_mb, trouble, found["replies"])
        if measured.is_good():
            self._clean_up()
        else:
            self._stop()  # its leftovers must not affect the next attack
        return measured

    def _start(self, kind):
        from django_faktory.brokers import tls
        from tests.attacks.target import GoodClient, Target
        from tests.server.raw import CERTIFICATE

        if self.target is None:
            self.target = Target(self._name, kind)
            self.good = GoodClient(self.target, tls.client_context(str(CERTIFICATE)))
            self.good.work_for(WARM_UP_S)

    def _stop(self):
        if self.target is not None:
            self.good.close()
            self.target.close()
            self.target = self.good = None
            self._clean_up(everything=True)

    def _left_mb(self, before_mb):
        ends_at = time.monotonic() + SETTLE_S
        while (left := self.target.rss_mb() - before_mb) >= LEFT_MB and time.monotonic() < ends_at:
            time.sleep(0.1)
        return left

    def _wait_until_executed(self):
        """Wait until the server has executed all lines of the attackers; return what went wrong, or "".

        It executes each line that it has received, also if the client has left. No command is sent in the meantime, so
        that it does not pause between large sets.
        """
        ends_at = time.monotonic() + DRAIN_S
        while self._is_busy():
            if time.monotonic() > ends_at:
                return f" commands are still being executed after {DRAIN_S:.0f} s"
        return ""

    def _is_busy(self):
        """Return True if the server uses its CPU or, while jobs of the attackers are stored, has just stored one."""
        newest, used_s = self._newest_job_of_attackers(), self.target.cpu_s()
        pause_s = NO_WORK_S if newest is None else IDLE_S
        time.sleep(pause_s)
        is_idle = self.target.cpu_s() - used_s < IDLE_CPU * pause_s
        return not is_idle or self._newest_job_of_attackers() != newest

    @staticmethod
    def _newest_job_of_attackers():
        from django_faktory.models import Job

        return Job.objects.exclude(queue__in=QUEUES).order_by("-pk").values_list("pk", flat=True).first()

    def _losses(self):
        from django_faktory.models import Job, WorkerProcess

        if not self.target.is_alive():
            return " the server has ended"
        is_kept = Job.objects.filter(jid=self.good.kept, wid="good", state="working").exists()
        return "" if is_kept and WorkerProcess.objects.filter(wid="good").exists() else " the worker was lost"

    def _clean_up(self, *, everything=False):
        """Delete the rows that the attackers stored."""
        from django_faktory.models import Batch, Job, Queue, WorkerProcess

        kept = [] if everything else QUEUES
        rows = Job.objects.exclude(queue__in=kept)
        rows._raw_delete(rows.db)
        Queue.objects.exclude(name__in=kept).delete()
        WorkerProcess.objects.exclude(wid="" if everything else "good").delete()
        Batch.objects.all().delete()


def attack_one_database(options):
    """Run the attacks in a separate process, because settings contain only one database."""
    import django

    django.setup()
    campaign = Campaign(options.database[0], options)
    found = []
    try:
        for measured in campaign.run():
            print(f"{measured.row()} {measured.replies}", file=sys.stderr, flush=True)
            found.append(measured)
    finally:
        campaign.close()
    print("\n".join(measured.row() for measured in found))
    return 0 if found and all(measured.is_good() for measured in found) else 1


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("--only", nargs="*", default=[], help="attacks whose name has one of these words")
    parser.add_argument("--database", default="sqlite,postgresql", type=lambda text: text.split(","))
    parser.add_argument("--connections", default="1,60", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--commands", default=400, type=int, help="of the good client in each attack (default: 400)")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    if options.rows:
        return attack_one_database(options)
    began = time.monotonic()
    rows, codes = [], []
    for database in options.database:
        environment = {
            "FAKTORY_TEST_TAG": "attacks_full",
            **os.environ,
            "FAKTORY_TEST_DB": database,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        command = [sys.executable, "-m", "tests.attacks", "--rows", "--database", database]
        command += ["--connections", ",".join(map(str, options.connections)), "--commands", str(options.commands)]
        command += ["--only", *options.only] if options.only else []
        process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        rows.append(process.stdout.rstrip())
        codes.append(process.returncode)
    print("\n".join([HEAD, *rows]))
    print(
        f"\nBounds: p99 {P99_MS:.0f} ms, max {MAX_MS:.0f} ms, RSS delta {LEFT_MB:.0f} MB;"
        f" {time.monotonic() - began:.0f} s in all."
    )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
