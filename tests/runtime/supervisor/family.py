"""Run a supervisor and children without a database, as a program: `python -m tests.runtime.supervisor.family SCENE`.

Each line of its output is one event, with the pid of the process. The test that started it reads the output.
"""

import logging
import os
import select
import signal
import sys
import threading

from django_faktory.runtime.supervisor import supervisor
from django_faktory.runtime.supervisor.child import Role, install_signals
from django_faktory.runtime.supervisor.supervisor import Supervisor
from django_faktory.worker.process import CANNOT_START
from tests.gil import hold_gil


def log(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def steady(child_spec):
    """Run until the supervisor stops it."""
    stopped = threading.Event()
    install_signals(
        child_spec, stop=lambda: threading.Thread(target=stopped.set).start(), quiet=lambda: log("quiet", os.getpid())
    )
    log("started", os.getpid(), child_spec.wid, ",".join(child_spec.lost))
    stopped.wait()
    log("stopped", os.getpid())
    return 0


def deaf(child_spec):
    """Ignore the order to stop."""
    install_signals(child_spec, stop=lambda: log("ignored", os.getpid()))
    log("started", os.getpid(), child_spec.wid)
    threading.Event().wait()


def lingers(child_spec):
    """Take 0.3 s to stop."""
    stopped = threading.Event()
    install_signals(child_spec, stop=lambda: threading.Thread(target=stopped.set).start())
    log("started", os.getpid(), child_spec.wid)
    stopped.wait()
    log("lingering", os.getpid())
    threading.Event().wait(0.3)
    log("stopped", os.getpid())
    return 0


def never_ready(child_spec):
    """Hang before it handles signals."""
    log("started", os.getpid(), child_spec.wid)
    threading.Event().wait()


def crashes(child_spec):
    log("crashing", os.getpid(), child_spec.wid, ",".join(child_spec.lost))
    raise RuntimeError("a bug in the child")


def leaves(child_spec):
    """Exit with 0, without an order to stop."""
    log("started", os.getpid(), child_spec.wid, ",".join(child_spec.lost))
    return 0


def cannot_start(child_spec):
    return CANNOT_START


def holds_the_gil(child_spec):
    """Hold the GIL in a thread: no other thread of the process runs again."""
    install_signals(child_spec, stop=lambda: log("stopped", os.getpid()))
    log("started", os.getpid(), child_spec.wid, ",".join(child_spec.lost), child_spec.unresponsive)
    if len(child_spec.lost) < 3:
        threading.Thread(target=hold_gil).start()
    threading.Event().wait()


def does_nothing(child_spec):
    """Keep threads running, but do not respond."""
    install_signals(
        child_spec,
        stop=lambda: log("stopped", os.getpid()),
        responds=None if child_spec.lost else threading.Event().wait,
    )
    log("started", os.getpid(), child_spec.wid, "does-nothing", ",".join(child_spec.lost))
    if not child_spec.lost:  # the supervisor watches a child from its first heartbeat on
        os.write(child_spec.beats, child_spec.wid.encode())
    threading.Event().wait()


def sees_unresponsive(child_spec):
    """Print when a process of the family does not respond, and when all respond again."""
    install_signals(child_spec, stop=lambda: os._exit(0))
    log("started", os.getpid(), child_spec.wid)
    for word, timeout_s in (("unresponsive", None), ("recovered", 0)):
        while bool(select.select([child_spec.unresponsive_pipe], [], [], timeout_s)[0]) != (word == "unresponsive"):
            threading.Event().wait(0.01)
        log(word)
    threading.Event().wait()


def farewell(wids):
    log("farewell", *wids)


def farewell_hangs(wids):
    log("farewell", *wids)
    threading.Event().wait()


def sleep_through_term():
    """Make SIGUSR2 send SIGTERM to a thread other than the main one, which does not wake the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    def relay():
        signal.sigwait({signal.SIGUSR2})
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=relay, daemon=True).start()


SCENES = {
    "steady": {"roles": {"one": steady, "two": steady}},
    "sleeps": {"roles": {"one": steady}, "before": sleep_through_term},
    "deaf": {"roles": {"one": deaf}},
    "lingers": {"roles": {"one": lingers}, "same_order_s": 60},
    "impatient": {"roles": {"one": deaf}, "grace_s": 0.2},
    "never-ready": {"roles": {"one": never_ready}, "grace_s": 0.2},
    "hanging-farewell": {"roles": {"one": deaf}, "grace_s": 0.2, "farewell": farewell_hangs},
    "crashes": {"roles": {"one": crashes, "two": steady}},
    "leaves": {"roles": {"one": leaves}},
    "ends": {"roles": {"one": leaves, "two": steady}, "ends": {"one"}},
    "cannot-start": {"roles": {"one": steady, "two": cannot_start}},
    "holds-the-gil": {"roles": {"one": holds_the_gil, "two": steady, "three": sees_unresponsive}, "silence_s": 2},
    "does-nothing": {"roles": {"one": does_nothing, "two": sees_unresponsive}, "silence_s": 10},
    "holds-the-gil-for-ever": {"roles": {"one": holds_the_gil}, "grace_s": 1},
    "holds-the-gil-while-stopping": {"roles": {"one": holds_the_gil}, "grace_s": 10, "silence_s": 20},
    "orphan": {"roles": {"one": steady}, "parent": 1},
}


def main(scene):
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    setting = {"grace_s": 20, "farewell": farewell, "ends": set(), "same_order_s": 0} | SCENES[scene]
    supervisor.SAME_ORDER_S = setting.pop("same_order_s")
    supervisor.LONGEST_PAUSE_S = 0.05
    setting.pop("before", lambda: None)()
    ends = setting.pop("ends")
    roles = [Role(name=name, main=main, ends=name in ends) for name, main in setting.pop("roles").items()]
    handler = signal.getsignal(signal.SIGTERM)
    code = Supervisor(roles, setting.pop("farewell"), **setting).run()
    log("ended", code, signal.getsignal(signal.SIGTERM) is handler)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
