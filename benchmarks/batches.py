"""Measure one large batch: how fast it settles, how it affects other jobs, and how long BATCH STATUS takes.

    python -m benchmarks.batches                          (all parts, about 15 minutes)
    python -m benchmarks.batches drain status --members 20000 --rounds 1

Uses PostgreSQL as it is configured; BENCH_DATABASE=sqlite selects SQLite. Jobs with and without a batch alternate:
compare their ratios. Every round is in results/batches.json.
"""

import argparse
import json
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext

from benchmarks.client import Client
from benchmarks.database import HERE, empty, machine, prepare
from benchmarks.peers.arithmetic import median, percentile
from benchmarks.probe import Probe
from benchmarks.processes import node, workers

WANTED_PER_S = 500
ASKED = 500
BULK = 1000
DRAIN_S = 900


def drain(options):
    """Return how many jobs per second our own workers finish, and how many are enqueued per second."""
    return {
        name: _enqueued_and_drained(options.members, is_batch=is_batch)
        for name, is_batch in {"jobs of no batch": False, "members": True}.items()
    }


def _enqueued_and_drained(count, *, is_batch):
    empty()
    enqueue_s = _enqueue(count, "default", is_batch=is_batch)
    with workers():
        _wait_for_end("default")
    _require_settled(is_batch)
    first, last = _span("default")
    return {"jobs_per_s": count / (last - first).total_seconds(), "enqueued_per_s": count / enqueue_s}


def _enqueue(count, queue, *, is_batch):
    """Enqueue `count` jobs, and return the seconds until they are committed."""
    from benchmarks.tasks import noop
    from django_faktory import Batch

    callback = noop.using(queue_name="callbacks").callback(0, "complete")
    began = time.perf_counter()
    with Batch(complete=callback) if is_batch else nullcontext():
        noop.using(queue_name=queue).enqueue_many([(number, "x") for number in range(count)])
    return time.perf_counter() - began


def _require_settled(is_batch):
    """Raise RuntimeError unless the only batch has settled and has called back once.

    Without `is_batch` there must be neither a batch nor a callback.
    """
    from django_faktory.models import Batch, Job

    found = [(batch.pending, batch.unrun, batch.failed) for batch in Batch.objects.all()]
    if found != [(0, 0, 0)] * is_batch or Job.objects.exclude(callback_of=None).count() != is_batch:
        raise RuntimeError(f"expected {int(is_batch)} batches that are settled and have called back, got {found}")


def _wait_for_end(queue):
    """Wait until every job of a queue has been reported as succeeded.

    The end of `runfaktory --drain` is too early: it ends when all jobs have run, and drops late reports.
    """
    from django_faktory.models import Job

    deadline = time.monotonic() + DRAIN_S
    while Job.objects.filter(queue=queue).exclude(state="succeeded").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected all jobs of queue {queue} to be done within {DRAIN_S} s")
        time.sleep(0.2)


def _span(queue):
    """Return the first start and the last end of a queue's jobs."""
    from django.db.models import Max, Min

    from django_faktory.models import Job

    times = Job.objects.filter(queue=queue).aggregate(first=Min("started_at"), last=Max("finished_at"))
    return times["first"], times["last"]


def wire(options):
    """Do the same with a server and connections that fetch and acknowledge; a probe fetches from another queue."""
    return {
        name: _taken(options.taken, options.connections, is_batch=is_batch)
        for name, is_batch in {"jobs of no batch": False, "members": True}.items()
    }


def _taken(count, connections, *, is_batch):
    empty()
    with node("--server-only") as (_, port):
        _push(port, count, is_batch=is_batch)
        probe = Probe(port, "probe", pushes=True)
        probe.start()
        load = [sys.executable, str(HERE / "fwp_load.py"), f"127.0.0.1:{port}", str(count), str(connections), "take"]
        done = subprocess.run(load, stdout=subprocess.PIPE, check=True, timeout=DRAIN_S)
        probe.stop()
        _require_settled(is_batch)
    return json.loads(done.stdout) | {f"fetch_{name}": value for name, value in probe.taken().items()}


def _push(port, count, *, is_batch):
    """Push `count` jobs over the wire; return the id of their batch, or None without `is_batch`."""
    client = Client(port)
    bid = None
    custom = {}
    if is_batch:
        complete = {"jid": uuid.uuid4().hex, "jobtype": "noop", "args": [], "queue": "callbacks"}
        bid = client.ask(f"BATCH NEW {json.dumps({'complete': complete})}").decode()
        custom = {"custom": {"bid": bid}}
    for begin in range(0, count, BULK):
        jobs = [
            {"jid": uuid.uuid4().hex, "jobtype": "noop", "args": [number, "x"], "queue": "queue0"} | custom
            for number in range(begin, min(begin + BULK, count))
        ]
        if (refused := client.ask(f"PUSHB {json.dumps(jobs)}")) != b"{}":
            raise RuntimeError(f"expected every job to be stored, got {refused[:200]!r}")
    if bid:
        client.ask(f"BATCH COMMIT {bid}")
    client.close()
    return bid


def status(options):
    """Time BATCH STATUS in milliseconds, alternating between a small batch and a large one."""
    empty()
    took_ms = {}
    with node("--server-only") as (_, port):
        sizes = {f"{count:,} members": count for count in (max(1, options.members // 100), options.members)}
        asked = {name: f"BATCH STATUS {_push(port, count, is_batch=True)}" for name, count in sizes.items()}
        client = Client(port)
        for _ in range(ASKED):
            for name, line in asked.items():
                began = time.perf_counter()
                reply = client.ask(line)
                took_ms.setdefault(name, []).append((time.perf_counter() - began) * 1000)
                if json.loads(reply)["pending"] != sizes[name]:
                    raise RuntimeError(f"{name}: expected all of them to be pending, got {reply!r}")
        client.close()
    return {name: {"p50_ms": median(values), "p99_ms": percentile(values, 99)} for name, values in took_ms.items()}


def beside(options):
    """Return how many jobs without a batch one worker process finishes per second.

    Measured alone, and while a second worker process runs other jobs or members of a batch.
    """
    return {
        name: _beside(options.members, is_batch=is_batch)
        for name, is_batch in {"alone": None, "jobs of no batch": False, "members": True}.items()
    }


def _beside(count, *, is_batch):
    empty()
    _enqueue(count, "plain", is_batch=False)
    is_alone = is_batch is None
    if not is_alone:
        _enqueue(count, "others", is_batch=is_batch)
    with (
        workers("--queues", "plain", "--processes", "1"),
        nullcontext() if is_alone else workers("--queues", "others", "--processes", "1"),
    ):
        _wait_for_end("plain")
        if not is_alone:
            _wait_for_end("others")
    begin, end = _span("plain")
    if not is_alone:
        others_begin, others_end = _span("others")
        begin, end = max(begin, others_begin), min(end, others_end)
    lasted = (end - begin).total_seconds()
    from django_faktory.models import Job

    return {"jobs_per_s": Job.objects.filter(queue="plain", finished_at__range=(begin, end)).count() / lasted}


PARTS = {"drain": drain, "wire": wire, "status": status, "beside": beside}


def measured(options):
    """Run all rounds; return the figures by part, by variant and by name."""
    found = {}
    for turn in range(options.rounds):
        for part in options.parts or PARTS:
            figures = PARTS[part](options)
            print(f"round {turn + 1}, {part}: {json.dumps(figures)}", flush=True)
            for what, values in figures.items():
                for figure, value in values.items():
                    found.setdefault(part, {}).setdefault(what, {}).setdefault(figure, []).append(value)
    return found


def table(found):
    """Return a Markdown table: medians, and the median of the rounds' ratios to the first line of each part."""
    lines = ["| part | | figure | median | ÷ first |", "|---|---|---|---:|---:|"]
    for part, things in found.items():
        first = next(iter(things.values()))
        for what, figures in things.items():
            for figure, values in figures.items():
                ratio = median(value / base for value, base in zip(values, first[figure], strict=True))
                lines.append(f"| {part} | {what} | {figure} | {_shown(median(values))} | {ratio:.2f} |")
    return "\n".join(lines)


def _shown(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--members", type=int, default=100_000)
    parser.add_argument("--taken", type=int, default=20_000, help="members of `wire`")
    parser.add_argument("--connections", type=int, default=20, help="of `wire`")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prepare()
    about = machine()
    print(json.dumps(about | vars(options), indent=2), flush=True)
    found = measured(options)
    text = json.dumps({"machine": about, "options": vars(options), "rounds": found}, indent=2)
    (HERE / "results" / "batches.json").write_text(text + "\n")
    print(f"\n{table(found)}")
    rates = [found[part]["members"]["jobs_per_s"] for part in ("drain", "wire") if part in found]
    if any(median(rate) < WANTED_PER_S for rate in rates):
        sys.exit(f"a batch settles at less than {WANTED_PER_S} jobs/s")


if __name__ == "__main__":
    main()
