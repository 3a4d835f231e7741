"""Measure a well-behaved client's latency and the server's memory during attacks, one attack after the other.

    python -m benchmarks.attack [slow deaf …] [--seconds 15] [--scale 1] [--json]

Uses PostgreSQL as it is configured; BENCH_DATABASE=sqlite selects SQLite. Each attack has its own server with default
settings, except for a password if one is guessed, and 12,000 connections if the attack opens that many. Prints a table;
all figures are in results/attack.json. The exit code is 1 if a good client's p99 reached 100 ms, or the memory
`MOST_MB`.
`--scale 0.01 --seconds 2` only shows that the benchmark works.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from hashlib import sha256

from benchmarks.attackers import KINDS
from benchmarks.client import Client
from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.peers import readings
from benchmarks.processes import node

P99_MS = 100.0
MOST_MB = 1024
PASSWORD = "the good client knows it"
SETTINGS = {"idle": {"MAX_CONNECTIONS": 12_000}, "silent": {"MAX_CONNECTIONS": 12_000}}
GUESSED = ("guesses", "guesses_from_everywhere")
ENOUGH_FILES = 25_000
"""Enough for both ends of 10,000 connections."""


class GoodClient:
    """Sends PUSH, FETCH and ACK with a short pause, and times each reply. It connects before the attack."""

    def __init__(self, port, password):
        self._client = Client.worker(port, "good") if not password else _with_password(port, password)
        self._numbers = iter(range(10**9))
        self.ms = {"PUSH": [], "FETCH": [], "ACK": []}

    def work(self, seconds):
        """Discard earlier times, then send commands for this many seconds."""
        self.ms = {verb: [] for verb in self.ms}
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            jid = f"good-{next(self._numbers):08d}"
            self._ask("PUSH", json.dumps({"jid": jid, "jobtype": "noop", "queue": "good", "args": []}))
            job = self._ask("FETCH", "good")
            if job is None or json.loads(job)["jid"] != jid:
                raise RuntimeError(f"expected {jid}, got {job!r:.200}")
            self._ask("ACK", json.dumps({"jid": jid}))
            time.sleep(0.005)

    def _ask(self, verb, rest):
        begun = time.perf_counter()
        reply = self._client.ask(f"{verb} {rest}")
        self.ms[verb].append((time.perf_counter() - begun) * 1000)
        return reply

    def figures(self):
        """Return the figures of all commands together, and the 99th percentile of each verb."""
        every = sorted(ms for some in self.ms.values() for ms in some)
        return {
            "commands": len(every),
            "p50_ms": round(statistics.median(every), 2),
            "p99_ms": _p99(every),
            "max_ms": round(every[-1], 2),
            **{f"{verb}_p99_ms": _p99(sorted(some)) for verb, some in self.ms.items()},
        }


def _p99(ordered):
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2)


def _with_password(port, password):
    """Return a worker's connection to a server with a password, which `Client` does not support.

    The greeting contains the salt (`s`) and the number of hash rounds (`i`).
    """

    class Known(Client):
        def ask(self, line):
            if line.startswith("HELLO "):
                asked = json.loads(self.greeting[4:])
                digest = (password + asked["s"]).encode()
                for _ in range(asked["i"]):
                    digest = sha256(digest).digest()
                line = f"HELLO {json.dumps(json.loads(line[6:]) | {'pwdhash': digest.hex()})}"
            return super().ask(line)

    return Known.worker(port, "good")


class Watch:
    """Record the resident memory of a process every 0.1 s, in a thread."""

    def __init__(self, pid):
        self._pid = pid
        self._is_over = threading.Event()
        self.readings = []
        self._thread = threading.Thread(target=self._look)

    def _look(self):
        while not self._is_over.is_set():
            self.readings.append(memory_mb(self._pid))
            self._is_over.wait(0.1)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()


def memory_mb(pid):
    """Return the resident memory of this process in MB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@contextmanager
def server(kind):
    """Run a server with the settings of this attack; yield the pid of the serving process, its port and password."""
    password = PASSWORD if kind in GUESSED else ""
    os.environ["BENCH_FAKTORY"] = json.dumps(SETTINGS.get(kind, {}))
    os.environ["FAKTORY_PASSWORD"] = password
    empty()
    with node("--server-only") as (process, port):
        [pid] = [pid for pid in readings.tree(process.pid) if pid != process.pid]
        yield pid, port, password


def attacked(kind, options):
    """Return the good client's figures and the server's memory, before and during the attack."""
    with server(kind) as (pid, port, password):
        good = GoodClient(port, password)
        good.work(1.0)  # warm-up: one-time work is not measured
        good.work(options.seconds / 3)
        alone, before = good.figures(), memory_mb(pid)
        attacker = _begin(kind, port, options)
        with Watch(pid) as watch:
            good.work(options.seconds)
        output = attacker.communicate(timeout=60)[0]
        return {
            "alone": alone,
            "attacked": good.figures(),
            "rss_before_mb": round(before, 1),
            "rss_most_mb": round(max(watch.readings), 1),
            "attacker": json.loads(output.splitlines()[-1]),
        }


def _begin(kind, port, options):
    """Start the attackers; return once the attack is under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.attackers", kind, str(port), str(options.seconds), str(options.scale)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{kind}: the attack did not begin; its output is above")
    return process


def is_good(found):
    """Return True if latency and memory stayed below their limits, so that other clients can continue."""
    return found["attacked"]["p99_ms"] < P99_MS and found["rss_most_mb"] < MOST_MB


def table(found):
    """Return the results as a Markdown table."""
    lines = [
        "| attack | p50 | p99 | most | p99 alone | RSS before | RSS most | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for kind, row in found.items():
        under, alone = row["attacked"], row["alone"]
        lines.append(
            f"| {kind} | {under['p50_ms']} ms | {under['p99_ms']} ms | {under['max_ms']} ms | {alone['p99_ms']} ms"
            f" | {row['rss_before_mb']} MB | {row['rss_most_mb']} MB | {'good' if is_good(row) else 'TOO MUCH'} |"
        )
    return "\n".join(lines)


def files():
    """Raise the limit of open files as far as possible, and return it; server and attackers inherit it."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(most, ENOUGH_FILES), most):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return wanted
        except (ValueError, OSError):  # only root may exceed the hard limit
            continue
    return soft


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack")
    parser.add_argument("kinds", nargs="*", metavar="attack", help=f"which of {', '.join(KINDS)}; default: all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the usual number of attackers")
    parser.add_argument("--json", action="store_true", help="print everything")
    options = parser.parse_args()
    if unknown := set(options.kinds) - KINDS.keys():
        parser.error(f"expected some of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    limit = files()
    prepare()
    about = machine() | {"open_files": limit}
    found = {}
    for kind in options.kinds or KINDS:
        found[kind] = attacked(kind, options)
        print(f"{kind}: {json.dumps(found[kind])}", file=sys.stderr, flush=True)
    whole = {"machine": about, "options": vars(options), "attacks": found}
    (HERE / "results" / "attack.json").write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(whole, indent=2) if options.json else table(found))
    return 0 if all(map(is_good, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
