"""Fixtures: a Redis as a Faktory leaves it, and the two subcommands."""

import json
import time
from pathlib import Path

import pytest

from tests.contrib.gearmonkey.conftest import own_server  # noqa: F401  (a fixture)
from tests.management.cli.conftest import asked, faktory  # noqa: F401  (fixtures)

RECORDED = {path.stem.removeprefix("faktory-"): path for path in Path(__file__).parent.glob("faktory-*.json")}
"""Recorded contents of real Faktory servers, by release: `record` writes them."""


@pytest.fixture
def server(own_server):  # noqa: F811
    """Return an empty Redis without connected clients."""
    client = own_server.client()
    client.flushall()
    client.close()
    return own_server


@pytest.fixture
def redis(server):
    client = server.client()
    yield client
    client.close()


def load(redis, contents):
    """Fill Redis, and disconnect: the import refuses a Redis with other clients."""
    put = {
        "list": lambda key, found: redis.rpush(key, *found),
        "set": lambda key, found: redis.sadd(key, *found),
        "zset": lambda key, found: redis.zadd(key, dict(map(tuple, found))),
        "string": redis.set,
    }
    for key, (kind, found) in contents.items():
        put[kind](key, found)
    redis.close()


def recorded(release):
    """Return recorded contents with times moved as if recorded in one hour, so that scheduled jobs still wait."""
    found = json.loads(RECORDED[release].read_text(encoding="utf-8"))
    died_at = found["dead"][1][0][1] - 180 * 86_400
    for key in ("retries", "working", "dead"):
        found[key][1] = [[raw, score + round(time.time() - died_at) + 3600] for raw, score in found[key][1]]
    return found


def jids(redis, *keys):
    """Return the jids of all jobs in these lists and sorted sets."""
    raws = []
    for key in keys:
        match redis.type(key):
            case b"list":
                raws += redis.lrange(key, 0, -1)
            case b"zset":
                raws += redis.zrange(key, 0, -1)
    redis.close()
    return [json.loads(raw)["jid"] for raw in raws]


def raw(jid, queue="default", **fields):
    """Return a job in the JSON that the original writes."""
    job = {"retry": 25, "jid": f"jid-{jid}".ljust(8, "-"), "queue": queue, "jobtype": "shop.tasks.send", "args": []}
    return json.dumps(job | fields, separators=(",", ":"))
