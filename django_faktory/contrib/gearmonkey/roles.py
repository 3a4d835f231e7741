"""The processes of `runfaktory --gearmonkey`: workers that fetch from Redis, or a bridge that stores the jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from ... import brokers, conf
from ...core.logs import get_logger
from ...errors import BrokerUnavailable, FaktoryError
from ...runtime.background_loops import Beside
from ...runtime.config import Plan
from ...runtime.supervisor.child import Role, obey
from ...runtime.supervisor.contract import Launch
from ...runtime.supervisor.lost_workers import report_lost
from ...worker.db_cleanup import set_up_own_connections
from ...worker.process import CANNOT_START, CLEAN, CRASHED
from ...worker.recycling import Share
from ...worker.worker import Worker
from .address import connect
from .broker import QUEUE, GearMonkeyBroker
from .gateway import Bridge
from .maintenance import Upkeep
from .notifications import Hints
from .redis_worker import BEATS_A_LEASE, Station
from .registry import GATEWAY, served

logger = get_logger(__name__)


def roles(plan: Plan) -> list[Role]:
    """Return one worker role for each process of the plan, or one bridge role."""
    if conf.get("GEARMONKEY_MODE") == GATEWAY:
        return [Role(name="gearmonkey", main=partial(_at_a_station, plan, _bridge))]
    main = partial(_at_a_station, plan, partial(_work, plan))
    return [Role(name=f"gearmonkey {number}", main=main) for number in range(plan.processes)]


def _at_a_station(plan: Plan, main: Callable[[Station, Launch], int], launch: Launch) -> int:
    """Connect to Redis and run `main`; return its exit code.

    A cluster is asked for its nodes at once: if it does not answer, this process ends and its replacement tries again.
    For any other Redis the worker waits.
    """
    set_up_own_connections()
    try:
        redis = connect(plan.gearmonkey)
    except BrokerUnavailable as error:
        logger.error("GearMonkey: %s; trying again", error)  # noqa: TRY400  (one line, its own words)
        return CRASHED
    return main(Station(redis, list(served()), wid=launch.wid, lease_s=conf.get("GEARMONKEY_LEASE")), launch)


def _work(plan: Plan, station: Station, launch: Launch) -> int:
    """Run one ordinary worker on the Redis broker; return its exit code."""
    broker = GearMonkeyBroker(station, {fn: task.jobtype for fn, task in served().items()})
    worker = Worker(
        broker,
        wid=launch.wid,
        queues=[QUEUE],
        concurrency=plan.concurrency,
        listen=lambda: Hints(station.redis, station.fns),
        poll_interval=min(conf.get("POLL_INTERVAL"), 1.0),
        beat_interval=station.lease_s / BEATS_A_LEASE,
        shutdown_timeout=conf.get("SHUTDOWN_TIMEOUT"),
        read_ahead=0,
        share=Share(max_jobs=plan.max_jobs, max_rss=plan.max_rss, rng=Random()),
        hears_signals=True,
    )
    # Before any thread is started: a signal must find its handler.
    obey(launch, stop=worker.stop, quiet=worker.quiet)
    report_lost(broker, launch)
    if not _run_beside_upkeep(station, worker.run, "worker"):
        return CANNOT_START
    return worker.exit_code()


def _bridge(station: Station, launch: Launch) -> int:
    """Run one bridge: it stores jobs in the database, where any worker of the project runs them."""
    bridge = Bridge(station, brokers.get_broker(), conf.get("DATABASE"), served())
    obey(launch, stop=bridge.stop)
    return CLEAN if _run_beside_upkeep(station, bridge.run, "bridge") else CANNOT_START


def _run_beside_upkeep(station: Station, run: Callable[[], object], what: str) -> bool:
    """Run `run` with the maintenance of its queues in a thread; return False if it cannot start."""
    with Beside() as beside:
        beside.start(Upkeep(station, audits=conf.get("GEARMONKEY_AUDIT")), "gearmonkey-upkeep")
        try:
            run()
        except FaktoryError as error:
            logger.error("GearMonkey %s cannot start: %s", what, error)  # noqa: TRY400  (one line, its own words)
            return False
    return True
