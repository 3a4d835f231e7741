"""Measure what locks cost: FETCH behind many locked jobs, one hot key, and plain jobs for comparison.

    python -m benchmarks.locks                  (100,000 locked jobs at the head; 2,000 jobs of one key)
    BENCH_DATABASE=sqlite python -m benchmarks.locks --locked 10000

The clients call the broker in this process: they push many jobs with one key, FETCH the free job behind them, then take
and end jobs with one key as fast as possible. The same is done over the wire, and by own workers. Each load with a key
has a counterpart with as many plain jobs. Every reading is in results/locks.json.
"""

import argparse
import json
import threading
import time
import uuid

from benchmarks.client import Client
from benchmarks.first_speed import HERE, empty, machine, prepare
from benchmarks.peers.arithmetic import median, percentile
from benchmarks.processes import node, workers


def broker():
    from django_faktory.brokers.orm import OrmBroker

    return OrmBroker("default")


def jobs(count, queue, jobtype="benchmarks.tasks.noop", **custom):
    """Return new jobs; `custom` contains their options, and without it they are plain."""
    from django_faktory.core.payloads import new_job

    return [
        new_job(
            jid=uuid.uuid4().hex,
            jobtype=jobtype,
            args=[number, "x"],
            queue=queue,
            custom=custom or None,
        )
        for number in range(count)
    ]


def push(one, count, queue, **kind):
    for start in range(0, count, 500):
        one.push(jobs(min(500, count - start), queue, **kind))


def milliseconds(seconds):
    return {"p50_ms": round(median(seconds) * 1000, 2), "p99_ms": round(percentile(seconds, 99) * 1000, 2)}


def fetch(one, *queues, wid="w", count=1):
    from django_faktory.core.payloads import FetchRequest

    [found] = one.fetch([FetchRequest(queues=queues, wid=wid, count=count)])
    return found


def end(one, job):
    from django_faktory.core.payloads import Ack

    return one.ack([Ack(jid=job.jid, wid=job.wid, attempt=job.attempt)])


def behind(one, locked, free=200):
    """Time FETCH of free jobs, one after the other, behind `locked` jobs that wait for a key that is held."""
    began = time.perf_counter()
    push(one, locked, "head", lock="hot")
    pushed_s = time.perf_counter() - began
    [holder] = fetch(one, "head")
    one.push(jobs(free, "head"))
    took = []
    for _ in range(free):
        began = time.perf_counter()
        [job] = fetch(one, "head")
        took.append(time.perf_counter() - began)
        assert job.lock_key is None
    began = time.perf_counter()
    end(one, holder)
    released_s = time.perf_counter() - began
    [successor] = fetch(one, "head")
    assert successor.lock_key == "hot"
    return {
        "locked": locked,
        "pushed_per_s": round(locked / pushed_s),
        "fetch_of_the_free": milliseconds(took),
        "release_ms": round(released_s * 1000, 2),
    }


def hot(one, count, clients, **custom):
    """Run clients that take and end jobs with one key, or plain jobs; return jobs per second and the overlaps."""
    from django.db import connections

    queue = uuid.uuid4().hex
    push(one, count, queue, **custom)
    left, place = threading.Semaphore(count), threading.Lock()
    overlaps = []

    def client(number):
        while left.acquire(blocking=False):
            while not (found := fetch(one, queue, wid=f"w{number}")):
                time.sleep(0.0005)
            if is_alone := place.acquire(blocking=False):
                time.sleep(0)  # lets another client that holds the same key reach this line
                place.release()
            if custom and not is_alone:
                overlaps.append(number)
            assert end(one, found[0]) == [True]
        connections.close_all()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"clients": clients, "jobs_per_s": round(count / (time.perf_counter() - began)), "overlaps": len(overlaps)}


def own_workers(one, count, *, queue="", **custom):
    """Run two processes of five threads each; return jobs per second, from the end of the first job."""
    from django_faktory.models import Job
    from django_faktory.store.statistics import counts

    def processed():
        return counts.read(using="default").totals["processed"]

    queue = queue or uuid.uuid4().hex
    push(one, count, queue, **custom)
    before = processed()
    with workers("--queues", queue):
        while (first := processed()) == before:
            time.sleep(0.002)
        began = time.perf_counter()
        while (now := processed()) < before + count:
            time.sleep(0.005)
        took_s = time.perf_counter() - began
        assert not Job.objects.filter(queue=queue).exists()
    return {"jobs_per_s": round((now - first) / took_s)}


def over_the_wire(one, count, clients, *, queue="", **custom):
    """Run connections that fetch and acknowledge one job after the other; return jobs per second."""
    queue = queue or uuid.uuid4().hex
    push(one, count, queue, **custom)
    left = threading.Semaphore(count)
    with node("--server-only") as (_, port):
        connections = [Client.worker(port, f"wire{number}") for number in range(clients)]

        def client(connection):
            while left.acquire(blocking=False):
                while not (found := connection.ask(f"FETCH {queue}")):
                    pass
                connection.ask(f"ACK {json.dumps({'jid': json.loads(found)['jid']})}")

        threads = [threading.Thread(target=client, args=(connection,)) for connection in connections]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - began
        for connection in connections:
            connection.close()
    return {"clients": clients, "jobs_per_s": round(count / took_s)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--locked", type=int, default=100_000)
    parser.add_argument("--hot", type=int, default=2_000)
    options = parser.parse_args()
    prepare()
    empty()
    one = broker()
    from django_faktory.models import JobLock

    readings = {
        "machine": machine(),
        "plain": [hot(one, options.hot, clients) for clients in (1, 4)],
        "hot key": [hot(one, options.hot, clients, lock="hot") for clients in (1, 4)],
        "plain over the wire": [over_the_wire(one, options.hot, clients) for clients in (1, 4)],
        "hot key over the wire": [over_the_wire(one, options.hot, clients, lock="hot") for clients in (1, 4)],
        "plain by own workers": own_workers(one, options.hot),
        "hot key by own workers": own_workers(one, options.hot, lock="hot"),
    }
    if options.locked:
        readings["behind"] = behind(one, options.locked)
    readings["lock rows left"] = JobLock.objects.count() - bool(options.locked)
    empty()
    text = json.dumps(readings, indent=2)
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "locks.json").write_text(text)


if __name__ == "__main__":
    main()
