"""The processes of `runfaktory`: what each is made of. The one place where server, worker and upkeep meet.

Everything that connects is made here, after the fork.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from .. import brokers, conf, tls, wakeups
from ..brokers import Broker
from ..errors import FaktoryError
from ..maintenance import Maintenance
from ..relay import Relay, relay
from ..server.listener import Server
from ..worker.runner import Worker
from ..worker.supervisor import CANNOT_START, CLEAN, CRASHED, Launch, Role, Supervisor
from .plan import Plan

logger = logging.getLogger(__name__)

EXIT_MARGIN_S = 4.5
"""After the time running jobs get: for the last reports, and to be gone before 30 s."""


def supervise(plan: Plan, *, parent: int | None = None) -> int:
    """Run the plan's processes until they end; returns the exit code."""
    neighbours = None
    if plan.alias and not wakeups.has_hints(plan.alias):
        neighbours = wakeups.Neighbours(plan.processes + 1)
        wakeups.tell_also(neighbours.ring)
    roles = [Role(name="server", main=partial(_serve, plan, neighbours))] if plan.serves else []
    if plan.works:
        roles += [
            Role(name=f"worker {number}", main=partial(_work, plan, number, neighbours), ends=plan.drain)
            for number in range(plan.processes)
        ]
    return Supervisor(
        roles,
        grace_s=conf.get("SHUTDOWN_TIMEOUT") + EXIT_MARGIN_S,
        farewell=lambda wids: broker_of(plan).bye(wids),
        parent=parent,
    ).run()


def broker_of(plan: Plan) -> Broker:
    """The broker the plan's jobs are at."""
    return brokers.get_broker() if plan.alias else brokers.remote_broker(plan.url)


def _serve(plan: Plan, neighbours: wakeups.Neighbours | None, launch: Launch) -> int:
    """Server and maintenance, in one process."""
    assert plan.alias is not None  # noqa: S101  (a plan that serves has its own database)
    host, port = plan.address
    crier = wakeups.Crier(plan.alias)
    listen = partial(_listen, plan.alias, None, neighbours, plan.processes, is_own=crier.is_own)
    context = tls.server_context(*plan.tls) if plan.tls else None
    broker = brokers.serving_broker(crier.announce)
    server = Server(broker, host=host, port=port, password=conf.password(), tls=context, listen=listen)
    maintenance = Maintenance(plan.alias, on_lost=server.drop, on_work=server.wake)
    server.on_scheduled = maintenance.expect
    launch.obey(stop=server.stop)

    def keep() -> None:
        server.started.wait()
        maintenance.run()

    upkeep = threading.Thread(target=keep, name="faktory-maintenance", daemon=True)
    upkeep.start()
    handing_on = _relay()
    try:
        server.run()
    except FaktoryError as error:
        logger.error("server cannot start: %s", error)  # noqa: TRY400  (one line, its own words)
        return CANNOT_START
    crier.stop()
    maintenance.stop()
    upkeep.join(2.0)
    _stop(handing_on)
    return CLEAN


def _work(plan: Plan, number: int, neighbours: wakeups.Neighbours | None, launch: Launch) -> int:
    """One worker; the first of them keeps house where no server of this plan does."""
    broker = broker_of(plan)
    worker = Worker(
        broker,
        wid=launch.wid,
        queues=plan.queues,
        concurrency=plan.concurrency,
        listen=partial(_listen, plan.alias, _names(plan), neighbours, number) if plan.alias else None,
        poll_interval=conf.get("POLL_INTERVAL"),
        beat_interval=conf.get("BEAT_INTERVAL"),
        shutdown_timeout=conf.get("SHUTDOWN_TIMEOUT"),
        drain=plan.drain,
        hears_signals=True,
    )
    launch.obey(stop=worker.stop, quiet=worker.quiet)
    _report_lost(broker, launch)
    maintenance = Maintenance(plan.alias) if plan.alias and not plan.serves and number == 0 else None
    if maintenance and plan.drain:
        maintenance.run_once()  # what is due counts as ready
    upkeep = threading.Thread(target=maintenance.run, name="faktory-maintenance", daemon=True) if maintenance else None
    if upkeep:
        upkeep.start()
    handing_on = _relay() if number == 0 and not plan.serves else None
    try:
        worker.run()
    except FaktoryError as error:
        logger.error("worker cannot start: %s", error)  # noqa: TRY400  (one line, its own words)
        return CANNOT_START
    finally:
        if maintenance and upkeep:
            maintenance.stop()
            upkeep.join(2.0)
        _stop(handing_on)
    return CRASHED if worker.is_stuck else CLEAN  # another is to take its place, in a drain too


def _listen(
    alias: str,
    queues: Sequence[str] | None,
    neighbours: wakeups.Neighbours | None,
    place: int,
    is_own: Callable[[int], bool] = lambda _: False,
) -> wakeups.Listener:
    """The database's hints; where it has none, those of the processes beside this one."""
    if neighbours is None:
        return wakeups.listen(alias, queues, is_own=is_own)
    return wakeups.listen(alias, queues, otherwise=partial(neighbours.listener, place))


def _relay() -> tuple[Relay, threading.Thread] | None:
    """The thread that hands on the outbox, where the project has one."""
    found = relay()
    if found is None:
        return None
    thread = threading.Thread(target=found.run, name="faktory-outbox", daemon=True)
    thread.start()
    return found, thread


def _stop(handing_on: tuple[Relay, threading.Thread] | None) -> None:
    if handing_on:
        handing_on[0].stop()
        handing_on[1].join(2.0)


def _report_lost(broker: Broker, launch: Launch) -> None:
    """Say which workers before this one died: what they held goes on now, not after a minute without beats (W20)."""
    if not launch.lost:
        return
    try:
        broker.lost(launch.lost)
    except FaktoryError as error:
        logger.warning("lost workers could not be reported wids=%s error=%s", ",".join(launch.lost), error)


def _names(plan: Plan) -> list[str]:
    return [spec.partition(":")[0] for spec in plan.queues]
