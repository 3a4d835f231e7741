"""Turns at periodic steps of maintenance: one node at a time runs a step. Source: ADR 0045."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, connections
from django.db.models import F
from django.utils import timezone

from django_faktory.models import MaintenanceTurn
from django_faktory.runtime import maintenance
from django_faktory.runtime.maintenance import WATCH, Maintenance, PeriodicStep
from django_faktory.store.maintenance import turns
from django_faktory.store.maintenance.turns import NodeTurns
from tests.factories import JobFactory
from tests.waiting import wait_until

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

USING = "default"


def node(*steps):
    added = NodeTurns(steps or ["purge"], using=USING)
    added.add()
    return added


def let_time_pass(seconds):
    MaintenanceTurn.objects.update(next_at=F("next_at") - timedelta(seconds=seconds))


def runner_of(step):
    return MaintenanceTurn.objects.get(step=step).runner


def is_watcher(loop):
    return WATCH in loop._turns.held


@pytest.fixture
def loop_of(monkeypatch):
    """Return a function that makes a node whose only periodic step is this one."""

    def make(work, every_s=60.0, **options):
        monkeypatch.setattr(Maintenance, "_all_steps", lambda self: (
            PeriodicStep("turns", maintenance.ON_DEMAND, self._add_turns, lambda found: found.turn_in_s is None),
            PeriodicStep("probe", every_s, work),
        ))  # fmt: skip
        loop = Maintenance(USING, **options)
        loop._turns.add()
        return loop

    return make


def test_of_many_nodes_at_once_one_takes_the_turn():
    nodes = [node() for _ in range(5)]
    barrier = threading.Barrier(len(nodes))

    def take(one):
        barrier.wait(30)
        try:
            return one.take("purge")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(nodes)) as threads:
        assert sorted(threads.map(take, nodes)) == [False, False, False, False, True]


def test_a_turn_is_due_again_after_the_pause():
    first, second = node(), node()
    assert first.take("purge")
    first.finish("purge", pause_s=60, took_s=0.5)
    assert (first.held, first.find_due(), second.take("purge")) == (set(), set(), False)
    let_time_pass(61)
    assert second.find_due() == {"purge"}
    assert second.find_due(overdue_s=30) == set()
    assert second.take("purge")
    row = MaintenanceTurn.objects.get()
    assert (row.took_s, row.ran_at is None) == (0.5, False)


def test_a_node_that_does_not_end_its_step_loses_the_turn_after_the_lease():
    dead, second = node(), node()
    assert dead.take("purge")
    let_time_pass(turns.LEASE_S - 10)
    assert not second.take("purge")
    let_time_pass(20)
    assert second.take("purge")
    lease_end = MaintenanceTurn.objects.get().next_at
    dead.finish("purge", pause_s=60, took_s=1)  # it was only slow
    dead.give_back()
    assert MaintenanceTurn.objects.get().next_at == lease_end
    assert not dead.take("purge")


def test_a_node_extends_its_lease_when_half_of_it_is_over(monkeypatch):
    slow, second = node(), node()
    assert slow.take("purge")
    before = MaintenanceTurn.objects.get().next_at
    assert slow.take("purge")
    assert MaintenanceTurn.objects.get().next_at == before
    let_time_pass(61)
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    assert slow.take("purge")
    assert MaintenanceTurn.objects.get().next_at > before
    let_time_pass(61)
    assert not second.take("purge")


def test_a_turn_that_another_node_took_after_the_lease_is_not_extended(monkeypatch):
    suspended, second = node(), node()
    assert suspended.take("purge")
    let_time_pass(turns.LEASE_S + 1)
    assert second.take("purge")
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + turns.LEASE_S))
    assert not suspended.take("purge")
    assert suspended.held == set()


def test_two_nodes_never_run_a_step_at_the_same_time(loop_of):
    begun, released = threading.Event(), threading.Event()
    runs = []

    def work():
        runs.append(threading.current_thread().name)
        begun.set()
        assert released.wait(60)

    first, second = loop_of(work), loop_of(work)

    def run_first():
        first._round()
        connections.close_all()

    thread = threading.Thread(target=run_first, name="first")
    thread.start()
    assert begun.wait(60)
    second._round()
    let_time_pass(maintenance.WATCH_LEASE_S + maintenance.WATCHER_FIRST_S)
    second._round()
    assert is_watcher(second), "the first node does not query while it runs a long step"
    assert runs == ["first"]
    released.set()
    thread.join(60)
    second._round()
    assert runs == ["first"]
    let_time_pass(61)
    second._round()
    assert runs == ["first", threading.current_thread().name]


def test_a_step_with_work_left_stays_with_its_node(loop_of):
    left = [True, True, False]
    runs = []
    first, second = (loop_of(lambda name=name: (runs.append(name), left.pop(0))[1]) for name in "ab")
    assert first._round() == 0
    let_time_pass(maintenance.WATCHER_FIRST_S + 1)
    second._round()
    assert first._round() == 0
    assert first._round() == maintenance.LONGEST_SLEEP_S
    assert runs == ["a", "a", "a"]
    assert MaintenanceTurn.objects.get(step="probe").ran_at


def test_a_failed_step_is_tried_again_soon(loop_of):
    def fail():
        runs.append(1)
        raise RuntimeError("a bug")

    runs = []
    loop = loop_of(fail, retry_after_s=10.0)
    loop._round()
    let_time_pass(9)
    loop._round()
    assert len(runs) == 1
    let_time_pass(2)
    loop._round()
    assert len(runs) == 2


def test_a_stopped_node_gives_its_turns_back(start_maintenance):
    first = start_maintenance()
    wait_until(lambda: is_watcher(first) and MaintenanceTurn.objects.get(step="purge").ran_at)
    second = Maintenance(USING)
    second._round()
    assert not is_watcher(second)
    first.stop()
    wait_until(lambda: not first._turns.held)
    second._round()
    assert is_watcher(second)


def test_another_node_succeeds_a_watcher_that_died():
    dead, successor = Maintenance(USING), Maintenance(USING)
    for _ in range(2):
        dead._round()
    assert (is_watcher(dead), dead._round()) == (True, maintenance.LONGEST_SLEEP_S)
    assert successor._round() == maintenance.CHECK_ALL_EVERY_S
    let_time_pass(maintenance.WATCH_LEASE_S / 2)  # not all of it: a round of a busy machine takes seconds
    successor._round()
    assert not is_watcher(successor)
    let_time_pass(maintenance.WATCH_LEASE_S / 2 + maintenance.WATCHER_FIRST_S)
    assert successor._round() == maintenance.LONGEST_SLEEP_S
    assert is_watcher(successor)


def test_deleted_rows_of_turns_are_added_again(loop_of):
    runs = []
    loop = loop_of(lambda: runs.append(1))
    loop._round()
    MaintenanceTurn.objects.all().delete()
    for _ in range(2):
        loop._round()
    assert len(runs) == 2


def test_rows_of_steps_of_another_version_cost_nothing(loop_of):
    loop = loop_of(lambda: None)
    loop._round()
    MaintenanceTurn.objects.create(step="removed", next_at=turns.LONG_AGO)
    with connection.execute_wrapper(sent := Sent()):
        loop._round()
    assert len(sent) == 1


def test_a_long_step_is_logged(loop_of, monkeypatch, caplog):
    now = [time.monotonic()]
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def work():
        now[0] += 2.5

    loop = loop_of(work)
    loop._round()
    assert "maintenance step took long step=probe seconds=2.5" in caplog.text
    assert MaintenanceTurn.objects.get(step="probe").took_s == 2.5


class Sent(list):
    """Record statements."""

    def __call__(self, execute, sql, params, many, context):
        self.append(sql)
        return execute(sql, params, many, context)


@pytest.fixture
def minute(monkeypatch):
    """Return a function that runs one minute of these nodes on one clock and returns the statements of each."""
    now = [time.monotonic()]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (maintenance, turns):
        monkeypatch.setattr(module, "time", clock)

    def live(*loops):
        until, sent = now[0] + 60, [Sent() for _ in loops]
        wake_at = [now[0]] * len(loops)
        while (earliest := min(wake_at)) < until:
            index = wake_at.index(earliest)
            let_time_pass(earliest - now[0])
            now[0] = earliest
            with connection.execute_wrapper(sent[index]):
                wake_at[index] = now[0] + loops[index]._round()
        return [len(one) for one in sent]

    return live


@pytest.mark.each_database
def test_idle_nodes_send_few_statements(minute):
    """Twenty idle nodes: 20 statements a second in all, of which listeners and BEATs of each node are 0.4."""
    JobFactory(scheduled=True, run_at=timezone.now() + timedelta(hours=1))
    JobFactory(working=True, reserved_until=timezone.now() + timedelta(hours=1), wid="")
    loops = [Maintenance(USING) for _ in range(3)]
    minute(*loops)  # the first rounds run every step
    watcher, *others = sorted(minute(*loops), reverse=True)
    assert watcher <= 180
    assert max(others) <= 22
