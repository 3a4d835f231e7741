"""Load on a Faktory server, any: half of the connections push, half fetch and acknowledge. Not pipelined.

    python benchmarks/fwp_load.py HOST:PORT JOBS CONNECTIONS [push|bulk|take]

With `push` every connection pushes, one job a round trip; with `bulk` a thousand at once, by PUSHB; with `take` every
one fetches and acknowledges what is there already.
The original's load test rebuilt: even connections push one job a round trip to five queues at random, odd
ones fetch from the five in a random order and ACK, 1 % FAIL. It ends when JOBS were pushed and taken.
"""

import asyncio
import json
import random
import sys
import time
import uuid

QUEUES = ["queue0", "queue1", "queue2", "queue3", "queue4"]
BULK = 1000


class Client:
    """One connection: a command, then its reply."""

    async def open(self, host, port, wid):
        self.reader, self.writer = await asyncio.open_connection(host, port)
        assert (await self.reader.readline()).startswith(b"+HI")
        hello = {"v": 2} | ({"wid": wid, "hostname": "load", "pid": 1, "labels": []} if wid else {})
        await self.send(f"HELLO {json.dumps(hello)}")
        return self

    async def send(self, line):
        self.writer.write(line.encode() + b"\r\n")
        reply = await self.reader.readline()
        if reply.startswith(b"-"):
            raise RuntimeError(reply.decode())
        if reply.startswith(b"$") and reply != b"$-1\r\n":
            return (await self.reader.readexactly(int(reply[1:]) + 2))[:-2]
        return None if reply == b"$-1\r\n" else reply


def new_job():
    return {
        "jid": uuid.uuid4().hex,
        "jobtype": "noop",
        "queue": random.choice(QUEUES),
        "args": [1, "string", 3],
        "retry": 5,
        "created_at": "2026-11-21T00:00:00Z",
    }


async def pusher(client, left):
    while left["push"] > 0:
        left["push"] -= 1
        await client.send("PUSH " + json.dumps(new_job(), separators=(",", ":")))
        left["pushed"] = time.perf_counter()


async def bulk_pusher(client, left):
    while left["push"] > 0:
        count = min(BULK, left["push"])
        left["push"] -= count
        refused = await client.send("PUSHB " + json.dumps([new_job() for _ in range(count)], separators=(",", ":")))
        if refused != b"{}":
            raise RuntimeError(f"expected every job to be stored, got {refused[:200]!r}")
        left["pushed"] = time.perf_counter()


async def fetcher(client, left, *, failing=0.01):
    while left["take"] > 0:
        queues = random.sample(QUEUES, len(QUEUES))
        job = await client.send("FETCH " + " ".join(queues))
        if job is None:
            continue
        left["take"] -= 1
        jid = json.loads(job)["jid"]
        if random.random() < failing:
            await client.send("FAIL " + json.dumps({"jid": jid, "errtype": "Oops", "message": "1 %"}))
        else:
            await client.send("ACK " + json.dumps({"jid": jid}))
        left["end"] = time.perf_counter()


async def taker(client, left):
    await fetcher(client, left, failing=0)


WORK = {
    "both": (pusher, fetcher),
    "push": (pusher, pusher),
    "bulk": (bulk_pusher, bulk_pusher),
    "take": (taker, taker),
}


async def run(host, port, jobs, connections, kind):
    even, odd = WORK[kind]
    works = [odd if n % 2 else even for n in range(connections)]
    clients = [await Client().open(host, port, "load" if work in (fetcher, taker) else "") for work in works]
    left = {"push": jobs, "take": jobs, "end": 0.0, "pushed": 0.0}
    start = time.perf_counter()
    tasks = [asyncio.ensure_future(work(client, left)) for work, client in zip(works, clients, strict=True)]
    done, pending = await asyncio.wait(tasks, timeout=300)
    over = left["end"] if odd in (fetcher, taker) else left["pushed"]
    elapsed = over - start  # not the two seconds that the last FETCHes wait for nothing
    for task in done:
        task.result()
    for task in pending:
        task.cancel()
    return jobs / elapsed


def main():
    host, _, port = sys.argv[1].rpartition(":")
    jobs, connections = int(sys.argv[2]), int(sys.argv[3])
    kind = sys.argv[4] if len(sys.argv) > 4 else "both"
    try:
        import uvloop

        runner = uvloop.run
    except ImportError:
        runner = asyncio.run
    print(json.dumps({"jobs_per_s": round(runner(run(host, int(port), jobs, connections, kind)))}))


if __name__ == "__main__":
    main()
