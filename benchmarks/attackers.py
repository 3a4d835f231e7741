"""Attack a server in one way: `python -m benchmarks.attackers KIND PORT SECONDS SCALE`, started by `attack`.

Prints "ready" once the attack is under way, continues for SECONDS, and ends with one line of JSON: how often it
succeeded and failed.
"""

import asyncio
import itertools
import json
import os
import resource
import sys
import time
from collections import Counter
from contextlib import suppress

HOST = "127.0.0.1"
MB = 2**20
HELLO = b'HELLO {"v":2}\r\n'
WORKER = b'HELLO {"v":2,"wid":"%s","hostname":"h","pid":1,"labels":[]}\r\n'


class Attack:
    """State that all kinds of attack share: the server's port, the end time and a tally."""

    def __init__(self, port, seconds, scale):
        self.port, self.scale, self.seconds = port, scale, seconds
        self.ends_at = float("inf")
        self.limit = None
        self.done = Counter()

    def begin(self):
        """Start the clock and print "ready": the attack is under way or about to start."""
        self.ends_at = time.monotonic() + self.seconds
        self.limit.reschedule(asyncio.get_running_loop().time() + self.seconds + 2)
        print("ready", flush=True)

    def is_running(self):
        return time.monotonic() < self.ends_at

    def many(self, full):
        return max(1, int(full * self.scale))

    async def open(self, hello=HELLO, address=None):
        """Open a connection and send `hello`; if that is empty, send nothing."""
        local = (address, 0) if address else None
        reader, writer = await asyncio.open_connection(HOST, self.port, local_addr=local, limit=2**16)
        greeting = await reader.readline()
        if not greeting.startswith(b"+HI"):
            raise ConnectionError(greeting.decode()[:80] or "closed")
        if hello:
            writer.write(hello)
            if await reader.readline() != b"+OK\r\n":
                raise ConnectionError("not let in")
        return reader, writer

    async def again_and_again(self, act):
        """Repeat `act` until the time is over; count refusals and closed connections, and continue."""
        while self.is_running():
            try:
                await act()
                self.done["rounds"] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                self.done[f"ended by {type(error).__name__}"] += 1
                await asyncio.sleep(0.01)

    async def crowd(self, count, act):
        """Run `count` clients concurrently, each of which repeats `act`."""
        await asyncio.gather(*(self.again_and_again(act) for _ in range(count)))

    async def rest(self):
        await asyncio.sleep(max(0.0, self.ends_at - time.monotonic()))


async def idle(attack):
    """Open 10,000 connections that send HELLO and nothing else."""
    kept = []
    for _ in range(attack.many(10_000)):
        try:
            kept.append(await attack.open())
            attack.done["connections"] += 1
        except OSError:
            attack.done["turned away"] += 1
    attack.begin()
    await attack.rest()


async def silent(attack):
    """Open 10,000 connections that send nothing, and open them again when the server closes them."""
    attack.begin()

    async def connect():
        reader, writer = await attack.open(hello=b"")
        attack.done["connections"] += 1
        while attack.is_running() and await reader.read(1000):
            pass
        writer.close()

    await attack.crowd(attack.many(10_000), connect)


async def connecting(attack):
    """Open and abort connections as fast as possible."""
    attack.begin()

    async def come_and_go():
        _, writer = await attack.open(hello=b"")
        attack.done["connections"] += 1
        writer.transport.abort()

    await attack.crowd(attack.many(50), come_and_go)


async def endless_line(attack):
    """Send a line of a gigabyte on several connections; start again if the server hangs up."""
    attack.begin()
    piece = b"x" * MB

    async def send():
        _, writer = await attack.open()
        with suppress(ConnectionError):
            for _ in range(1024):
                writer.write(piece)
                await writer.drain()
                attack.done["MB"] += 1
        writer.transport.abort()

    await attack.crowd(attack.many(8), send)


async def unfinished_lines(attack):
    """Send commands just below the maximum length without their end, on many connections that stay open."""
    piece = b"x" * MB
    kept = []

    async def hold():
        _, writer = await attack.open()
        kept.append(writer)
        for _ in range(15):
            writer.write(piece)
            await writer.drain()
            attack.done["MB"] += 1
        await attack.rest()

    attack.begin()
    await attack.crowd(attack.many(200), hold)


async def slow(attack):
    """Send one byte a second: on half of the connections before HELLO is complete, on the other half after it."""

    async def trickle(hello):
        _, writer = await attack.open(hello=hello)
        attack.done["connections"] += 1
        while attack.is_running():
            writer.write(b"P")
            await writer.drain()
            attack.done["bytes"] += 1
            await asyncio.sleep(1)

    attack.begin()
    half = attack.many(1000) // 2 + 1
    await asyncio.gather(
        attack.crowd(half, lambda: trickle(b"")),
        attack.crowd(half, lambda: trickle(HELLO)),
    )


async def deaf(attack):
    """Request long replies continuously, and never read one."""
    attack.begin()
    refused = [{"jid": f"{number:0250d}", "jobtype": "", "args": []} for number in range(1000)]
    line = b"PUSHB %s\r\n" % json.dumps(refused).encode()

    async def ask():
        _, writer = await attack.open()
        writer.transport.pause_reading()  # so that replies are never read
        while attack.is_running():
            writer.write(line)
            await writer.drain()
            attack.done["questions"] += 1

    await attack.crowd(attack.many(100), ask)


async def deep_json(attack):
    """Push a job with arguments a million levels deep."""
    attack.begin()
    depth = 1_000_000
    deep = b"[" * depth + b"]" * depth
    line = b'PUSH {"jid":"abcdefgh","jobtype":"noop","args":%s}\r\n' % deep

    async def push():
        reader, writer = await attack.open()
        while attack.is_running():
            writer.write(line)
            answer = await reader.readuntil(b"\r\n")
            attack.done["refused" if answer.startswith(b"-ERR") else "taken"] += 1

    await attack.crowd(attack.many(10), push)


async def guesses(attack):
    """Send wrong passwords from one address."""
    attack.begin()
    await attack.crowd(attack.many(100), lambda: guess(attack, None))


async def guesses_from_everywhere(attack):
    """Send wrong passwords, each from a different address of the loopback network.

    Each costs the server up to 8,095 hash rounds.
    """
    attack.begin()
    numbers = itertools.count(2)

    async def act():
        number = next(numbers)
        await guess(attack, f"127.{1 + number // 62_500 % 250}.{number // 250 % 250}.{2 + number % 250}")

    await attack.crowd(attack.many(200), act)


async def guess(attack, address):
    reader, writer = await attack.open(hello=b"", address=address)
    writer.write(b'HELLO {"v":2,"pwdhash":"%s"}\r\n' % (b"0" * 64))
    answer = await reader.readline()
    attack.done["password refused" if b"Invalid" in answer else "not let try"] += 1
    writer.transport.abort()


async def many_queues(attack):
    """Send FETCH with 100,000 queues."""
    attack.begin()
    line = b"FETCH " + b" ".join(b"q%d" % number for number in range(100_000)) + b"\r\n"
    await attack.crowd(attack.many(10), lambda: fetch(attack, line))


async def a_thousand_queues(attack):
    """Send FETCH with the maximum number of queues, repeatedly, as workers do."""
    attack.begin()
    line = b"FETCH " + b" ".join(b"q%d" % number for number in range(1000)) + b"\r\n"
    await attack.crowd(attack.many(10), lambda: fetch(attack, line))


async def fetch(attack, line):
    wid = os.urandom(8).hex().encode()
    reader, writer = await attack.open(hello=WORKER % wid)
    while attack.is_running():
        writer.write(line)
        answer = await reader.readline()
        attack.done[answer.decode()[:40].strip() or "closed"] += 1
        if not answer:
            raise ConnectionError("closed")


async def large_jobs(attack):
    """Push jobs of a megabyte as fast as the server accepts them."""
    attack.begin()
    numbers = itertools.count()
    words = b"w" * (MB - 200)

    async def push():
        reader, writer = await attack.open()
        while attack.is_running():
            jid = b"large-%d-%d" % (os.getpid(), next(numbers))
            writer.write(b'PUSH {"jid":"%s","jobtype":"noop","queue":"large","args":["%s"]}\r\n' % (jid, words))
            answer = await reader.readline()
            attack.done[answer.decode()[:40].strip() or "closed"] += 1
            if not answer:
                raise ConnectionError("closed")

    await attack.crowd(attack.many(20), push)


async def many_jobs(attack):
    """Send PUSHB with as many small jobs as it may have, with new jids each time."""
    numbers = itertools.count()

    def line():
        prefix = b"%04x%05d" % (os.getpid() % 65536, next(numbers))
        jobs = (b'{"jid":"%s%06d","jobtype":"n","args":[],"queue":"m"}' % (prefix, n) for n in range(many))
        return b"PUSHB [%s]\r\n" % b",".join(jobs)

    many = attack.many(10_000)
    await ask_again_and_again(attack, 4, line)


async def no_jobs(attack):
    """Send PUSHB with eight million numbers, none of which is a job."""
    line = b"PUSHB [" + b"0," * attack.many(8 * MB - 100) + b"0]\r\n"
    await ask_again_and_again(attack, 4, lambda: line)


async def wide_json(attack):
    """Send five million empty arrays as arguments, and as many empty strings as lines of a backtrace."""
    arrays = b"[]," * attack.many(5 * MB) + b"[]"
    push = b'PUSH {"jid":"abcdefgh","jobtype":"","args":[%s]}\r\n' % arrays
    fail = b'FAIL {"jid":"abcdefgh","backtrace":[%s]}\r\n' % arrays.replace(b"[]", b'""')
    lines = itertools.cycle((push, fail))
    await ask_again_and_again(attack, 4, lambda: next(lines))


async def many_jids(attack):
    """Send MUTATE with more than a million jids."""
    jids = b",".join(b'"%08x"' % number for number in range(attack.many(MB)))
    line = b'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":[%s]}}\r\n' % jids
    await ask_again_and_again(attack, 4, lambda: line)


async def ask_again_and_again(attack, count, line):
    """Run `count` clients that send one line after the other; count the replies by their first bytes."""
    attack.begin()

    async def ask():
        reader, writer = await attack.open()
        while attack.is_running():
            writer.write(await asyncio.to_thread(line))
            answer = await reader.readline()
            if answer.startswith(b"$"):
                await reader.readexactly(int(answer[1:]) + 2)
            attack.done[answer.decode()[:40].strip() or "closed"] += 1
            if not answer:
                raise ConnectionError("closed")

    await attack.crowd(count, ask)


KINDS = {
    kind.__name__: kind
    for kind in (
        idle, silent, connecting, endless_line, unfinished_lines, slow, deaf, deep_json, guesses,
        guesses_from_everywhere, many_queues, a_thousand_queues, large_jobs, many_jobs, no_jobs,
        wide_json, many_jids,
    )
}  # fmt: skip


def main():
    kind, port, seconds, scale = sys.argv[1:]
    os.nice(10)  # approximates a server on a machine of its own
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack = Attack(int(port), float(seconds), float(scale))

    async def run():
        attack.limit = asyncio.timeout(None)
        with suppress(TimeoutError):
            async with attack.limit:
                await KINDS[kind](attack)

    asyncio.run(run())
    print(json.dumps(attack.done), flush=True)
    os._exit(0)  # without closing thousands of connections first


if __name__ == "__main__":
    main()
