"""The processes of `runfaktory --gearmonkey`: workers that fetch from Redis, or a gateway that stores the jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from ... import brokers, conf
from ...core.logs import get_logger
from ...errors import BrokerUnavailable, FaktoryError
from ...runtime.background_loops import BackgroundLoops
from ...runtime.config import RunConfig
from ...runtime.supervisor.child import Role, install_signals
from ...runtime.supervisor.contract import ChildSpec
from ...runtime.supervisor.lost_workers import report_lost
from ...worker.db_cleanup import set_up_own_connections
from ...worker.process import CANNOT_START, CLEAN, CRASHED
from ...worker.recycling import RecyclePolicy
from ...worker.worker import Worker
from .address import connect
from .broker import QUEUE, GearMonkeyBroker
from .gateway import Gateway
from .maintenance import MaintenanceLoop
from .notifications import ChannelListener
from .redis_worker import BEATS_A_LEASE, RedisWorker
from .registry import GATEWAY, served_tasks

logger = get_logger(__name__)


def roles(run_config: RunConfig) -> list[Role]:
    """Return one worker role for each worker process, or one gateway role."""
    if conf.get("GEARMONKEY_MODE") == GATEWAY:
        return [Role(name="gearmonkey", main=partial(_run_with_redis_worker, run_config, _run_gateway))]
    main = partial(_run_with_redis_worker, run_config, partial(_run_worker, run_config))
    return [Role(name=f"gearmonkey {number}", main=main) for number in range(run_config.processes)]


def _run_with_redis_worker(
    run_config: RunConfig, main: Callable[[RedisWorker, ChildSpec], int], child_spec: ChildSpec
) -> int:
    """Connect to Redis and run `main`; return its exit code.

    A cluster is asked for its nodes at once: if it does not answer, this process ends and its replacement tries again.
    For any other Redis the worker waits.
    """
    set_up_own_connections()
    try:
        redis = connect(run_config.gearmonkey)
    except BrokerUnavailable as error:
        logger.error("GearMonkey: %s; trying again", error)  # noqa: TRY400  (expected: no traceback)
        return CRASHED
    return main(
        RedisWorker(redis, list(served_tasks()), wid=child_spec.wid, lease_s=conf.get("GEARMONKEY_LEASE")), child_spec
    )


def _run_worker(run_config: RunConfig, redis_worker: RedisWorker, child_spec: ChildSpec) -> int:
    """Run one ordinary worker on the Redis broker; return its exit code."""
    broker = GearMonkeyBroker(redis_worker, {fn: task.jobtype for fn, task in served_tasks().items()})
    worker = Worker(
        broker,
        wid=child_spec.wid,
        queues=[QUEUE],
        concurrency=run_config.concurrency,
        listen=lambda: ChannelListener(redis_worker.redis, redis_worker.fns),
        # Events get lost, so the queues are polled once a second in any case (ADR 0013).
        poll_interval=min(conf.get("POLL_INTERVAL"), 1.0),
        beat_interval=redis_worker.lease_s / BEATS_A_LEASE,
        shutdown_timeout=conf.get("SHUTDOWN_TIMEOUT"),
        max_prefetch=0,
        recycle_policy=RecyclePolicy(max_jobs=run_config.max_jobs, max_rss=run_config.max_rss, rng=Random()),
        has_signal_thread=True,
    )
    # Before any thread is started: a signal must find its handler.
    install_signals(child_spec, stop=worker.stop, quiet=worker.quiet)
    # Reclaim the jobs of the process that this one replaces, before it takes new ones.
    report_lost(broker, child_spec)
    if not _run_with_maintenance(redis_worker, worker.run, "worker"):
        return CANNOT_START
    return worker.exit_code()


def _run_gateway(redis_worker: RedisWorker, child_spec: ChildSpec) -> int:
    """Run one gateway: it stores jobs in the database, where any worker of the project runs them."""
    gateway = Gateway(redis_worker, brokers.get_broker(), conf.get("DATABASE"), served_tasks())
    install_signals(child_spec, stop=gateway.stop)
    return CLEAN if _run_with_maintenance(redis_worker, gateway.run, "gateway") else CANNOT_START


def _run_with_maintenance(redis_worker: RedisWorker, run: Callable[[], object], role: str) -> bool:
    """Run `run` with the maintenance of its queues in a thread; return False if it cannot start."""
    with BackgroundLoops() as loops:
        loops.start(MaintenanceLoop(redis_worker, audits=conf.get("GEARMONKEY_AUDIT")), "gearmonkey-maintenance")
        try:
            run()
        except FaktoryError as error:
            logger.error("GearMonkey %s cannot start: %s", role, error)  # noqa: TRY400  (expected: no traceback)
            return False
    return True
