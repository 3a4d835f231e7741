"""A Redis as a Faktory leaves it, and the two subcommands."""

import json
import time
from pathlib import Path

import pytest

from tests.cli.conftest import asked, faktory  # noqa: F401  (fixtures)
from tests.gearmonkey.conftest import own_server  # noqa: F401  (a fixture)

RECORDED = {path.stem.removeprefix("faktory-"): path for path in Path(__file__).parent.glob("faktory-*.json")}
"""What real ones left, by their releases: `record` says how."""


@pytest.fixture
def server(own_server):  # noqa: F811
    """An empty one, which nobody is connected to."""
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
    """Fill it, and let go: a connection would be company."""
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
    """As if it was recorded an hour from now: what waits for its time waits still."""
    found = json.loads(RECORDED[release].read_text(encoding="utf-8"))
    died_at = found["dead"][1][0][1] - 180 * 86_400
    for key in ("retries", "working", "dead"):
        found[key][1] = [[raw, score + round(time.time() - died_at) + 3600] for raw, score in found[key][1]]
    return found


def jids(redis, *keys):
    """Of all that lies in these lists and sets."""
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
    """A job as the original writes it."""
    job = {"retry": 25, "jid": f"jid-{jid}".ljust(8, "-"), "queue": queue, "jobtype": "shop.tasks.send", "args": []}
    return json.dumps(job | fields, separators=(",", ":"))
