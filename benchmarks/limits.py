"""Measure what limits cost: jobs with a limit so high that it blocks none, compared with plain jobs in one run.

    python -m benchmarks.limits                 (2,000 jobs of each kind; 20,000 held back)
    BENCH_DATABASE=sqlite python -m benchmarks.limits --jobs 1000

The clients call the broker in this process. They take and end jobs, one at a time and 20 at a time: without a limit,
with a limit on concurrency, and with a limit on the rate. Then a queue with a limit is drained over the wire and by own
workers. Last, FETCH takes free jobs behind many blocked ones: the first FETCH, which marks them as blocked, and later
ones. Compare the ratios. Every reading is in results/limits.json.
"""

import argparse
import json
import threading
import time
import uuid

from benchmarks.first_speed import HERE, empty, machine, prepare
from benchmarks.locks import broker, end, fetch, milliseconds, over_the_wire, own_workers, push

HIGH = 100_000


def speed(one, count, clients, size, jobtype):
    """Run clients that take and end `size` jobs at a time; return jobs per second."""
    from django.db import connections

    from django_faktory.core.payloads import Ack

    queue = uuid.uuid4().hex
    push(one, count, queue, jobtype=jobtype)

    def client(number):
        wid = f"w{number}"
        while found := fetch(one, queue, wid=wid, count=size):
            one.ack([Ack(jid=job.jid, wid=wid, attempt=job.attempt) for job in found])
        connections.close_all()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(count / (time.perf_counter() - began))


def behind(one, held, free=100):
    """Time FETCH of free jobs behind `held` jobs that a full limiter blocks."""
    from django_faktory.models import Job

    push(one, held, "head", jobtype="shut")
    [holder] = fetch(one, "head")
    push(one, free, "head", jobtype="plain")
    began = time.perf_counter()
    fetches = 1
    while not (found := fetch(one, "head")):
        fetches += 1
    first_s = time.perf_counter() - began
    end(one, found[0])
    took = []
    for _ in range(free - 1):
        began = time.perf_counter()
        [job] = fetch(one, "head")
        took.append(time.perf_counter() - began)
        assert job.jobtype == "plain"
    began = time.perf_counter()
    end(one, holder)
    released_s = time.perf_counter() - began
    assert Job.objects.filter(state="blocked").count() == held - 2
    return {
        "held_back": held,
        "first_fetch": {"fetches": fetches, "ms": round(first_s * 1000, 1)},
        "later_fetches": milliseconds(took),
        "release_ms": round(released_s * 1000, 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--held", type=int, default=20_000)
    options = parser.parse_args()
    prepare()
    empty()
    from django_faktory.core.limits import Allowance
    from django_faktory.models import Limit
    from django_faktory.store.limits import definitions

    one = broker()
    kinds = {"plain": None, "places": Allowance(concurrency=HIGH), "rate": Allowance(rate=HIGH, burst=HIGH)}
    readings = {"machine": machine()}
    for clients, size in ((1, 1), (4, 1), (4, 20)):
        found = {}
        for name, allowance in kinds.items():
            if allowance:
                definitions.save_limit("task", name, allowance, using="default")
            found[name] = speed(one, options.jobs, clients, size, name)
        ratios = {f"{name} to plain": round(found[name] / found["plain"], 2) for name in ("places", "rate")}
        readings[f"{clients} clients, {size} at a time"] = found | ratios
        Limit.objects.all().delete()
    for name, allowance in kinds.items():
        if allowance:
            definitions.save_limit("queue", f"throttled-{name}", allowance, using="default")
        readings[f"queue, {name}"] = {
            "over the wire": [
                over_the_wire(one, options.jobs, clients, queue=f"throttled-{name}") for clients in (1, 4)
            ],
            "own workers": own_workers(one, options.jobs, queue=f"throttled-{name}"),
        }
    Limit.objects.all().delete()
    definitions.save_limit("task", "shut", Allowance(concurrency=1), using="default")
    readings["behind"] = behind(one, options.held)
    Limit.objects.all().delete()
    empty()
    text = json.dumps(readings, indent=2)
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "limits.json").write_text(text)


if __name__ == "__main__":
    main()
