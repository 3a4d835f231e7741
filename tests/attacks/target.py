"""Start a server with `runfaktory` as the target, and a good client that uses it during an attack."""

import json
import re
import time
from hashlib import sha256

from tests.programs import Program
from tests.server.raw import CERTIFICATE, RawClient, push, worker

PASSWORD = "the good client knows it"
OPTIONS = {"plain": {}, "password": {"PASSWORD": PASSWORD}, "tls": {"TLS_CERT": str(CERTIFICATE)}}
MB = 2**20
REST_S = 0.005


class Target:
    """A server process on the test's database."""

    def __init__(self, database, kind="plain", **settings):
        given = {"POLL_INTERVAL": 0.5, "WORKER_TIMEOUT": 60} | OPTIONS[kind] | settings
        self.kind = kind
        self.program = Program(
            *("-m", "django", "runfaktory", "127.0.0.1:0", "--server-only", "--no-reload"),
            DJANGO_SETTINGS_MODULE="tests.runtime.processes.settings",
            FAKTORY_TEST_NAME=database,
            FAKTORY_TEST_SETTINGS=json.dumps(given),
        )
        [found] = self.program.wait_for_log("server listens")
        self.port = int(re.search(r"address=\S+:(\d+)", found)[1])
        [self._process] = self.program.children()

    @property
    def pid(self):
        return self._process.pid

    def rss_mb(self):
        return self._process.memory_info().rss / MB

    def cpu_s(self):
        """Return the CPU seconds that the server has used."""
        times = self._process.cpu_times()
        return times.user + times.system

    def is_alive(self):
        return self.program.is_alive() and self._process.is_running()

    def close(self):
        self.program.clean_up()


class GoodClient:
    """A worker that keeps one job, processes others, and sends BEAT. `ms` lists the latency of each command."""

    def __init__(self, target, context=None):
        self.ms = []
        self._number = 0
        self._client = _KnownClient(("127.0.0.1", target.port), context=context if target.kind == "tls" else None)
        self.kept = f"kept-{target.pid:08d}"
        self._expect(push(jid=self.kept, queue="kept"), b"+OK")
        assert json.loads(self._client.ask("FETCH kept"))["jid"] == self.kept

    def work(self):
        """Push, fetch and acknowledge one job, then send BEAT. Raises AssertionError for an unexpected answer."""
        self._number += 1
        jid = f"good-{self._number:08d}"
        self._expect(push(jid=jid, queue="good"), b"+OK")
        assert json.loads(self._timed("FETCH good"))["jid"] == jid
        self._expect(f'ACK {{"jid":"{jid}"}}', b"+OK")
        self._expect('BEAT {"wid":"good"}', b"+OK")

    def work_for(self, seconds, *, commands=0, at_most=None):
        """Work for `seconds`, and on until this number of commands is answered, but not longer than `at_most`."""
        self.ms = []
        began = time.monotonic()
        while (worked_s := time.monotonic() - began) < seconds or (len(self.ms) < commands and worked_s < at_most):
            self.work()
            time.sleep(REST_S)

    def work_until(self, is_over):
        while not is_over():
            self.work()
            time.sleep(REST_S)

    def end_kept(self):
        self._expect(f'ACK {{"jid":"{self.kept}"}}', b"+OK")

    def close(self):
        self._client.close()

    def _expect(self, line, reply):
        found = self._timed(line)
        assert found == reply, f"{line[:40]}: expected {reply}, got {found!r:.100}"

    def _timed(self, line):
        began = time.perf_counter()
        reply = self._client.ask(line)
        self.ms.append((time.perf_counter() - began) * 1000)
        return reply


class _KnownClient(RawClient):
    """Send HELLO as a worker, with the password if the server requires one."""

    def __init__(self, address, *, context):
        self.context = context
        super().__init__(address)
        asked = json.loads(self.reply()[4:])
        hello = {"v": 2} | worker("good")
        if "s" in asked:
            digest = (PASSWORD + asked["s"]).encode()
            for _ in range(asked["i"]):
                digest = sha256(digest).digest()
            hello["pwdhash"] = digest.hex()
        assert self.ask(f"HELLO {json.dumps(hello)}") == b"+OK"
