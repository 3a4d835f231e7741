"""Put load on any Faktory server: half of the connections push, half fetch and acknowledge, without pipelining.

    python benchmarks/fwp_load.py HOST:PORT JOBS CONNECTIONS [both|push|bulk|take][:expiring|:locked|:unique] [WORKERS]

With `push` every connection pushes one job per round trip; with `bulk` it pushes 1,000 at once, by PUSHB; with `take`
it fetches and acknowledges jobs that are already stored.
`both` repeats the load test of the original server: even connections push one job per round trip to one of five queues
at random, odd connections fetch from the five in random order and send ACK, or FAIL for 1 %. It ends when JOBS were
pushed and taken. The connections that fetch belong to one worker process, as in the original, or to WORKERS of them.
The word after the colon is an option of each job; locks and unique keys are random, so that two jobs rarely share one.

It shares the machine with the server that it measures, so it uses little CPU: one thread, plain sockets and epoll, and
lines made by string formatting. Its own CPU time per job is printed with the rate.
"""

import json
import random
import resource
import select
import socket
import sys
import time

QUEUES = ["queue0", "queue1", "queue2", "queue3", "queue4"]
BULK = 1000
DEADLINE_S = 300
JOB = (
    '{"jid":"%024x","jobtype":"noop","queue":"%s","args":[1,"string",3],"retry":5,'
    '"created_at":"2026-11-21T00:00:00Z"%s}'
)
OPTIONS = {
    "": lambda: "",
    "expiring": lambda: ',"custom":{"expires_in":3600}',
    "locked": lambda: f',"custom":{{"lock":"{random.getrandbits(64):x}"}}',
    "unique": lambda: f',"custom":{{"unique_for":600,"kwargs":{{"a":{random.getrandbits(60)}}}}}',
}


class Wire:
    """One connection that sends a command, then reads its reply.

    `work` is a generator that yields commands and is sent the replies.
    """

    def __init__(self, address, wid):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._come = b""
        self.work = None
        self._wait(b"+HI")
        hello = {"v": 2} | ({"wid": wid, "hostname": "load", "pid": 1, "labels": []} if wid else {})
        self.send(f"HELLO {json.dumps(hello)}")
        self._wait(b"+OK")

    def send(self, line):
        self.socket.sendall(line.encode() + b"\r\n")

    def _wait(self, expected):
        reply = None
        while reply is None:
            reply = self.receive()
        if not reply.startswith(expected):
            raise RuntimeError(f"expected {expected!r}, got {reply!r}")

    def receive(self):
        """Return the reply, b"" if there is no job, or None if the reply is not complete yet."""
        data = self.socket.recv(65_536)
        if not data:
            raise RuntimeError("expected a reply, got the end of the connection")
        self._come = come = self._come + data if self._come else data
        if not come.endswith(b"\r\n"):
            return None
        if come[:1] == b"-":
            raise RuntimeError(come.decode())
        if come[:1] == b"$":
            size, _, come = come.partition(b"\r\n")
            if size != b"$-1" and len(come) < int(size[1:]) + 2:
                return None
        self._come = b""
        return come[:-2]


def new_job(custom):
    return JOB % (random.getrandbits(96), random.choice(QUEUES), custom())


def pusher(left):
    while left["push"] > 0:
        left["push"] -= 1
        yield "PUSH " + new_job(left["custom"])
        left["pushed"] = time.perf_counter()


def bulk_pusher(left):
    while left["push"] > 0:
        count = min(BULK, left["push"])
        left["push"] -= count
        refused = yield "PUSHB [" + ",".join([new_job(left["custom"]) for _ in range(count)]) + "]"
        if refused != b"{}":
            raise RuntimeError(f"expected every job to be stored, got {refused[:200]!r}")
        left["pushed"] = time.perf_counter()


def fetcher(left, failing=0.01):
    while left["take"] > 0:
        job = yield "FETCH " + " ".join(random.sample(QUEUES, len(QUEUES)))
        if not job:
            continue
        left["take"] -= 1
        jid = json.loads(job)["jid"]
        if random.random() < failing:
            yield 'FAIL {"errtype":"Oops","message":"1 %","jid":"' + jid + '"}'
        else:
            yield 'ACK {"jid":"' + jid + '"}'
        left["end"] = time.perf_counter()


def taker(left):
    return fetcher(left, failing=0)


WORK = {
    "both": (pusher, fetcher),
    "push": (pusher, pusher),
    "bulk": (bulk_pusher, bulk_pusher),
    "take": (taker, taker),
}


def run(host, port, jobs, connections, kind, workers=1):
    """Return jobs per second, and this process's CPU time per job in µs."""
    kind, _, option = kind.partition(":")
    even, odd = WORK[kind]
    works = [odd if n % 2 else even for n in range(connections)]
    wids = [f"load{n // 2 % workers}" if work in (fetcher, taker) else "" for n, work in enumerate(works)]
    wires = [Wire((host, port), wid) for wid in wids]
    left = {"push": jobs, "take": jobs, "end": 0.0, "pushed": 0.0, "custom": OPTIONS[option]}
    start, used = time.perf_counter(), _processor_s()
    drive(wires, works, left)
    over = left["end"] if odd in (fetcher, taker) else left["pushed"]
    elapsed = over - start  # without the two seconds that the last FETCHes wait for a job
    return {"jobs_per_s": round(jobs / elapsed), "client_us": round((_processor_s() - used) / jobs * 1e6)}


def drive(wires, works, left):
    """Send the next command on each connection when its reply is complete, until all generators have ended."""
    poll, by_fd = select.epoll(), {}
    for wire, work in zip(wires, works, strict=True):
        wire.work = work(left)
        if line := next(wire.work, None):
            wire.send(line)
            poll.register(wire.socket, select.EPOLLIN)
            by_fd[wire.socket.fileno()] = wire
    deadline = time.perf_counter() + DEADLINE_S
    while by_fd:
        for fd, _ in poll.poll(10):
            wire = by_fd[fd]
            reply = wire.receive()
            if reply is None:
                continue
            try:
                wire.send(wire.work.send(reply))
            except StopIteration:
                poll.unregister(fd)
                del by_fd[fd]
        if time.perf_counter() > deadline:
            raise RuntimeError(f"expected the load to end within {DEADLINE_S} s, left is {left}")


def _processor_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main():
    host, _, port = sys.argv[1].rpartition(":")
    jobs, connections = int(sys.argv[2]), int(sys.argv[3])
    kind = sys.argv[4] if len(sys.argv) > 4 else "both"
    workers = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    print(json.dumps(run(host, int(port), jobs, connections, kind, workers)))


if __name__ == "__main__":
    main()
