"""The supervisor of all processes: restarts, signals, exit codes. No database."""

import os
import re
import signal
import threading
import time

import psutil
import pytest

from tests.programs import Program
from tests.waiting import wait_until

pytestmark = pytest.mark.core


@pytest.fixture
def play():
    """Start a scene of `family.py`."""
    programs = []

    def start(scene):
        programs.append(Program("-m", "tests.runtime.supervisor.family", scene))
        return programs[-1]

    yield start
    for program in programs:
        program.clean_up()


def pids(lines):
    return [int(line.split()[1]) for line in lines]


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_term_int_hup_and_quit_stop_the_children_and_then_the_parent(play, number):
    """Check also that the signals have their former handlers afterwards."""
    program = play("steady")
    program.wait_for_log("started", times=2)
    program.signal(number)
    program.wait_for_log("stopped", times=2)
    assert program.code() == 0
    assert "ended 0 True" in program.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_whole_process_group_stops_it_gracefully(play, number):
    """A terminal sends one for Ctrl-C, when it hangs up, and for Ctrl-\\."""
    program = play("steady")
    program.wait_for_log("started", times=2)
    os.killpg(program.pid, number)
    program.wait_for_log("stopped", times=2)
    assert program.code() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(play, number):
    """`nohup` ignores HUP for its command, and a shell ignores QUIT for commands in the background."""
    signal.signal(number, signal.SIG_IGN)
    try:
        program = play("steady")
    finally:
        signal.signal(number, signal.SIG_DFL)
    program.wait_for_log("started", times=2)
    os.killpg(program.pid, number)
    program.signal(signal.SIGTSTP)
    program.wait_for_log("quiet", times=2)
    assert "stopped" not in program.text


def test_a_signal_that_does_not_wake_the_main_thread_is_still_handled(play):
    """Python handles the signal later, like one that arrives just before the thread goes to sleep."""
    program = play("sleeps")
    program.wait_for_log("started")
    program.signal(signal.SIGUSR2)
    program.wait_for_log("stopped")
    assert program.code() == 0


def test_a_signal_forwarded_twice_counts_as_one(play):
    """`timeout` passes signals on twice, and so do tools that run several programs at once."""
    program = play("lingers")
    program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    program.wait_for_log("lingering")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert program.wait_for_log("stopped")


def test_a_second_signal_ends_all_processes_immediately(play):
    program = play("deaf")
    [line] = program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    program.wait_for_log("ignored")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert f"farewell {line.split()[2]}" in program.lines


@pytest.mark.parametrize("scene", ["impatient", "never-ready"])
def test_a_child_that_misses_the_stop_deadline_is_killed_and_reported(play, scene):
    program = play(scene)
    [line] = program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert f"farewell {line.split()[2]}" in program.lines


@pytest.mark.slow
def test_a_hanging_farewell_is_ended_by_a_timeout(play):
    program = play("hanging-farewell")
    program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    program.wait_for_log("farewell")
    assert program.code(10) == 0


def test_a_killed_child_is_replaced_and_its_wid_is_passed_on(play):
    program = play("steady")
    _, pid, wid, *_ = program.wait_for_log("started", times=2)[0].split()
    os.kill(int(pid), signal.SIGKILL)
    *_, replacement = program.wait_for_log("started", times=3)
    assert replacement.split()[3] == wid
    assert replacement.split()[2] != wid
    assert "exit=SIGKILL" in program.text


def test_a_crashing_child_is_restarted_and_all_its_wids_are_passed_on(play):
    program = play("crashes")
    program.wait_for_log("a bug in the child", times=3)
    first, second, third = (line.split() for line in program.wait_for_log("crashing", times=3)[:3])
    assert third[3] == f"{first[2]},{second[2]}"


def test_a_child_that_exits_normally_is_restarted_without_a_loss(play):
    program = play("leaves")
    lines = program.wait_for_log("started", times=3)
    assert {len(line.split()) for line in lines} == {3}


def test_a_child_that_holds_the_gil_is_killed_and_replaced(play):
    program = play("holds-the-gil")
    _, pid, wid, *_ = program.wait_for_log("started", "{}")[0].split()
    [line] = program.wait_for_log("process does not respond, killed it role=one", f"pid={pid}", f"wid={wid}")
    silent_s = int(re.search(r"silent=(\d+) s", line).group(1))
    assert silent_s >= 2
    program.wait_for_log("started", f"{wid} {{'{wid}': {silent_s}}}")
    assert is_gone(int(pid))


@pytest.mark.slow
def test_an_unresponsive_child_is_visible_to_the_other_children(play):
    program = play("holds-the-gil")
    program.wait_for_log("unresponsive")
    program.wait_for_log("recovered")
    lines = [line.split()[0] for line in program.lines]
    assert lines.index("unresponsive") < lines.index("ERROR") < lines.index("recovered")


@pytest.mark.slow
def test_a_child_that_runs_but_makes_no_progress_is_replaced(play):
    program = play("does-nothing")
    wid = program.wait_for_log("started", "does-nothing")[0].split()[2]
    program.wait_for_log("process does not respond, killed it role=one")
    program.wait_for_log("started", f" {wid}")


@pytest.mark.slow
def test_a_child_suspended_by_a_signal_is_not_killed(play):
    """A suspended child cannot respond, but has no defect. The others are watched meanwhile."""
    program = play("holds-the-gil")
    suspended = next(int(line.split()[1]) for line in program.wait_for_log("started", times=3) if "{}" not in line)
    os.kill(suspended, signal.SIGSTOP)
    program.wait_for_log(
        "process does not respond, killed it role=one", times=2
    )  # the second began long after the stop
    os.kill(suspended, signal.SIGCONT)
    program.wait_for_log("process does not respond, killed it role=one", times=3)
    assert not is_gone(suspended)
    assert program.text.count("process does not respond") == 3


@pytest.mark.slow
def test_time_while_the_supervisor_is_suspended_counts_no_missed_heartbeats(play):
    """A machine that was suspended is such a case: no child could send a heartbeat."""
    program = play("does-nothing")
    program.wait_for_log("unresponsive")  # six of the nine heartbeats are missed
    os.kill(program.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED)
    threading.Event().wait(5)
    went_on_at = time.monotonic()
    os.kill(program.pid, signal.SIGCONT)
    program.wait_for_log("process does not respond, killed it role=one")
    assert time.monotonic() - went_on_at >= 1.8, "two or three more heartbeats had to be missed, one per second"


def test_a_child_that_holds_the_gil_is_killed_after_the_stop_grace(play):
    program = play("holds-the-gil-for-ever")
    [line] = program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    assert f"farewell {line.split()[2]}" in program.lines


@pytest.mark.slow
def test_an_unresponsive_child_is_killed_before_the_grace_period_ends(play):
    """Its jobs are released after the kill, and all that must happen within 30 s."""
    program = play("holds-the-gil-while-stopping")
    [line] = program.wait_for_log("started")
    program.signal(signal.SIGTERM)
    program.wait_for_log("process does not respond, killed it role=one")
    assert program.code() == 0
    assert f"farewell {line.split()[2]}" in program.lines
    assert "stopping at once" not in program.text


def test_the_remaining_children_stop_when_all_finite_ones_have_ended(play):
    program = play("ends")
    assert program.code() == 0
    assert len(program.wait_for_log("started")) == 2


def test_a_child_that_cannot_start_ends_the_supervisor_with_3(play):
    program = play("cannot-start")
    assert program.code() == 3
    assert program.wait_for_log("stopped")


def test_sigtstp_makes_the_children_quiet(play):
    program = play("steady")
    started = program.wait_for_log("started", times=2)
    program.signal(signal.SIGTSTP)
    assert sorted(pids(program.wait_for_log("quiet", times=2))) == sorted(pids(started))
    assert len(program.children()) == 2


def test_sigttin_logs_the_stacks_of_all_threads(play):
    program = play("steady")
    program.wait_for_log("started", times=2)
    program.signal(signal.SIGTTIN)
    program.wait_for_log("stacks of all threads", times=2)
    program.wait_for_log("Thread MainThread", times=2)
    program.wait_for_log("Thread faktory-watch", times=2)


def test_children_end_when_the_parent_is_killed(play):
    program = play("steady")
    started = pids(program.wait_for_log("started", times=2))
    program.signal(signal.SIGKILL)
    program.wait_for_log("the parent process is gone", times=2)
    wait_until(lambda: all(is_gone(pid) for pid in started))


def test_a_supervisor_ends_with_its_parent_process(play):
    assert play("orphan").code() == 0
