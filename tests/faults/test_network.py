"""Reset, silence, delay or dribble the connections to the server, and from it to the database."""

import random
import time
from contextlib import closing

import pytest

from tests.faults.proxy import Proxy
from tests.faults.size import JOBS, scaled
from tests.server.raw import RawClient, push

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 + JOBS // 5)]
MAKERS, TAKERS = 3, 5
STEP = "tests.faults.tasks.step"
HARM_S = (0.05, 0.3, 1, 3, 6)
"""Upper bounds of a fault's duration: short faults catch answers in transit, long ones cause timeouts."""
SHUTDOWN_S, STOP_WITHIN_S = 20, 30


@pytest.fixture
def proxies():
    made = []

    def start(target):
        made.append(Proxy(target))
        return made[-1]

    yield start
    for proxy in made:
        proxy.close()


def modes(at_5000=2, least=2):
    """Return all modes in random order: each `scaled(at_5000)` times, and at least `least` times."""
    often = max(least, scaled(at_5000))
    return random.sample(Proxy.MODES * often, len(Proxy.MODES) * often)


def test_faulty_connections_of_clients_lose_no_job(arena, database, proxies):
    """FI-5: the faulty connections are those of the clients."""
    run, wires = arena(database), []

    def through_wire(address):
        host, port = address.rsplit(":", 1)
        wires.append(proxies((host, int(port))))
        return wires[0].address

    run.start_node(at=through_wire)
    run.start_takers(TAKERS)
    run.start_makers(MAKERS)
    harms = modes()
    for mode in harms:
        run.await_progress("acked", max(20, JOBS // len(harms) // 2))
        wires[0].harm(mode)
        time.sleep(random.uniform(1, 6))
        wires[0].harm("")
    run.await_progress("acked", 5)
    found = run.verdict()
    assert found.lost == found.made_up == found.stuck == set()
    assert len(found.unsure) <= MAKERS * len(harms) * 4, "one for each connection that was cut or timed out"
    assert found.doubled.total() <= TAKERS * len(harms)
    assert run.all_alive()


def test_faulty_connections_to_the_database_lose_no_job(arena, cluster, proxies):
    """FI-5: the faulty connections are those of the node and the workers."""
    run = arena(cluster)
    wire = proxies(("127.0.0.1", cluster.port))
    far = cluster.address("127.0.0.1", wire.port)
    run.start_node(environment=far)
    run.start_workers(environment=far)
    run.start_takers(TAKERS, queue="a")
    run.start_makers(MAKERS, queue="a")
    run.start_makers(1, jobtype=STEP)
    run.await_progress("acked", 10)
    for mode in modes(at_5000=40, least=6):
        wire.harm(mode)
        time.sleep(random.choice(HARM_S) * random.random())
        wire.harm("")
        run.await_progress("acked", random.choice((1, 10, 40)))
    found = run.verdict()
    assert found.lost == found.made_up == found.stuck == set()
    assert run.all_alive()


def test_a_silent_database_causes_errors_and_does_not_prevent_shutdown(arena, cluster, proxies):
    """FI-5, D2: connections stay open without data. Workers try to report ended jobs for all of SHUTDOWN_TIMEOUT."""
    run = arena(cluster, SHUTDOWN_TIMEOUT=SHUTDOWN_S)
    wire = proxies(("127.0.0.1", cluster.port))
    far = cluster.address("127.0.0.1", wire.port)
    node = run.start_node(environment=far)
    pool = run.start_workers(environment=far)
    run.start_makers(2, jobtype=STEP)
    run.await_progress("end", 20)
    with closing(RawClient.identified(run.address(node), timeout_s=60)) as client:
        wire.harm("silence")
        begun = time.monotonic()
        assert client.ask(push(jid="not-heard")).startswith(b"-ERR database unavailable")
        print(f"refused after {time.monotonic() - begun:.1f} s")  # noqa: T201
    stops = [run.stop_node(node), run.stop(pool)]
    print(f"ended after {stops}")  # noqa: T201
    assert max(took for _, took in stops) <= STOP_WITHIN_S
