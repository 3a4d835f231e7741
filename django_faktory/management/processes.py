"""The processes of `runfaktory`: what each is made of. The one place where server, worker and upkeep meet.

Everything that connects is made here, after the fork.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any, NoReturn

from .. import brokers, conf, deadlines, tls, wakeups
from ..brokers import Broker
from ..errors import FaktoryError
from ..logs import get_logger
from ..maintenance import Maintenance
from ..measuring import Recorder
from ..metrics.bookkeeping import bookkeeper
from ..relay import relay
from ..server.allocator import return_large_blocks
from ..server.listener import Server
from ..store import locks
from ..store.dialects.write_queue import queue_writers
from ..worker.connections import keep_no_queries
from ..worker.forking import Forking
from ..worker.launch import Role, live, obey, wait_for_turn
from ..worker.loop_watch import LoopWatch
from ..worker.runner import Worker
from ..worker.share import Share
from ..worker.supervisor import Child, Supervisor
from ..worker.terms import CANNOT_START, CLEAN, Launch
from . import handing_over, probes
from .beside import Beside
from .losses import report_lost
from .plan import Plan

logger = get_logger(__name__)

SHORTEST_SILENCE_S = 5.0
"""A machine under load may let a process wait for a second or two; shorter silence proves nothing."""

EXIT_MARGIN_S = 4.5
"""After the time running jobs get: for the last reports, and to be gone before 30 s."""


def supervise(plan: Plan, *, parent: int | None = None, may_become_slim: bool = False) -> int:
    """Run the plan's processes until they end; returns the exit code.

    `may_become_slim`: it need not return, since nothing comes after it in this process.
    """
    neighbours = None
    if plan.alias and not wakeups.has_hints(plan.alias):
        neighbours = wakeups.Neighbours(plan.processes + 1)
        wakeups.tell_also(neighbours.ring)
    roles = _roles(plan, neighbours)
    grace_s = conf.get("SHUTDOWN_TIMEOUT") + EXIT_MARGIN_S
    silence_s = longest_silence_s(conf.get("WORKER_TIMEOUT"), conf.get("BEAT_INTERVAL"))
    then = None
    # A drain is soon over; the pipes of neighbours are known to those only that were forked.
    if may_become_slim and not plan.drain and neighbours is None and handing_over.can_start_anew():
        bounds = {"grace_s": grace_s, "silence_s": silence_s, "parent": parent}
        then = partial(handing_over.become_slim, common={"plan": asdict(plan)}, **bounds)
    ways = Forking(roles, farewell=lambda wids: broker_of(plan).bye(wids))
    children = [Child(name=role.name, ends=role.ends) for role in roles]
    return Supervisor(children, ways, grace_s=grace_s, silence_s=silence_s, parent=parent).run(then=then)


def longest_silence_s(worker_timeout_s: float, beat_interval_s: float) -> float:
    """Return how long a process may not respond before it is killed.

    It is dead before its last BEAT is `worker_timeout_s` old: then other nodes give its jobs to other workers, and no
    job runs in both.
    """
    return max(SHORTEST_SILENCE_S, worker_timeout_s - beat_interval_s)


def play(told: dict[str, Any]) -> NoReturn:
    """The part of one child, or of the farewell, in a process that a supervisor without Django started for it."""
    plan = Plan.from_json(told["plan"])
    if told["role"] is None:
        handing_over.say_farewell(told["killed"], told["news"], lambda wids: broker_of(plan).bye(wids))
    launch = handing_over.launch_of(told["launch"])
    wait_for_turn(launch)
    live(next(role for role in _roles(plan, None) if role.name == told["role"]), launch)


def _roles(plan: Plan, neighbours: wakeups.Neighbours | None) -> list[Role]:
    roles = [Role(name="server", main=partial(_serve, plan, neighbours))] if plan.serves else []
    if plan.works:
        roles += [
            Role(name=f"worker {number}", main=partial(_work, plan, number, neighbours), ends=plan.drain)
            for number in range(plan.processes)
        ]
    if plan.gearmonkey:
        from .gearmonkey_roles import roles as gearmonkey_roles  # needs redis-py

        roles += gearmonkey_roles(plan)
    return roles


def broker_of(plan: Plan) -> Broker:
    """The broker the plan's jobs are at."""
    return brokers.get_broker() if plan.alias else brokers.remote_broker(plan.url)


def _serve(plan: Plan, neighbours: wakeups.Neighbours | None, launch: Launch) -> int:
    """Server and maintenance, in one process."""
    assert plan.alias is not None  # noqa: S101  (a plan that serves has its own database)
    return_large_blocks()
    queue_writers()
    host, port = plan.address
    deadlines.leave_pools()
    keep_no_queries()
    deadlines.enforce(plan.alias, conf.get("DATABASE_TIMEOUT"))
    crier = wakeups.Crier(plan.alias)
    listen = partial(_listen, plan.alias, None, neighbours, plan.processes, is_own=crier.is_own)
    context = tls.server_context(*plan.tls) if plan.tls else None
    recorder = Recorder()
    broker = brokers.serving_broker(crier.announce, recorder)
    server = Server(broker, host=host, port=port, password=conf.password(), tls=context, listen=listen)
    maintenance = Maintenance(plan.alias, on_lost=server.drop, on_work=server.wake)
    server.on_scheduled = maintenance.expect
    locks.on_ready.append(lambda _, queues: server.wake(queues))
    obey(launch, stop=server.stop, responds=_loop_watch(server).check)
    checks = (
        probes.of_processes(launch.alarm),
        probes.of_server(server),
        probes.of_maintenance(maintenance),
        probes.of_database(plan.alias, works=plan.works),
    )
    with Beside() as beside:
        beside.start(bookkeeper(plan.alias, recorder, tells_sizes=True), "measures")
        beside.start(maintenance, "maintenance", after=server.started)
        beside.start(relay(), "outbox")
        try:
            beside.start(probes.Probes(plan.health, *checks) if plan.health else None, "probes", after=server.started)
            server.run()
        except FaktoryError as error:
            logger.error("server cannot start: %s", error)  # noqa: TRY400  (one line, its own words)
            return CANNOT_START
        crier.stop()
    return CLEAN


def _work(plan: Plan, number: int, neighbours: wakeups.Neighbours | None, launch: Launch) -> int:
    """One worker; the first of them keeps house where no server of this plan does."""
    deadlines.leave_pools()
    keep_no_queries()
    recorder = Recorder()
    keeps_house = number == 0 and not plan.serves
    if plan.alias:
        deadlines.enforce(plan.alias, conf.get("DATABASE_TIMEOUT"))
    broker = brokers.working_broker(recorder) if plan.alias else broker_of(plan)
    worker = Worker(
        broker,
        wid=launch.wid,
        queues=plan.queues,
        concurrency=plan.concurrency,
        listen=partial(_listen, plan.alias, _names(plan), neighbours, number, tells=keeps_house)
        if plan.alias
        else None,
        poll_interval=conf.get("POLL_INTERVAL"),
        at_most=conf.get("LIMITS").get("workers"),
        beat_interval=conf.get("BEAT_INTERVAL"),
        shutdown_timeout=conf.get("SHUTDOWN_TIMEOUT"),
        drain=plan.drain,
        share=Share(max_jobs=plan.max_jobs, max_rss=plan.max_rss, rng=Random()),
        hears_signals=True,
    )
    if plan.alias:
        locks.on_ready.append(lambda _, __: worker.look_again())  # a hint to oneself may be 10 ms late
    obey(launch, stop=worker.stop, quiet=worker.quiet)
    report_lost(broker, launch)
    maintenance = Maintenance(plan.alias) if plan.alias and keeps_house else None
    if maintenance and plan.drain:
        maintenance.run_once()  # what is due counts as ready
    with Beside() as beside:
        beside.start(bookkeeper(plan.alias, recorder), "measures")
        beside.start(maintenance, "maintenance")
        beside.start(relay() if keeps_house else None, "outbox")
        try:
            beside.start(_probes(plan, launch, worker, maintenance) if keeps_house else None, "probes")
            worker.run()
        except FaktoryError as error:
            logger.error("worker cannot start: %s", error)  # noqa: TRY400  (one line, its own words)
            return CANNOT_START
    return worker.exit_code()


def _probes(plan: Plan, launch: Launch, worker: Worker, maintenance: Maintenance | None) -> probes.Probes | None:
    """Those of the first worker, where there is no server to have them."""
    if plan.health is None:
        return None
    checks = [probes.of_processes(launch.alarm), probes.of_worker(worker)]
    if maintenance:
        checks.append(probes.of_maintenance(maintenance))
    if plan.alias:
        checks.append(probes.of_database(plan.alias, works=False))
    return probes.Probes(plan.health, *checks)


def _loop_watch(server: Server) -> LoopWatch:
    """The watch of the server's event loop, which runs in the main thread of its process."""
    thread = threading.main_thread().ident
    return LoopWatch("server", lambda: (server.loop, thread) if server.started.is_set() else None)


def _listen(
    alias: str,
    queues: Sequence[str] | None,
    neighbours: wakeups.Neighbours | None,
    place: int,
    *,
    is_own: Callable[[int], bool] = lambda _: False,
    tells: bool = True,
) -> wakeups.Listener:
    """The database's hints; where it has none, those of the processes beside this one."""
    if neighbours is None:
        return wakeups.listen(alias, queues, is_own=is_own, tells=tells)
    return wakeups.listen(alias, queues, otherwise=partial(neighbours.listener, place))


def _names(plan: Plan) -> list[str]:
    return [spec.partition(":")[0] for spec in plan.queues]
