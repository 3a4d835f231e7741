"""Measure the server: jobs per second, a client beside a load, idle connections, and an idle node.

    python -m benchmarks.server_load [--rounds 3] [--jobs 10000] [--idle-s 20] [--connections 2000] [--beside FAKTORY]
        [--servers 1,2,4]

FAKTORY is the binary of the original server; each round then puts the same loads on it, after ours. Uses PostgreSQL as
it is configured; BENCH_DATABASE=sqlite selects SQLite. Prints medians; every round is in results/server_load.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from benchmarks.client import Client
from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.peers import readings
from benchmarks.peers.arithmetic import median, percentile
from benchmarks.processes import node, original

LOADS = {
    "10 connections, 5 push and 5 fetch": ("both", 10, 1),
    "50 connections, 25 push and 25 fetch": ("both", 50, 1),
    "50 connections, the 25 that fetch are 5 workers": ("both", 50, 5),
    "50 connections, all push": ("push", 50, 1),
    "1 connection, PUSHB of 1,000": ("bulk", 1, 1),
}


def load(name, jobs, kind, connections, workers, *, servers=1):
    """Run one load; return by name jobs per second and, of a job, the server's CPU time, PostgreSQL's log and buffers.

    Raises RuntimeError unless every job is stored afterwards, or was taken.
    """
    from django_faktory.models import Job

    empty()
    buffers = _buffers()
    with node("--server-only", "--servers", str(servers)) as (process, port):
        cpu, log = readings.cpu_s(readings.tree(process.pid)), _log_bytes()
        jobs_per_s = _jobs_per_s(port, jobs, kind, connections, workers)
        used_s = readings.cpu_between(cpu, readings.cpu_s(readings.tree(process.pid)))
        written = None if log is None else _log_bytes() - log
        waiting = Job.objects.filter(state="enqueued", failures=0).count()  # failed jobs may be due again
    expected = 0 if kind == "both" else jobs
    if waiting != expected:
        raise RuntimeError(f"{kind}: expected {expected} jobs to wait after {jobs} were pushed, got {waiting}")
    # A session counts its buffers when it ends, and otherwise up to ten seconds later.
    read = None if buffers is None else _buffers() - buffers
    title = name if servers == 1 else f"{name}: {servers} servers"
    return {
        title: jobs_per_s,
        f"{title}: server's CPU, µs a job": used_s / jobs * 1e6,
        f"{title}: log, bytes a job": None if written is None else written / jobs,
        f"{title}: buffers a job": None if read is None else read / jobs,
    }


def load_beside(binary, jobs, *load):
    """Run the same load on the original server, which uses a Redis that writes a snapshot every 30 seconds."""
    with original(binary) as (_, port):
        return _jobs_per_s(port, jobs, *load)


def _jobs_per_s(port, jobs, kind, connections, workers):
    command = _load_command(port, jobs, kind, connections, workers)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=400)
    return json.loads(done.stdout)["jobs_per_s"]


def _load_command(port, jobs, kind, connections, workers):
    numbers = [str(jobs), str(connections), kind, str(workers)]
    return [sys.executable, str(HERE / "fwp_load.py"), f"127.0.0.1:{port}", *numbers]


def idle_connections(count):
    """Return kB of the server's memory per connection that has only sent HELLO."""
    empty()
    with node("--server-only") as (process, port):
        Client(port).close()  # warm-up: memory for the first connection is not counted
        before, _ = readings.memory_mb(readings.tree(process.pid))
        clients = [Client(port) for _ in range(count)]
        after, _ = readings.memory_mb(readings.tree(process.pid))
        for client in clients:
            client.close()
    return (after - before) * 1024 / count


def latency_beside(jobs, *, idle=1000, busy=50):
    """Return p50 and p99 in ms of a client's commands: alone, and beside idle connections and a load over busy ones.

    The client pushes a job into a queue of its own, fetches it and acknowledges it.
    """
    empty()
    with node("--server-only") as (_, port):
        client = Client.worker(port, "good")
        alone = [took for number in range(300) for took in _commands(client, f"alone-{number:08}")]
        clients = [Client(port) for _ in range(idle)]
        beside = []
        command = _load_command(port, jobs, "both", busy, 1)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load_process:
            while load_process.poll() is None:
                beside += _commands(client, f"beside-{len(beside):08}")
        if load_process.returncode:
            raise RuntimeError(f"the load ended with exit code {load_process.returncode}")
        for one in (client, *clients):
            one.close()
    times_by_name = {"a client alone": alone, f"a client beside {idle} idle and {busy} busy connections": beside}
    return {
        f"{name}: p{percent} of its commands, ms": percentile(times, percent) * 1000
        for name, times in times_by_name.items()
        for percent in (50, 99)
    }


def _commands(client, jid):
    """Push, fetch and acknowledge a job; return the seconds that each command took."""
    times = []
    for line in (
        f'PUSH {{"jid":"{jid}","jobtype":"noop","args":[],"queue":"good"}}',
        "FETCH good",
        f'ACK {{"jid":"{jid}"}}',
    ):
        began = time.perf_counter()
        client.ask(line)
        times.append(time.perf_counter() - began)
    return times


def idle_node(seconds):
    """Return transactions per second, CPU in percent of a core, and memory, all without jobs.

    The processes are server, workers and supervisor.
    """
    empty()
    with node() as (process, _):
        time.sleep(4)  # until the workers have started and registered
        _transactions()  # PostgreSQL counts a session's transactions at its next query, at least 1 s later
        time.sleep(1.2)
        counted, since = _transactions(), time.monotonic()
        cpu = readings.cpu_s(readings.tree(process.pid))
        time.sleep(seconds)
        transactions, lasted = _transactions(), time.monotonic() - since
        pids = readings.tree(process.pid)
        used = readings.cpu_between(cpu, readings.cpu_s(pids))
        rss, pss = readings.memory_mb(pids)
    return {
        "transactions_per_s": None if counted is None else (transactions - counted - 1) / lasted,  # minus this query
        "cpu_percent": used / lasted * 100,
        "processes": len(pids),
        "rss_mb": rss,
        "pss_mb": pss,
    }


def _log_bytes():
    return _read("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")


def _buffers():
    return _read("SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()")


def _transactions():
    return _read("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()")


def _read(number):
    """Return the number that this statement reads on PostgreSQL; None on other databases."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return None
    with connection.cursor() as cursor:
        cursor.execute(number)
        return int(cursor.fetchone()[0])


def measured(options):
    """Run all rounds, which measure everything once; return the figures of all rounds by name."""
    found = {}
    for turn in range(options.rounds):
        figures = {}
        for name, kind in LOADS.items():
            for servers in options.servers:
                figures |= load(name, options.jobs, *kind, servers=servers)
            if options.beside:
                figures[f"{name}: the original"] = load_beside(options.beside, options.jobs, *kind)
        figures |= latency_beside(options.jobs)
        figures["kB an idle connection"] = idle_connections(options.connections)
        figures |= {f"idle node, {name}": value for name, value in idle_node(options.idle_s).items()}
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
        print(f"round {turn + 1}: {json.dumps(figures)}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=10_000, help="a load")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds of watching an idle node")
    parser.add_argument("--connections", type=int, default=2000, help="idle ones")
    parser.add_argument("--servers", type=lambda text: [int(one) for one in text.split(",")], default=[1])
    parser.add_argument(
        "--beside", metavar="FAKTORY", help="binary of the original server, to measure in turns with ours"
    )
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    prepare()
    about = machine()
    print(json.dumps(about | vars(options), indent=2), flush=True)
    found = measured(options)
    (HERE / "results" / "server_load.json").write_text(
        json.dumps({"machine": about, "options": vars(options), "rounds": found}, indent=2) + "\n"
    )
    print("\n| what | median |\n|---|---:|")
    for name, values in found.items():
        middle = median(values)
        print(f"| {name} | {'–' if middle is None else f'{middle:,.0f}' if middle >= 100 else f'{middle:.1f}'} |")


if __name__ == "__main__":
    main()
