"""Connect to a Redis by its URL, and check at start that it can be used. Knows no job.

URLs: `redis://`, `rediss://`, `unix://`; `redis+cluster://host:port`; `redis+sentinel://host:port,host:port/name/db`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis import Redis, RedisCluster
from redis.backoff import NoBackoff

from ...core.logs import get_logger
from .errors import UnusableServer
from .requests import REDIS_ERRORS, unavailable

logger = get_logger(__name__)

PLAIN, CLUSTER, SENTINEL = ("redis", "rediss", "unix"), "redis+cluster", "redis+sentinel"
# BLMOVE rotates the list with the message of a job's end, so that other waiting clients see it too.
OLDEST = (6, 2)
"""The first Redis version with BLMOVE."""

TIMEOUT_S = 5.0
"""Seconds without a reply after which a connection counts as dead. Longer than any blocking command used here waits."""

_OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_S,
    "socket_connect_timeout": 3.0,
    "socket_keepalive": True,
    # Inputs, outputs and ids are the peers' bytes, and need not be UTF-8.
    "decode_responses": False,
}

_FIXED = ("decode_responses", "retry_on_timeout", "retry_on_error")


def connect(url: str) -> Redis:
    """Return a client of the server at `url`. Raises UnusableServer.

    Nothing is sent yet, except to a cluster or a Sentinel.
    """
    try:
        client: Redis = _connect(url, redis)
    except REDIS_ERRORS as error:
        raise unavailable(error) from error
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """Return a client for asyncio; otherwise like `connect`."""
    client: redis.asyncio.Redis = _connect(url, redis.asyncio)
    return client


def _connect(url: str, library: Any) -> Any:
    """Return a client of `redis` or `redis.asyncio`, which have the same names."""
    scheme = check_url(url)
    # redis-py must not retry by itself: a command that is sent twice may create two jobs.
    options = {**_OPTIONS, "retry": library.retry.Retry(NoBackoff(), 0)}
    if scheme == CLUSTER:
        return library.RedisCluster.from_url(_usable_url(url), **options)
    if scheme == SENTINEL:
        hosts, name, master_options = _parse_sentinel_url(url)
        sentinel = library.Sentinel(hosts, sentinel_kwargs=dict(_OPTIONS))
        return sentinel.master_for(name, **{**options, **master_options})
    return library.Redis.from_url(_usable_url(url), **options)


def _usable_url(url: str) -> str:
    """Return the URL for redis-py, without options that would replace ours."""
    address, mark, query = url.replace(CLUSTER, "redis", 1).partition("?")
    return address + mark + "&".join(option for option in query.split("&") if option.partition("=")[0] not in _FIXED)


def sentinels_of(client: Any) -> list[Any]:
    """Return the Sentinel clients of this client, which have to be closed together with it."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return list(manager.sentinels) if manager is not None else []


def close(client: Redis) -> None:
    """Close all connections of the client; it remains usable."""
    for each_client in (client, *sentinels_of(client)):
        each_client.close()


def check_url(url: object) -> str:
    """Return the scheme of a supported URL. Raises UnusableServer, without the password in the message."""
    scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    if scheme not in (*PLAIN, CLUSTER, SENTINEL):
        raise UnusableServer(
            "GearMonkey: expected the URL of a Redis: redis://, rediss://, unix://, redis+cluster://HOST:PORT or "
            f"redis+sentinel://HOST:PORT,…/NAME; got the scheme {scheme!r}"
        )
    if scheme == SENTINEL:
        _parse_sentinel_url(str(url))
    return scheme


def examine(client: Redis, fns: Iterable[str]) -> None:
    """Check that these functions can be served by this server. Raises UnusableServer or BrokerUnavailable.

    Logs a warning for a risk that does not prevent use: an eviction policy other than noeviction.
    """
    try:
        if isinstance(client, RedisCluster):
            _require_hash_tags(fns)
            return
        server = client.info("server")
        mode = server.get("redis_mode", "standalone")
        if mode == "cluster":
            _require_hash_tags(fns)
            raise UnusableServer("this Redis is a node of a cluster: write redis+cluster://HOST:PORT")
        if mode == "sentinel":
            raise UnusableServer("this is a Sentinel: write redis+sentinel://HOST:PORT/NAME, with the master's name")
        version = tuple(int(part) for part in str(server["redis_version"]).split(".")[:2])
        if version < OLDEST:
            raise UnusableServer(f"Redis {server['redis_version']}: expected 6.2 or newer, for BLMOVE")
        # An evicted key is a lost job, counter or lease (ADR 0013).
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            logger.warning("Redis may evict jobs: maxmemory-policy is %s, expected noeviction", policy)
    except REDIS_ERRORS as error:
        raise unavailable(error) from error


def has_hash_tag(fn: str) -> bool:
    """Return whether all keys of this function share one cluster slot.

    They do if the function's name contains `{…}` with at least one character between the braces.
    """
    # Redis Cluster hashes only what is between the first `{` and the next `}`, unless that is empty.
    begin = fn.find("{")
    return begin >= 0 and fn.find("}", begin + 1) > begin + 1


def _require_hash_tags(fns: Iterable[str]) -> None:
    for fn in fns:
        if not has_hash_tag(fn):
            raise UnusableServer(
                f"function {fn!r} on a Redis Cluster: its keys would be on several nodes, and no command takes them "
                f"together; give it a name with a hash tag, such as '{{{fn}}}', for clients and workers alike"
            )


def _parse_sentinel_url(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Return the Sentinel addresses, the master's name, and the connection options of the master."""
    # The host list is split here: urlsplit knows a single host and port.
    split_url = urlsplit(url)
    credentials, _, hosts = split_url.netloc.rpartition("@")
    name, _, db = split_url.path.strip("/").partition("/")
    try:
        addresses = [
            (host, int(port or 26_379)) for host, _, port in (address.partition(":") for address in hosts.split(","))
        ]
        options: dict[str, Any] = {"db": int(db or 0)}
    except ValueError:
        addresses = []
    if not (name and addresses and all(host for host, _ in addresses)):
        raise UnusableServer("expected redis+sentinel://[:PASSWORD@]HOST:PORT[,HOST:PORT]/NAME[/DB]")
    user, _, password = credentials.partition(":")
    if user:
        options["username"] = unquote(user)
    if password:
        options["password"] = unquote(password)
    return addresses, name, options
