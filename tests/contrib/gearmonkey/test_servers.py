"""Test the supported servers: clusters, Sentinels with failover, access lists, and a Redis without memory."""

import asyncio
import re
import secrets
import signal
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from redis import Redis

from django_faktory.contrib.gearmonkey import (
    OPT_BLOCKING,
    OPT_ROLLCALL,
    AsyncClient,
    Client,
    JobCreationFailed,
    NoWorkers,
    Status,
    UnusableServer,
    Worker,
)
from django_faktory.contrib.gearmonkey.address import connect, examine, sentinels_of
from django_faktory.contrib.gearmonkey.inspection import health
from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
from django_faktory.errors import BrokerUnavailable, FaktoryError
from tests.contrib.gearmonkey.naive import NaiveWorker
from tests.contrib.gearmonkey.servers import Sentinel, become_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.once]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gearmonkey.md"


def shout(input):
    return input.decode().upper()


@contextmanager
def working(url, *fns):
    worker = Worker(url, lease_s=1.0, sweep_every_s=0.1)
    for fn in fns:
        worker.accept(fn, shout)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(60)
    assert not thread.is_alive()


def asked_on_a_loop(url, *fns):
    """Run one job of each function with an AsyncClient, and return the outputs."""

    async def main():
        async with AsyncClient(url) as client:
            ids = [await client.run(fn, "x", options=[OPT_BLOCKING, OPT_ROLLCALL], timeout=20) for fn in fns]
            return [(await client.get(fn, id)).output for fn, id in zip(fns, ids, strict=True)]

    return asyncio.run(main())


def works(client):
    """True if a job can be created and executed; a new cluster can do neither for a while."""
    try:
        client.run("{t}", "z", options=[OPT_BLOCKING, OPT_ROLLCALL], timeout=10)
    except FaktoryError:
        return False
    return True


@contextmanager
def ending(*servers):
    try:
        yield servers
    finally:
        for one in servers:
            one.clean_up()


@pytest.fixture
def node(own):
    """Return a function that starts a server that can become a node of a cluster."""
    return lambda: own("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{secrets.token_hex(4)}.conf")


class TestCluster:
    def test_h16_functions_on_a_cluster_require_a_hash_tag(self, node):
        server = node()
        url = become_cluster(server)
        refused = Worker(url)
        refused.accept("t", shout)
        with pytest.raises(UnusableServer, match=r"hash tag, such as '\{t\}'"):
            refused.run()
        with pytest.raises(UnusableServer, match=r"write redis\+cluster://"):
            examine(connect(server.url), ["{t}"])

    def test_h16_functions_with_a_hash_tag_are_served_and_inspected(self, node):
        url = become_cluster(node(), node())
        with working(url, "{t}", "{u}"), Client(url) as client:
            for fn in ("{t}", "{u}"):
                id = client.run(fn, "x", options=[OPT_BLOCKING], timeout=20)
                assert client.get(fn, id).output == b"X"
            client.run("{nobody}", "x")
            seen = health(connect(url))
        assert [(one.fn, one.count) for one in seen.functions] == [("{nobody}", "0"), ("{t}", "1"), ("{u}", "1")]
        assert seen.problems == ["{nobody}: no running worker; jobs waiting: 1."]

    def test_clients_and_workers_reconnect_to_a_restarted_cluster(self, node):
        server = node()
        url = become_cluster(server)
        with working(url, "{t}"), Client(url) as client:
            wait_until(lambda: client.get("{t}", client.run("{t}", "x")).status is Status.SUCCESS)
            server.stop(signal.SIGKILL)
            with pytest.raises(JobCreationFailed, match="unavailable"):
                client.run("{t}", "y")
            with pytest.raises(BrokerUnavailable):
                client.get("{t}", 1)
            server.start()
            wait_until(lambda: works(client))

    def test_the_async_client_runs_jobs_on_a_cluster(self, node):
        url = become_cluster(node(), node())
        redis = connect(url)
        with working(url, "{t}", "{u}"):
            with Client(url) as client:
                client.run("{u}", "x", options=[OPT_BLOCKING], timeout=20)
            wait_until(lambda: redis.get("count:{t}") == b"1")
            assert asked_on_a_loop(url, "{t}", "{u}") == [b"X", b"X"]


class TestSentinel:
    @pytest.mark.quick
    def test_clients_find_the_master_through_sentinels(self, own, tmp_path):
        server = own()
        with ending(Sentinel(tmp_path, server)) as [sentinel]:
            with pytest.raises(UnusableServer, match=r"write redis\+sentinel://"):
                examine(connect(f"redis://127.0.0.1:{sentinel.port}"), [])
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/jobs"
            with Client(url) as client:
                assert client.run("f", "x") == 1
            assert server.client().exists("job:f:1")
            with working(url, "f"):
                wait_until(lambda: server.client().get("count:f") == b"1")
                assert asked_on_a_loop(url, "f") == [b"X"]

    @pytest.mark.quick
    def test_a_closed_client_leaves_no_connection_to_a_sentinel(self, own, tmp_path):
        with ending(Sentinel(tmp_path, own())) as [sentinel]:
            observer = sentinel.client()
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/jobs"
            before = len(observer.client_list())

            async def ask():
                async with AsyncClient(url) as client:
                    await client.run("f", "x")
                    assert len(observer.client_list()) > before

            asyncio.run(ask())
            wait_until(lambda: len(observer.client_list()) == before)
            with Client(url) as client:
                client.run("f", "x")
                assert len(observer.client_list()) > before
            wait_until(lambda: len(observer.client_list()) == before)

    def test_workers_and_blocking_clients_follow_a_failover(self, own, tmp_path):
        master, replica = own(), own()
        replica.client().replicaof("127.0.0.1", master.port)
        wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up", 60)
        with ending(Sentinel(tmp_path, master)) as [sentinel]:
            wait_until(lambda: sentinel.client().sentinel_slaves("jobs"), 60)
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/jobs"
            with working(url, "f"), Client(url) as client:
                first = client.run("f", "before", options=[OPT_BLOCKING], timeout=20)
                waiting = threading.Thread(target=client.run, args=("g", "x", "normal", [OPT_BLOCKING]), daemon=True)
                waiting.start()
                redis = master.client()
                wait_until(lambda: redis.exists("job:g:1"))
                assert redis.wait(1, 20_000) == 1  # a failover may lose what has not been replicated
                master.stop(signal.SIGKILL)
                with pytest.raises(FaktoryError):
                    client.get("f", first)
                id = wait_until(lambda: _quietly(client.run, "f", "after", options=[OPT_BLOCKING], timeout=60), 120)
                assert client.get("f", id).output == b"AFTER"
                assert client.get("f", first).output == b"BEFORE"
                wait_until(lambda: replica.client().get("count:f") == b"1")
                assert waiting.is_alive()
                with NaiveWorker(replica.client(), "g", shout):
                    waiting.join(30)
                assert not waiting.is_alive()
                assert asked_on_a_loop(url, "f") == [b"X"]


class TestAccess:
    @pytest.mark.quick
    def test_the_documented_access_list_is_sufficient_and_permits_nothing_else(self, own):
        [rules] = re.findall(r"^ACL SETUSER (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        server = own()
        root = server.client()
        root.execute_command("ACL", "SETUSER", *rules.split())
        name, secret = rules.split()[0], rules.split(">")[1].split()[0]
        url = server.url.replace("redis://", f"redis://{name}:{secret}@")
        with working(url, "f"), Client(url) as client:
            wait_until(lambda: root.get("count:f") == b"1")
            for prio in ("high", "scheduled"):
                moment = 1 if prio == "scheduled" else None
                id = client.run("f", "x", prio, [OPT_BLOCKING, OPT_ROLLCALL], timeout=20, scheduled=moment)
                assert client.get("f", id).output == b"X"
            redis_worker = RedisWorker(connect(url), ["g"], wid="w1", lease_s=0.01)
            redis_worker.open()
            for bury in (
                redis_worker.release,
                redis_worker.hand_over,
                lambda job: redis_worker.finish(job, Status.ERROR, b"no"),
            ):
                client.run("g", "x")
                [job] = redis_worker.take(1)
                redis_worker.update(job, 1, 2)
                bury(job)
            redis_worker.extend([], are_handed_over=True)
            wait_until(lambda: redis_worker.adopt(5))
            redis_worker.sweep()
            redis_worker.audit()
            redis_worker.dismiss(["w1"], have_died=True)
            assert {one.fn for one in health(connect(url)).functions} == {"f", "g"}
        refused = Redis.from_url(url)
        for words in (["GET", "other"], ["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["PUBLISH", "other", "x"]):
            with pytest.raises(Exception, match=r"(?i)no permission"):
                refused.execute_command(*words)
        refused.close()
        denied = [entry["object"] for entry in root.acl_log()]
        assert not {"evalsha", "script|load"} & set(denied), denied


class TestWhatCannotBe:
    @pytest.mark.parametrize(
        "url", ["http://localhost", "", "redis+sentinel://localhost", "redis+sentinel://localhost:x/jobs", "localhost"]
    )
    def test_an_invalid_server_address_is_rejected(self, url):
        with pytest.raises(UnusableServer, match=r"expected|no server is known"):
            Client(url or "none")

    def test_an_older_server_is_rejected_with_the_expected_version(self, redis, monkeypatch):
        monkeypatch.setattr(redis, "info", lambda section: {"redis_version": "6.0.16"})
        with pytest.raises(UnusableServer, match=r"Redis 6\.0\.16: expected 6\.2 or newer"):
            examine(redis, ["f"])

    def test_a_master_behind_a_sentinel_gets_the_credentials_of_the_url(self):
        client = connect("redis+sentinel://ann:p%40ss@localhost:26379,other/jobs/2")
        options = client.connection_pool.connection_kwargs
        assert [options[name] for name in ("username", "password", "db")] == ["ann", "p@ss", 2]
        assert [one.connection_pool.connection_kwargs["port"] for one in sentinels_of(client)] == [26_379] * 2

    def test_a_server_that_evicts_keys_causes_a_warning(self, redis, server, caplog):
        redis.config_set("maxmemory-policy", "allkeys-lru")
        try:
            examine(connect(server.url), ["f"])
        finally:
            redis.config_set("maxmemory-policy", "noeviction")
        assert "may evict jobs: maxmemory-policy is allkeys-lru" in caplog.text

    @pytest.mark.quick
    def test_a_standalone_worker_fails_with_an_error_if_redis_has_no_memory(self, redis, server):
        redis.config_set("maxmemory", 1)
        worker = Worker(server.url)
        worker.accept("f", shout)
        with pytest.raises(BrokerUnavailable, match="maxmemory"):
            worker.run()
        redis.config_set("maxmemory", 0)
        with Client(server.url) as client, pytest.raises(NoWorkers):
            client.run("f", "x", options=[OPT_ROLLCALL])


def _quietly(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except FaktoryError:
        return None


@pytest.mark.parametrize("option", ["decode_responses=True", "decode_responses=1&db=0", "db=0&decode_responses=yes"])
def test_replies_stay_bytes_whatever_the_url_asks_for(own_server, option):
    """Ids and inputs are the bytes of peers: as text they cannot be decoded, and the scripts do not match."""
    url = f"redis://127.0.0.1:{own_server.port}?{option}"
    own_server.client().flushall()
    with working(url, "f"), Client(url) as client:
        id = client.run("f", "x", options=[OPT_BLOCKING], timeout=20)
        assert client.get("f", id).output == b"X"

    async def get():
        async with AsyncClient(url) as client:
            return await client.get("f", id)

    assert asyncio.run(get()).output == b"X"
    with closing(connect(f"unix:///tmp/redis.sock?{option}")) as redis:
        assert redis.connection_pool.connection_kwargs["path"] == "/tmp/redis.sock"
