"""Compose the processes of `runfaktory`: server, workers and maintenance meet only here (`supervise`).

Connections are opened after the fork only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any, NoReturn

from .. import brokers, conf
from ..brokers import Broker, tls
from ..core.histograms import Recorder
from ..core.logs import get_logger
from ..errors import FaktoryError
from ..server.allocator import return_large_blocks
from ..server.server import Server
from ..store import notifier
from ..store.dialects.write_queue import queue_writers
from ..store.locks import locks
from ..worker.db_cleanup import set_up_own_connections
from ..worker.loop_watch import LoopWatch
from ..worker.process import CANNOT_START, CLEAN
from ..worker.recycling import Share
from ..worker.worker import Worker
from . import db_watchdog, health_server
from .background_loops import Beside
from .config import Plan
from .maintenance import Maintenance
from .metrics_flusher import bookkeeper
from .outbox_relay import relay
from .supervisor import reexec
from .supervisor.child import Role, live, obey, wait_for_turn
from .supervisor.contract import Launch
from .supervisor.forking import Forking
from .supervisor.lost_workers import report_lost
from .supervisor.supervisor import Child, Supervisor

logger = get_logger(__name__)

SHORTEST_SILENCE_S = 5.0
"""Minimum of the silence that is allowed: a loaded machine may suspend a process for a second or two."""

EXIT_MARGIN_S = 4.5
"""Seconds after the time for running jobs: for the last reports, and so that all processes end within 30 s."""


ExtraRoles = Callable[[Plan], list[Role]]
"""Returns the roles of optional parts. The command passes it, so that this module imports none of them."""


def supervise(plan: Plan, extra: ExtraRoles, *, parent: int | None = None, may_become_slim: bool = False) -> int:
    """Run the plan's processes and those of optional parts until they end; return the exit code.

    With `may_become_slim` it need not return, because no code runs after it in this process.
    """
    neighbours = None
    if plan.alias and not notifier.has_hints(plan.alias):
        # Where the database sends no notifications, as MariaDB, the processes signal each other over pipes.
        neighbours = notifier.Neighbours(plan.processes + 1)
        notifier.tell_also(neighbours.ring)
    roles = _roles(plan, neighbours, extra)
    grace_s = conf.get("SHUTDOWN_TIMEOUT") + EXIT_MARGIN_S
    silence_s = longest_silence_s(conf.get("WORKER_TIMEOUT"), conf.get("BEAT_INTERVAL"))
    then = None
    # A drain is short. Pipes between neighbours are known only to forked processes, so replacements must be forked.
    if may_become_slim and not plan.drain and neighbours is None and reexec.can_start_anew():
        bounds = {"grace_s": grace_s, "silence_s": silence_s, "parent": parent}
        then = partial(reexec.become_slim, common={"plan": asdict(plan)}, **bounds)
    ways = Forking(roles, farewell=lambda wids: broker_of(plan).bye(wids))
    children = [Child(name=role.name, ends=role.ends) for role in roles]
    return Supervisor(children, ways, grace_s=grace_s, silence_s=silence_s, parent=parent).run(then=then)


def longest_silence_s(worker_timeout_s: float, beat_interval_s: float) -> float:
    """Return how long a process may not respond before it is killed.

    It is killed before its last BEAT is `worker_timeout_s` old. At that age other nodes give its jobs to other workers,
    so no job runs in both.
    """
    return max(SHORTEST_SILENCE_S, worker_timeout_s - beat_interval_s)


def play(told: dict[str, Any], extra: ExtraRoles) -> NoReturn:
    """Run the role of one child, or report killed children, as the given orders say.

    Called in a process that a supervisor without Django has started.
    """
    plan = Plan.from_json(told["plan"])
    if told["role"] is None:
        reexec.say_farewell(told["killed"], told["news"], lambda wids: broker_of(plan).bye(wids))
    launch = reexec.launch_of(told["launch"])
    wait_for_turn(launch)
    live(next(role for role in _roles(plan, None, extra) if role.name == told["role"]), launch)


def _roles(plan: Plan, neighbours: notifier.Neighbours | None, extra: ExtraRoles) -> list[Role]:
    roles = [Role(name="server", main=partial(_serve, plan, neighbours))] if plan.serves else []
    if plan.works:
        roles += [
            Role(name=f"worker {number}", main=partial(_work, plan, number, neighbours), ends=plan.drain)
            for number in range(plan.processes)
        ]
    return [*roles, *extra(plan)]


def broker_of(plan: Plan) -> Broker:
    """Return the broker that has the plan's jobs."""
    return brokers.get_broker() if plan.alias else brokers.remote_broker(plan.url)


def _serve(plan: Plan, neighbours: notifier.Neighbours | None, launch: Launch) -> int:
    """Run server and maintenance in one process; return its exit code."""
    assert plan.alias is not None  # noqa: S101  (a plan that serves has its own database)
    # glibc would keep freed blocks of large commands in the heap (`server.allocator` has the measurements).
    return_large_blocks()
    queue_writers()
    host, port = plan.address
    # Threads keep their connections from job to job: in a pool smaller than their number, some would wait endlessly.
    db_watchdog.leave_pools()
    set_up_own_connections()
    db_watchdog.enforce(plan.alias, conf.get("DATABASE_TIMEOUT"))
    crier = notifier.Crier(plan.alias)
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
        health_server.of_processes(launch.alarm),
        health_server.of_server(server),
        health_server.of_maintenance(maintenance),
        health_server.of_database(plan.alias, works=plan.works),
    )
    with Beside() as beside:
        beside.start(bookkeeper(plan.alias, recorder, tells_sizes=True), "measures")
        beside.start(maintenance, "maintenance", after=server.started)
        beside.start(relay(), "outbox")
        try:
            beside.start(
                health_server.Probes(plan.health, *checks) if plan.health else None, "probes", after=server.started
            )
            server.run()
        except FaktoryError as error:
            logger.error("server cannot start: %s", error)  # noqa: TRY400  (one line, its own words)
            return CANNOT_START
        crier.stop()
    return CLEAN


def _work(plan: Plan, number: int, neighbours: notifier.Neighbours | None, launch: Launch) -> int:
    """Run one worker; return its exit code.

    The first worker also runs maintenance, outbox and probes if no server of this plan does.
    """
    # Threads keep their connections from job to job: in a pool smaller than their number, some would wait endlessly.
    db_watchdog.leave_pools()
    set_up_own_connections()
    recorder = Recorder()
    keeps_house = number == 0 and not plan.serves
    if plan.alias:
        db_watchdog.enforce(plan.alias, conf.get("DATABASE_TIMEOUT"))
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
        # A notification from this process to itself may take 10 ms.
        locks.on_ready.append(lambda _, __: worker.look_again())
    obey(launch, stop=worker.stop, quiet=worker.quiet)
    report_lost(broker, launch)
    maintenance = Maintenance(plan.alias) if plan.alias and keeps_house else None
    if maintenance and plan.drain:
        maintenance.run_once()  # a drain must also run due jobs that are not enqueued yet
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


def _probes(plan: Plan, launch: Launch, worker: Worker, maintenance: Maintenance | None) -> health_server.Probes | None:
    """Return the probes of the first worker, if there is no server to run them; None without an address."""
    if plan.health is None:
        return None
    checks = [health_server.of_processes(launch.alarm), health_server.of_worker(worker)]
    if maintenance:
        checks.append(health_server.of_maintenance(maintenance))
    if plan.alias:
        checks.append(health_server.of_database(plan.alias, works=False))
    return health_server.Probes(plan.health, *checks)


def _loop_watch(server: Server) -> LoopWatch:
    """Return the watch of the server's event loop, which runs in the main thread of its process."""
    thread = threading.main_thread().ident
    return LoopWatch("server", lambda: (server.loop, thread) if server.started.is_set() else None)


def _listen(
    alias: str,
    queues: Sequence[str] | None,
    neighbours: notifier.Neighbours | None,
    place: int,
    *,
    is_own: Callable[[int], bool] = lambda _: False,
    tells: bool = True,
) -> notifier.Listener:
    """Return a listener for the database's notifications, or for the pipes of neighbour processes."""
    if neighbours is None:
        return notifier.listen(alias, queues, is_own=is_own, tells=tells)
    return notifier.listen(alias, queues, otherwise=partial(neighbours.listener, place))


def _names(plan: Plan) -> list[str]:
    return [spec.partition(":")[0] for spec in plan.queues]
