"""Compose the processes of `runfaktory`: only this module combines server, workers and maintenance (`supervise`).

Database connections are opened only after the fork.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from .. import brokers, conf
from ..brokers import Broker, tls
from ..core.histograms import Recorder
from ..core.logs import get_logger
from ..errors import FaktoryError
from ..server.allocator import return_large_blocks
from ..server.server import Server
from ..store import notifier, sharing
from ..store.dialects.write_queue import queue_writers
from ..store.notifier.base import ANY_QUEUE
from ..worker.db_cleanup import set_up_own_connections
from ..worker.loop_watch import LoopWatch
from ..worker.process import CANNOT_START, CLEAN
from ..worker.recycling import RecyclePolicy
from ..worker.worker import Worker
from . import db_watchdog, health_server, log_handler
from .alarm_notifier import make_alarm_notifier
from .background_loops import BackgroundLoops
from .config import RunConfig
from .maintenance import Maintenance
from .metrics_flusher import make_metrics_flusher
from .outbox_relay import make_outbox_relay
from .supervisor.child import Role, install_signals
from .supervisor.contract import ChildSpec
from .supervisor.lost_workers import report_lost
from .supervisor.supervisor import Supervisor

logger = get_logger(__name__)

SHORTEST_SILENCE_S = 5.0
"""Minimum of the allowed time without heartbeats: a loaded machine may suspend a process for a second or two."""

EXIT_MARGIN_S = 4.5
"""Seconds after SHUTDOWN_TIMEOUT for the last reports; with its default, all processes end within 30 s."""


ExtraRoles = Callable[[RunConfig], list[Role]]
"""Returns the roles of optional parts. The command passes it, so that this module imports none of them."""


def supervise(run_config: RunConfig, extra_roles: ExtraRoles, *, parent: int | None = None) -> int:
    """Run the configured processes and those of optional parts until they end; return the exit code."""
    local_pipes = None
    if run_config.alias and not notifier.has_notifications(run_config.alias):
        # Some databases, such as MariaDB, send no notifications: the processes notify each other over pipes.
        local_pipes = notifier.LocalPipes(run_config.processes + run_config.servers)
        notifier.add_local_receiver(local_pipes.wake)
    return Supervisor(
        _roles(run_config, local_pipes, extra_roles),
        unregister=lambda wids: broker_of(run_config).bye(wids),
        grace_s=conf.get("SHUTDOWN_TIMEOUT") + EXIT_MARGIN_S,
        silence_s=longest_silence_s(conf.get("WORKER_TIMEOUT"), conf.get("BEAT_INTERVAL")),
        parent=parent,
    ).run()


def longest_silence_s(worker_timeout_s: float, beat_interval_s: float) -> float:
    """Return the seconds without a heartbeat after which a process is killed.

    It is killed before its latest BEAT is `worker_timeout_s` old. At that age other nodes would give its jobs to other
    workers, and the jobs would run twice at the same time.
    """
    return max(SHORTEST_SILENCE_S, worker_timeout_s - beat_interval_s)


def _roles(run_config: RunConfig, local_pipes: notifier.LocalPipes | None, extra_roles: ExtraRoles) -> list[Role]:
    roles = []
    if run_config.serves:
        # Each server process does its own maintenance: there is no leader.
        roles += [
            Role(name=f"server {number}" if number else "server", main=partial(_serve, run_config, number, local_pipes))
            for number in range(run_config.servers)
        ]
    if run_config.works:
        roles += [
            Role(name=f"worker {number}", main=partial(_work, run_config, number, local_pipes), ends=run_config.drain)
            for number in range(run_config.processes)
        ]
    return [*roles, *extra_roles(run_config)]


def broker_of(run_config: RunConfig) -> Broker:
    """Return the configured broker."""
    return brokers.get_broker() if run_config.alias else brokers.remote_broker(run_config.url)


def _serve(run_config: RunConfig, number: int, local_pipes: notifier.LocalPipes | None, child_spec: ChildSpec) -> int:
    """Run server and maintenance in one process; return its exit code. The first server also answers probes."""
    assert run_config.alias is not None  # noqa: S101  (set if it serves)
    # glibc would keep freed blocks of large commands in the heap (`server.allocator` has the measurements).
    return_large_blocks()
    queue_writers()
    host, port = run_config.address
    _prepare_connections(run_config.alias)
    publisher = notifier.Publisher(run_config.alias)
    pipe_index = run_config.processes + number  # the pipes of the workers come first
    listen = partial(_make_listener, run_config.alias, None, local_pipes, pipe_index, is_own=publisher.is_own)
    context = tls.server_context(*run_config.tls) if run_config.tls else None
    recorder = Recorder()
    broker = brokers.serving_broker(publisher.announce, recorder)
    shares_port = run_config.servers > 1
    server = Server(
        broker, host=host, port=port, password=conf.password(), tls=context, listen=listen, shares_port=shares_port
    )
    maintenance = Maintenance(run_config.alias, on_lost=server.drop, on_work=server.wake)
    server.on_scheduled = maintenance.wake_by
    # The listener drops the notifications of its own process, so the server is woken directly.
    notifier.add_local_receiver(lambda queues: server.wake(None if ANY_QUEUE in queues else queues))
    install_signals(child_spec, stop=server.stop, responds=_make_loop_watch(server).check)
    checks = (
        health_server.check_processes(child_spec.unresponsive_pipe),
        health_server.check_server(server),
        health_server.check_maintenance(maintenance),
        health_server.check_database(run_config.alias, works=run_config.works),
    )
    with BackgroundLoops() as loops:
        loops.start(make_metrics_flusher(run_config.alias, recorder, sends_sizes=True), "measures")
        loops.start(maintenance, "maintenance", after=server.started)
        loops.start(make_outbox_relay(), "outbox")
        loops.start(make_alarm_notifier(run_config.alias), "alarms", after=server.started)
        try:
            loops.start(
                health_server.Probes(run_config.health, *checks) if run_config.health and number == 0 else None,
                "probes",
                after=server.started,
            )
            server.run()
        except FaktoryError as error:
            logger.error("server cannot start: %s", error)  # noqa: TRY400  (one line without a traceback)
            return CANNOT_START
        publisher.stop()
    return CLEAN


def _work(run_config: RunConfig, number: int, local_pipes: notifier.LocalPipes | None, child_spec: ChildSpec) -> int:
    """Run one worker; return its exit code.

    The first worker also runs maintenance, outbox, alarms and probes if no server of this command does.
    """
    _prepare_connections(run_config.alias)
    recorder = Recorder()
    runs_maintenance = number == 0 and not run_config.serves
    listen = None
    if run_config.alias:
        queues = [spec.partition(":")[0] for spec in run_config.queues]
        # One listener of a node logs the problems that all of them have.
        listen = partial(_make_listener, run_config.alias, queues, local_pipes, number, logs_problems=runs_maintenance)
    broker = brokers.working_broker(recorder) if run_config.alias else broker_of(run_config)
    worker = Worker(
        broker,
        wid=child_spec.wid,
        queues=run_config.queues,
        concurrency=run_config.concurrency,
        listen=listen,
        poll_interval=conf.get("POLL_INTERVAL"),
        queue_limits=conf.get("LIMITS").get("workers"),
        beat_interval=conf.get("BEAT_INTERVAL"),
        shutdown_timeout=conf.get("SHUTDOWN_TIMEOUT"),
        drain=run_config.drain,
        # A new generator: forked processes would draw the same numbers from copies of an inherited one.
        recycle_policy=RecyclePolicy(max_jobs=run_config.max_jobs, max_rss=run_config.max_rss, rng=Random()),
        has_signal_thread=True,
    )
    if run_config.alias:
        # At once: a notification from this process to itself may take 10 ms.
        notifier.add_local_receiver(lambda _: worker.wake())
    # Before any thread is started: a signal must find its handler.
    install_signals(child_spec, stop=worker.stop, quiet=worker.quiet)
    log_handler.start_threads()
    report_lost(broker, child_spec)
    maintenance = Maintenance(run_config.alias) if run_config.alias and runs_maintenance else None
    if maintenance and run_config.drain:
        maintenance.run_once()  # a drain must also run due jobs that are not enqueued yet
    with BackgroundLoops() as loops:
        flusher = make_metrics_flusher(run_config.alias, recorder, sends_sizes=maintenance is not None)
        loops.start(flusher, "measures")
        loops.start(maintenance, "maintenance")
        loops.start(make_outbox_relay() if runs_maintenance else None, "outbox")
        if run_config.alias and runs_maintenance:
            loops.start(make_alarm_notifier(run_config.alias), "alarms")
        try:
            loops.start(_probes(run_config, child_spec, worker, maintenance) if runs_maintenance else None, "probes")
            worker.run()
        except FaktoryError as error:
            logger.error("worker cannot start: %s", error)  # noqa: TRY400  (one line without a traceback)
            return CANNOT_START
    return worker.exit_code()


def _prepare_connections(alias: str | None) -> None:
    db_watchdog.disable_pools()
    sharing.enable()
    set_up_own_connections()
    if alias:
        db_watchdog.enforce(alias, conf.get("DATABASE_TIMEOUT"))


def _probes(
    run_config: RunConfig, child_spec: ChildSpec, worker: Worker, maintenance: Maintenance | None
) -> health_server.Probes | None:
    """Return the probes of the first worker of a command without a server; None without an address."""
    if run_config.health is None:
        return None
    checks = [health_server.check_processes(child_spec.unresponsive_pipe), health_server.check_worker(worker)]
    if maintenance:
        checks.append(health_server.check_maintenance(maintenance))
    if run_config.alias:
        checks.append(health_server.check_database(run_config.alias, works=False))
    return health_server.Probes(run_config.health, *checks)


def _make_loop_watch(server: Server) -> LoopWatch:
    """Return the watch of the server's event loop, which runs in the main thread of its process."""
    thread = threading.main_thread().ident
    return LoopWatch("server", lambda: (server.loop, thread) if server.started.is_set() else None)


def _make_listener(
    alias: str,
    queues: Sequence[str] | None,
    local_pipes: notifier.LocalPipes | None,
    pipe_index: int,
    *,
    is_own: Callable[[int], bool] = lambda _: False,
    logs_problems: bool = True,
) -> notifier.Listener:
    """Return a listener for the database's notifications, or for the pipes between this command's processes."""
    if local_pipes is None:
        return notifier.listen(alias, queues, is_own=is_own, logs_problems=logs_problems)
    return notifier.listen(alias, queues, otherwise=partial(local_pipes.listener, pipe_index))
