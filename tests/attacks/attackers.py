"""Send one input repeatedly from many clients: `python -m tests.attacks.attackers`, for the attacks at full size.

Reads one line of JSON (name, port, connections, size, seconds, replies) for each attack. Prints "ready" when it has
begun. A further line ends it before its `seconds` are over, once it has `least_replies`. Then prints the most frequent
replies with their counts.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import lru_cache

from tests.attacks.inputs import ATTACKS, NO_ROOM, hello_line

PIECE = 256 * 1024
FIRST_BYTES = 70
HELLOS = {"producer": lambda number: b'HELLO {"v":2}\r\n', "worker": hello_line}
LONGEST_S = 40.0
"""Seconds that an attack waits for the replies that it needs."""


class Attackers:
    """The connections of one attack. `replies` counts the server's answers by their first bytes."""

    def __init__(self, attack, port, *, connections, size, seconds, least_replies=0):
        self.attack, self.port, self.size = attack, port, size
        self._connections, self._seconds, self._least_replies = connections, seconds, least_replies
        self.replies = Counter()
        self.wrong = Counter()
        self._ends_at = 0.0
        self._parts = lru_cache(connections if connections == 1 else 4)(attack.parts)

    async def run(self, on_begin=lambda: None, *, stop=None):
        """Send until `stop` or until the time is over, and until `least_replies` have arrived."""
        self._ends_at = time.monotonic() + self._seconds
        tasks = [asyncio.create_task(self._client(number)) for number in range(self._connections)]
        on_begin()
        if stop:
            await asyncio.wait([stop], timeout=self._seconds)
            self._ends_at = time.monotonic()
        else:
            await asyncio.wait(tasks, timeout=self._seconds)
        while self._lacks_replies() and time.monotonic() < self._ends_at + LONGEST_S:
            await asyncio.wait(tasks, timeout=0.05)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _goes_on(self):
        is_late = time.monotonic() >= self._ends_at
        return not is_late or self._lacks_replies()

    def _lacks_replies(self):
        return self.replies.total() < self._least_replies

    async def _client(self, number):
        while self._goes_on():
            try:
                await self._connection(number)
            except (OSError, asyncio.IncompleteReadError):  # closed by the server; connect again
                self.replies["closed"] += self.attack.is_last
                await asyncio.sleep(0.005)

    async def _connection(self, number):
        address = (f"127.{1 + number // 200}.{number % 200}.{os.getpid() % 200 + 2}", 0)
        local = address if self.attack.addresses else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=local, limit=2**16)
        try:
            await self._talk(number, reader, writer)
        finally:
            writer.transport.abort()

    async def _talk(self, number, reader, writer):
        attack = self.attack
        if attack.server != "tls":
            await reader.readline()
        if attack.hello:
            writer.write(HELLOS[attack.hello](number))
            await reader.readline()
        if not attack.reads:
            writer.transport.pause_reading()
        while self._goes_on():
            reading = asyncio.create_task(self._read(reader))
            try:
                await self._send(number, writer, reading)
                await reading
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
                    await reading
            if attack.is_last:
                return

    async def _send(self, number, writer, reading):
        for part in self._parts(self.size, number):
            view = memoryview(part)
            for start in range(0, len(view), PIECE):
                writer.write(view[start : start + PIECE])
                await writer.drain()
                if reading.done():
                    return
        if not self.attack.reads:
            await asyncio.sleep(max(0.0, self._ends_at - time.monotonic()))

    async def _read(self, reader):
        if not self.attack.reads:
            await asyncio.Event().wait()
        for _ in range(self.attack.replies):
            reply = await reader.readline()
            if not reply:
                raise ConnectionResetError("closed")
            if reply.startswith(b"$") and int(reply[1:]) >= 0:
                await reader.readexactly(int(reply[1:]) + 2)
            self.replies[reply[:FIRST_BYTES].decode("utf-8", "replace").strip()] += 1
            if not (re.match(self.attack.reply, reply) or reply.startswith(NO_ROOM)):
                self.wrong[reply[:FIRST_BYTES].decode("utf-8", "replace").strip()] += 1


def main():
    os.nice(10)  # they represent clients on other machines
    by_name = {str(attack): attack for attack in ATTACKS}
    for line in sys.stdin:
        asked = json.loads(line)
        attackers = Attackers(by_name[asked.pop("name")], asked.pop("port"), **asked)
        asyncio.run(attack_until_next_line(attackers))
        found = {"replies": attackers.replies.most_common(3), "wrong": attackers.wrong.most_common(3)}
        print(json.dumps(found), flush=True)


async def attack_until_next_line(attackers):
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await attackers.run(lambda: print("ready", flush=True), stop=stop)
    await stop  # the next line must be read by nothing else


if __name__ == "__main__":
    main()
