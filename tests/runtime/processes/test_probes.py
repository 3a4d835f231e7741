"""`runfaktory --health`: report the state of its loops to a process manager."""

import json
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from django_faktory.brokers.orm import OrmBroker
from django_faktory.errors import FaktoryError
from django_faktory.models import WorkerProcess
from django_faktory.runtime import health_server
from django_faktory.runtime.maintenance import Maintenance
from django_faktory.server.server import Server
from django_faktory.worker.worker import Worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def asked(address, path, method="GET", **headers):
    """Return the status code and the JSON body."""
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or "{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or "{}")


def place(program):
    line = wait_until(lambda: program.wait_for_log("probes are answered"), 60, what="a port for probes")[0]
    host, port = re.search(r"address=(\S+):(\d+)", line).groups()
    return host, int(port)


def good(*names):
    return 200, {"status": "ok", "checks": dict.fromkeys(names, "ok")}


@pytest.fixture
def answering():
    """Answer probes in a thread."""
    running = []

    def start(*checks):
        found = health_server.Probes(("127.0.0.1", 0), *checks)
        thread = threading.Thread(target=found.run)
        thread.start()
        running.append((found, thread))
        return found.address

    yield start
    for found, thread in running:
        found.stop()
        thread.join(60)
        assert not thread.is_alive()


def test_probes_of_a_node_with_a_server_list_its_checks(runfaktory):
    program = runfaktory("127.0.0.1:0", "--health", "127.0.0.1:0", "--processes", "1")
    address = place(program)
    assert asked(address, "/healthz") == good("processes", "server", "maintenance")
    wait_until(
        lambda: asked(address, "/readyz") == good("processes", "server", "maintenance", "database", "workers"), 60
    )
    assert asked(address, "/readyz", "HEAD") == (200, {})
    assert asked(address, "/metrics")[0] == 404


def test_probes_of_a_node_without_a_server_list_a_worker_check(runfaktory):
    program = runfaktory("--worker-only", "--health", "127.0.0.1:0", "--processes", "2")
    address = place(program)
    assert asked(address, "/healthz") == good("processes", "worker", "maintenance")
    wait_until(lambda: asked(address, "/readyz") == good("processes", "worker", "maintenance", "database"), 60)


def test_a_health_port_in_use_exits_with_3_and_a_one_line_error(runfaktory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        program = runfaktory("127.0.0.1:0", "--server-only", "--health", f"127.0.0.1:{taken.getsockname()[1]}")
        assert program.code(60) == 3
    assert "--health: cannot listen on 127.0.0.1" in program.text
    assert "Traceback" not in program.text


def test_a_stalled_maintenance_loop_fails_the_liveness_probe(answering):
    maintenance = Maintenance("default")
    address = answering(health_server.check_maintenance(maintenance))
    assert asked(address, "/healthz") == good("maintenance")
    maintenance._round_at -= 100
    code, body = asked(address, "/healthz")
    assert (code, body["status"]) == (503, "failing")
    assert re.match(r"its last round was 1\d\d s ago", body["checks"]["maintenance"])
    maintenance._round()
    assert asked(address, "/healthz") == good("maintenance")


def test_a_loop_with_failing_rounds_is_live_but_not_ready(answering, monkeypatch):
    maintenance = Maintenance("default")
    address = answering(health_server.check_maintenance(maintenance))
    monkeypatch.setattr(maintenance, "_enqueue_due", fail)
    maintenance._success_at -= 40
    maintenance._round()
    assert asked(address, "/healthz")[0] == 200
    assert re.match(r"it last reached the database \d+ s ago", asked(address, "/readyz")[1]["checks"]["maintenance"])
    monkeypatch.undo()
    maintenance._round()
    assert asked(address, "/readyz")[0] == 200


def fail():
    raise FaktoryError("the database is away")


def test_a_process_of_the_node_that_does_not_respond_is_reported(answering):
    alarm, ring = os.pipe()
    try:
        address = answering(health_server.check_processes(alarm))
        assert asked(address, "/healthz") == good("processes")
        os.write(ring, b"!")
        for path in ("/healthz", "/readyz", "/healthz"):  # reading the state does not change it
            assert asked(address, path)[0] == 503
        os.read(alarm, 1)
        assert asked(address, "/healthz") == good("processes")
        assert asked(answering(health_server.check_processes(-1)), "/healthz") == good("processes")
    finally:
        os.close(alarm)
        os.close(ring)


def test_a_blocked_server_event_loop_fails_the_liveness_probe(answering):
    server = Server(OrmBroker("default"), port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.started.wait(60)
    assert asked(answering(health_server.check_server(server, timeout_s=30.0)), "/healthz") == good("server")
    release = threading.Event()
    server.loop.call_soon_threadsafe(release.wait, 60)
    assert asked(answering(health_server.check_server(server, timeout_s=0.5)), "/healthz")[0] == 503
    release.set()
    server.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_worker_with_an_ended_loop_or_unanswered_heartbeats_is_reported(answering):
    worker = Worker(OrmBroker("default"), queues=["default"], beat_interval=0.5)
    address = answering(health_server.check_worker(worker))
    assert asked(address, "/healthz")[0] == 200
    assert asked(address, "/readyz")[1]["checks"] == {"worker": "its latest BEATs were not answered: read the log"}
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: asked(address, "/readyz")[0] == 200)
    wait_until(lambda: worker._is_running, what="its threads")  # the first BEAT is sent before they start
    worker._lock_renewer.stop()
    worker._loops["locks"].join(60)
    assert "these loops have ended: locks" in asked(address, "/healthz")[1]["checks"]["worker"]
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_node_that_should_have_workers_is_not_ready_without_any(answering):
    works = answering(health_server.check_database("default", works=True))
    assert asked(works, "/readyz")[0] == 503
    assert asked(answering(health_server.check_database("default", works=False)), "/readyz") == good("database")
    WorkerProcess.objects.create(wid="w1")
    assert asked(works, "/readyz") == good("database", "workers")


def test_probes_require_the_metrics_token_if_one_is_set(answering, settings):
    settings.FAKTORY = {"METRICS_TOKEN": "sesame"}
    address = answering(health_server.Checks({"x": lambda: ""}, {}))
    assert asked(address, "/healthz")[0] == 401
    assert asked(address, "/healthz", Authorization="Bearer sesam")[0] == 401
    assert asked(address, "/healthz", Authorization="Bearer sesame") == good("x")


def test_a_burst_of_silent_clients_neither_starts_a_thread_each_nor_stops_the_probes(answering):
    before = threading.active_count()
    address = answering(health_server.Checks({"it": lambda: ""}, {}))
    with ExitStack() as silent:
        for _ in range(200):
            silent.enter_context(socket.create_connection(address, timeout=60))
        assert asked(address, "/healthz") == good("it")
        assert threading.active_count() - before <= 1 + health_server.MAX_PROBES


def test_probes_above_the_limit_are_refused_while_checks_hang(answering):
    released = threading.Event()
    address = answering(health_server.Checks({"it": lambda: "" if released.wait(60) else "late"}, {}))
    answers = []

    def ask():
        try:
            answers.append(asked(address, "/healthz"))
        except OSError:  # it was the oldest that had sent nothing yet
            answers.append((503, {}))

    with ThreadPoolExecutor(3 * health_server.MAX_PROBES) as threads:
        for _ in range(3 * health_server.MAX_PROBES):
            threads.submit(ask)
        wait_until(lambda: answers)
        released.set()
    assert answers[0] == (503, {})
    assert {repr(answer) for answer in answers} == {repr((503, {})), repr(good("it"))}
