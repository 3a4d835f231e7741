"""The processes of `runfaktory --gearmonkey`: workers that take jobs from Redis, or a bridge that makes rows of
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from .. import brokers, conf
from ..errors import BrokerUnavailable, FaktoryError
from ..gearmonkey.address import connect
from ..gearmonkey.broker import QUEUE, GearMonkeyBroker
from ..gearmonkey.functions import GATEWAY, served
from ..gearmonkey.gateway import Bridge
from ..gearmonkey.hints import Hints
from ..gearmonkey.station import BEATS_A_LEASE, Station
from ..gearmonkey.upkeep import Upkeep
from ..logs import get_logger
from ..worker.connections import keep_no_queries
from ..worker.launch import Role, obey
from ..worker.runner import Worker
from ..worker.share import Share
from ..worker.terms import CANNOT_START, CLEAN, CRASHED, Launch
from .beside import Beside
from .losses import report_lost
from .plan import Plan

logger = get_logger(__name__)


def roles(plan: Plan) -> list[Role]:
    """As many workers as the plan has processes, or one bridge."""
    if conf.get("GEARMONKEY_MODE") == GATEWAY:
        return [Role(name="gearmonkey", main=partial(_at_a_station, plan, _bridge))]
    main = partial(_at_a_station, plan, partial(_work, plan))
    return [Role(name=f"gearmonkey {number}", main=main) for number in range(plan.processes)]


def _at_a_station(plan: Plan, main: Callable[[Station, Launch], int], launch: Launch) -> int:
    """Connect, and do it. A cluster is asked for its nodes at once: where it is away this process ends, and the next
    one tries again; any other Redis is waited for."""
    keep_no_queries()
    try:
        redis = connect(plan.gearmonkey)
    except BrokerUnavailable as error:
        logger.error("GearMonkey: %s; trying again", error)  # noqa: TRY400  (one line, its own words)
        return CRASHED
    return main(Station(redis, list(served()), wid=launch.wid, lease_s=conf.get("GEARMONKEY_LEASE")), launch)


def _work(plan: Plan, station: Station, launch: Launch) -> int:
    """One worker of ours, above a broker that is Redis."""
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
    obey(launch, stop=worker.stop, quiet=worker.quiet)
    report_lost(broker, launch)
    if not _run_beside_upkeep(station, worker.run, "worker"):
        return CANNOT_START
    return worker.exit_code()


def _bridge(station: Station, launch: Launch) -> int:
    """One bridge: jobs become rows, which the plan's workers, or others, run."""
    bridge = Bridge(station, brokers.get_broker(), conf.get("DATABASE"), served())
    obey(launch, stop=bridge.stop)
    return CLEAN if _run_beside_upkeep(station, bridge.run, "bridge") else CANNOT_START


def _run_beside_upkeep(station: Station, run: Callable[[], object], what: str) -> bool:
    """Run this with the upkeep of its queues beside it; False where it cannot start."""
    with Beside() as beside:
        beside.start(Upkeep(station, audits=conf.get("GEARMONKEY_AUDIT")), "gearmonkey-upkeep")
        try:
            run()
        except FaktoryError as error:
            logger.error("GearMonkey %s cannot start: %s", what, error)  # noqa: TRY400  (one line, its own words)
            return False
    return True
