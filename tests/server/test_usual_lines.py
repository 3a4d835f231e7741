"""Tests that the hot path and the general path give the same replies and store the same rows for any line."""

import json
import os
import random
import re

import pytest

from django_faktory.core.protocol.usual import parse_usual
from django_faktory.models import Counter, Job, WorkerProcess
from django_faktory.server import connection
from tests.core.protocol import lines
from tests.examples import examples
from tests.server.raw import RawClient, worker
from tests.settings import KIND

pytestmark = pytest.mark.once_if_quick

NO_VERB = b"\r\n"
"""An empty line. Sent before a line, both arrive together, so that the line is buffered and takes the general path."""

TIMES = re.compile(rb'"(created_at|enqueued_at|started_at)":"[^"]*"')
LINES = int(os.environ.get("FAKTORY_TEST_LINES", "3000"))
COLUMNS = (
    "jid", "jobtype", "queue", "state", "sort_priority", "payload", "retry", "reserve_for", "backtrace", "result_ttl",
    "attempt", "wid", "failures", "errtype", "limit_key", "lock_key", "unique_key", "about",
)  # fmt: skip


def conversation(seed, count):
    """Yield lines, each of which is answered at once: a job of queue `a` waits for each FETCH."""
    source = random.Random(seed)
    jids = []
    for number in range(count):
        jid = f"jid-{number:08}"
        kind = source.random()
        if kind < 0.5:
            line = lines.push(source, jid, source.choice(["a", "b", "c"])).encode()
            jids.append(jid)
        elif kind < 0.75:
            line = lines.ack(source, source.choice(jids[-20:] or [jid])).encode()
        else:
            yield (
                json.dumps({"jid": f"for-{jid}", "jobtype": "noop", "args": [], "queue": "a"})
                .encode()
                .join([b"PUSH ", b""])
            )
            line = lines.fetch(source).encode()
        if kind < 0.75 and source.random() < 0.1:
            line = lines.mutated(source, line)
        # A mutated verb may be that of a FETCH without a job, or end the connection.
        if line.startswith((b"PUSH {", b"ACK ", b"FETCH ")):
            yield line


def replies(address, seed, count, before=b""):
    """Return the replies to these lines, without times, and the rows that they leave."""
    client = RawClient.identified(address, **worker("differ"))
    found = []
    try:
        for line in conversation(seed, count):
            client.send(before + line)
            if before:
                assert client.reply() == b"-ERR unknown command "
            found.append((line, TIMES.sub(rb'"\1":""', client.reply() or b"null")))
    finally:
        client.close()
    return found, [*Job.objects.order_by("jid").values_list(*COLUMNS)]


@pytest.fixture
def on_hot_path(monkeypatch):
    """Count the lines that take the hot path."""
    taken = []

    def parse(data):
        command = parse_usual(data)
        if command is not None:
            taken.append(command)
        return command

    monkeypatch.setattr(connection, "parse_usual", parse)
    return taken


def test_a_random_line_has_the_same_effect_on_the_hot_and_the_general_path(serve, on_hot_path):
    # On PostgreSQL the hot path continues to the exchange; elsewhere it ends with the parsed line.
    count = max(300, examples(LINES if KIND == "postgresql" else LINES // 3))
    usual = sum(parse_usual(line + b"\r\n") is not None for line in conversation(5, count))
    runs, taken = [], []
    for before in (b"", NO_VERB):
        runs.append(replies(serve().address, 5, count, before))
        taken.append(len(on_hot_path))
        on_hot_path.clear()
        for model in (Job, Counter, WorkerProcess):
            model.objects.all().delete()
    (hot, hot_rows), (general, general_rows) = runs
    for one, other in zip(hot, general, strict=True):
        assert one == other
    assert hot_rows == general_rows
    assert taken[0] > usual / 2 > count / 10, "the first run must take the hot path"
    assert taken[1] == 0, "the second run must not"
    assert {reply[:4] for _, reply in hot} >= {b"+OK", b"-ERR"}
    assert any(reply.startswith(b"{") for _, reply in hot), "no FETCH was answered with a job"
