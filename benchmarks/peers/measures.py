"""Define the measures: each takes a system's place and agent, returns figures, and leaves no process running."""

import random
import time

from benchmarks.peers import readings
from benchmarks.peers.arithmetic import median, percentile
from benchmarks.peers.asking import Failed, Workers
from benchmarks.peers.marks import Marks

STUCK_S = 40  # maximum time in which no job begins; no system's workers take this long to start
CPU_FROM = 0.2  # share of the jobs; by then all processes have started, so their start is not counted


def one_by_one(place, agent, options):
    """Compare `enqueue()` with a bare `create()`, alone and in a transaction with a row."""
    agent.empty()
    agent.settle()
    return agent.enqueue_turns(options.calls)


def many(place, agent, options):
    """Measure how many jobs per second are enqueued with the bulk call, or with a loop if there is none."""
    agent.empty()
    agent.settle()
    return {"many_per_s": options.many / agent.enqueue_many("noop", options.many)}


def noop(place, agent, options):
    """Measure rate, CPU and memory with jobs that do nothing."""
    found = _drain(place, agent, "noop", options.jobs * place.system.times_jobs)
    return {"noop_per_s": found.pop("per_s")} | found


def insert(place, agent, options):
    """Measure the rate of jobs that write one row each."""
    jobs = options.jobs * min(2, place.system.times_jobs)
    found = _drain(place, agent, "insert", jobs)
    if agent.rows() != [jobs, jobs]:
        raise Failed(f"expected a row from each of {jobs} jobs, got [rows, jobs] = {agent.rows()}")
    return {"insert_per_s": found["per_s"]}


def lone(place, agent, options):
    """Measure idle workers, then the pick-up of single jobs."""
    agent.empty()
    marks = Marks(place.marks)
    with Workers(place) as workers:
        agent.enqueue("noop", 0)
        _wait_for(marks, 1, workers)
        time.sleep(options.idle_s / 4)
        agent.operations()  # PostgreSQL counts a session's transactions at its next query, at least 1 s later
        time.sleep(1.2)
        found = _idle(place, agent, workers, options.idle_s)
        found |= _pick_up(agent, marks, workers, options.lone)
    return found


MEASURES = {measure.__name__: measure for measure in (one_by_one, many, noop, insert, lone)}


def _drain(place, agent, kind, jobs):
    agent.empty()
    marks = Marks(place.marks)
    agent.enqueue_many(kind, jobs)
    agent.settle()
    if agent.left() != jobs:
        raise Failed(f"expected {jobs} jobs to wait, got {agent.left()}")
    with Workers(place) as workers:
        begun = _wait_for(marks, int(jobs * CPU_FROM), workers)
        cpu, server = _cpu(workers, agent, place)
        _wait_for(marks, jobs, workers)
        _wait_until_done(agent, workers)
        over = time.time()
        cpu_over, server_over = _cpu(workers, agent, place)
        rss_mb, pss_mb = readings.memory_mb(workers.pids())
    _require_each_once(marks.look(), jobs)
    worker_ms = readings.cpu_between(cpu, cpu_over) * 1000 / (jobs - begun)
    server_ms = readings.cpu_between(server, server_over) * 1000 / (jobs - begun)
    return {
        "per_s": jobs / (over - min(at for _, at in marks.found)),
        "cpu_ms": worker_ms + server_ms,
        "worker_cpu_ms": worker_ms,
        "server_cpu_ms": server_ms,
        "rss_mb": rss_mb,
        "pss_mb": pss_mb,
        "jobs": jobs,
    }


def _wait_for(marks, count, workers):
    """Wait until `count` jobs have begun; return how many have.

    Raises Failed if no further job begins for `STUCK_S` seconds.
    """
    before, since = len(marks.look()), time.monotonic()
    while (found := len(marks.look())) < count:
        if found > before:
            before, since = found, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            raise Failed(f"{found} of {count} jobs begun, and no further one for {STUCK_S} seconds")
        else:
            workers.require()
        time.sleep(0.003)
    return found


def _wait_until_done(agent, workers):
    """Wait until the system's own store has no unfinished job.

    A job counts when its end is stored, not when it begins.
    """
    since = time.monotonic()
    while left := agent.left():
        if time.monotonic() - since > STUCK_S:
            raise Failed(f"every job has begun, but {left} are not done {STUCK_S} seconds later")
        workers.require()
        time.sleep(0.003)


def _require_each_once(found, jobs):
    numbers = [number for number, _ in found]
    known = set(numbers)
    if len(numbers) != jobs or known != set(range(jobs)):
        raise Failed(f"expected {jobs} jobs to run once, got {len(numbers)} runs of {len(known)} jobs")


def _cpu(workers, agent, place):
    """Return the CPU of the workers, and of the processes that store the jobs."""
    server = agent.server_pids() if place.system.store == "PostgreSQL" else []
    server += [place.redis.pid] if place.system.store == "Redis" else []
    return readings.cpu_s(workers.pids()), readings.cpu_s(server)


def _idle(place, agent, workers, idle_s):
    operations, since = agent.operations(), time.monotonic()
    cpu, server = _cpu(workers, agent, place)
    time.sleep(idle_s)
    operations_over, lasted = agent.operations(), time.monotonic() - since
    cpu_over, server_over = _cpu(workers, agent, place)
    used = readings.cpu_between(cpu, cpu_over) + readings.cpu_between(server, server_over)
    asked = None if operations is None else max(0, operations_over - operations - 1) / lasted  # minus this query
    return {"idle_cpu_percent": used / lasted * 100, "idle_operations_per_s": asked}


def _pick_up(agent, marks, workers, count):
    """Return percentiles of the milliseconds from the call of `enqueue()` to the job's start."""
    called = {}
    for number in range(1, count + 1):
        time.sleep(random.uniform(0.02, 0.08))  # random, so not in phase with any polling
        called[number] = agent.enqueue("noop", number)
    _wait_for(marks, count + 1, workers)
    _require_each_once(marks.look(), count + 1)
    waits = [(at - called[number]) * 1000 for number, at in marks.found if number]
    return {"pick_up_p50_ms": median(waits), "pick_up_p99_ms": percentile(waits, 99)}
