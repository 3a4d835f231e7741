"""Measure what 1, 2, 4 and 8 nodes cost one PostgreSQL: idle, during a lone FETCH, and while they drain one queue.

    python -m benchmarks.scaling [--nodes 1,2,4,8] [--jobs 20000] [--rounds 3] [--idle-s 15]

All nodes run on this machine, each with a server and one worker process. With fewer cores than nodes, jobs per second
show the limit of the machine: look at the costs per job and per node instead. PostgreSQL only, on this machine. Prints
a table, and writes it to NOTEBOOK.md after a complete run. Every round is in results/scaling.json.
"""

import argparse
import json
import os
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.growth import ask, insert, insert_ended, processed
from benchmarks.peers import readings
from benchmarks.peers.arithmetic import median
from benchmarks.probe import Probe
from benchmarks.processes import node

PAGE = HERE / "NOTEBOOK.md"
BEGIN = "<!-- scaling: begin; written by python -m benchmarks.scaling -->\n"
END = "<!-- scaling: end -->"
SETTLING_S = 5.0
PROBING_S = 5.0
STATISTICS_DELAY_S = 1.2
"""PostgreSQL counts a session's transactions at the end of a later transaction, at least one second afterwards."""

NODE = ("--processes", "1", "--concurrency", "5", "--queues", "default")
COLUMNS = {
    "connections": "connections",
    "idle_transactions_per_s": "idle: transactions/s",
    "idle_statements_per_s": "idle: statements/s",
    "idle_buffers_per_s": "idle: buffers/s",
    "idle_node_cpu_percent": "idle: CPU of a node, % of a core",
    "idle_postgresql_cpu_percent": "idle: CPU of PostgreSQL, % of a core",
    "node_pss_mb": "memory of a node, MB",
    "fetch_p50_ms": "lone FETCH p50, ms",
    "fetch_p99_ms": "p99, ms",
    "jobs_per_s": "drain: jobs/s",
    "node_ms_per_job": "CPU of the nodes, ms/job",
    "postgresql_ms_per_job": "CPU of PostgreSQL, ms/job",
    "transactions_per_job": "transactions/job",
}


def postmaster():
    """Return the pid of the parent of PostgreSQL's processes, or None if PostgreSQL runs on another machine."""
    backend = ask("SELECT pg_backend_pid()")[0]
    try:
        return int(Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def read_counts():
    """Return how many transactions, statements and buffers sessions have finished, sent and read so far.

    A session counts within a second of its next query. Statements are those of pg_stat_statements, if it is loaded.
    """
    ask("SELECT pg_stat_clear_snapshot()")
    names = ("transactions", "buffers", "statements")
    if ask("SELECT to_regclass('pg_stat_statements')")[0]:
        statements = "(SELECT SUM(calls) FROM pg_stat_statements WHERE toplevel)"
    else:
        statements = "xact_commit + xact_rollback"
    counted = ask(
        f"SELECT xact_commit + xact_rollback, blks_hit + blks_read, {statements}"
        " FROM pg_stat_database WHERE datname = current_database()"
    )
    return dict(zip(names, map(int, counted), strict=True))


def connections():
    return int(ask("SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()")[0]) - 1


class Meter:
    """Measures the CPU of nodes and PostgreSQL, and `read_counts`, from its creation until `read`."""

    def __init__(self, pids, server):
        self._pids, self._server = pids, server
        self._began, self._counts = time.monotonic(), read_counts()
        self._before = self._cpu()

    def _cpu(self):
        roots = {"nodes": self._pids, "postgresql": [self._server] if self._server else []}
        return {name: readings.cpu_s(readings.tree(*pids)) for name, pids in roots.items()}

    def read(self):
        """Return elapsed seconds, CPU seconds of nodes and of PostgreSQL, and the differences of the counts."""
        after, seconds = self._cpu(), time.monotonic() - self._began
        used = {name: readings.cpu_between(self._before[name], after[name]) for name in after}
        return seconds, used, {name: count - self._counts[name] for name, count in read_counts().items()}


def one_round(count, *, jobs, idle_s, ended):
    """Return all figures with `count` nodes."""
    empty()
    insert_ended(ended)
    server = postmaster()
    with ExitStack() as running:
        nodes = [running.enter_context(node(*NODE)) for _ in range(count)]
        pids, port = [process.pid for process, _ in nodes], nodes[0][1]
        time.sleep(SETTLING_S)
        found = {"nodes": count, "connections": connections()}
        found |= idle(Meter(pids, server), count, idle_s)
        found["node_pss_mb"] = round(readings.memory_mb(readings.tree(*pids))[1] / count, 1)
        found |= lone_fetch(port)
        found |= drain(pids, server, jobs)
    print(found, flush=True)
    return found


def idle(meter, count, seconds):
    time.sleep(seconds)
    lasted, used, did = meter.read()
    return {
        **{f"idle_{name}_per_s": round(count / lasted, 1) for name, count in did.items()},
        "idle_node_cpu_percent": round(used["nodes"] / lasted / count * 100, 2),
        "idle_postgresql_cpu_percent": round(used["postgresql"] / lasted * 100, 2),
    }


def lone_fetch(port):
    probe = Probe(port, "probe", pushes=True)
    probe.start()
    time.sleep(PROBING_S)
    probe.stop()
    taken = probe.taken()
    return {"fetch_p50_ms": taken["p50_ms"], "fetch_p99_ms": taken["p99_ms"]}


def drain(pids, server, jobs):
    """Drain one queue with all nodes' workers; return rate and costs.

    The rate is measured from the first start to the last end; results are kept so that they can be counted.
    """
    from django_faktory.store import notifier

    target = processed() + jobs
    began = ask("SELECT clock_timestamp()")[0]
    insert(jobs, keep_s=600)
    meter = Meter(pids, server)
    notifier.announce("default", {"default"})
    while processed() < target:
        time.sleep(0.05)
    time.sleep(STATISTICS_DELAY_S)
    _, used, did = meter.read()
    first, last, count = ask(
        "SELECT MIN(started_at), MAX(finished_at), COUNT(*) FROM django_faktory_history"
        " WHERE state = 'succeeded' AND queue = 'default' AND started_at >= %s",
        [began],
    )
    if count != jobs:
        raise RuntimeError(f"expected {jobs} jobs that succeeded, got {count}")
    return {
        "jobs_per_s": round(jobs / (last - first).total_seconds()),
        "node_ms_per_job": round(used["nodes"] / jobs * 1000, 3),
        "postgresql_ms_per_job": round(used["postgresql"] / jobs * 1000, 3),
        "transactions_per_job": round(did["transactions"] / jobs, 4),
    }


def medians(rounds):
    """Return the medians of all figures, by number of nodes."""
    counts = dict.fromkeys(one["nodes"] for one in rounds)
    return [
        {"nodes": count}
        | {name: round(median([one[name] for one in rounds if one["nodes"] == count]), 4) for name in COLUMNS}
        for count in counts
    ]


def table(found):
    """Return a Markdown table: a line for each figure, a column for each number of nodes."""
    heads = [f"{one['nodes']} node{'s' if one['nodes'] > 1 else ''}" for one in found]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(found)]
    lines += [f"| {title} | {' | '.join(f'{one[name]:,g}' for one in found)} |" for name, title in COLUMNS.items()]
    return "\n".join(lines)


def write_docs(found, about, options):
    """Write the table between the markers of the page, only after a complete run."""
    is_whole = options.rounds >= 3 and options.jobs >= 20_000 and len(found) >= 4
    if options.no_docs or not is_whole:
        return
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}")
    description = "; ".join(f"{name} {value}" for name, value in about.items())
    what = (
        f"{datetime.now(UTC).date()}: {description}. "
        f"{options.rounds} interleaved rounds, medians; {options.jobs:,} no-op jobs."
    )
    PAGE.write_text(f"{before}{begin}{what}\n\n{table(found)}\n{end}{after}")


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--nodes", default="1,2,4,8", help="how many, interleaved (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=20_000, help="a drain (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are taken (default: %(default)s)")
    parser.add_argument("--idle-s", type=float, default=15.0, help="of watching nodes without jobs")
    parser.add_argument("--ended", type=int, default=0, help="jobs that have ended and are kept")
    parser.add_argument("--no-docs", action="store_true", help="do not write NOTEBOOK.md, as in a smaller run")
    options = parser.parse_args()
    if os.environ.get("BENCH_DATABASE", "postgresql") != "postgresql":
        parser.error("expected PostgreSQL: its processes and counters are measured")
    prepare()
    about = machine() | {"max_connections": ask("SHOW max_connections")[0]}
    print(json.dumps(about, indent=2), flush=True)
    counts = [int(count) for count in options.nodes.split(",")]
    sizes = {"jobs": options.jobs, "idle_s": options.idle_s, "ended": options.ended}
    rounds = [one_round(count, **sizes) for _ in range(options.rounds) for count in counts]
    found = medians(rounds)
    text = json.dumps({"machine": about, "options": vars(options), "found": found, "rounds": rounds}, indent=2)
    (HERE / "results" / "scaling.json").write_text(text + "\n")
    print(f"\n{table(found)}")
    write_docs(found, about, options)


if __name__ == "__main__":
    main()
