"""Count the modules, functions and calls of this package that one job takes: `python -m benchmarks.traces [--list]`.

Traces an enqueue of a Django task, PUSH, FETCH and ACK over the wire, and a retry of a dead job in the admin, each on a
warm process and on PostgreSQL. Only code of `django_faktory` counts, in all threads. `--list` also prints the modules.
"""

import argparse
import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import contextmanager

from benchmarks.client import Client
from benchmarks.database import empty, prepare

WARM_UP = 12
"""Runs before a trace: a statement is prepared at its third use, and imports happen at the first."""

QUIET_S = 0.05
"""Seconds in which the threads of the server finish what they do after the reply."""


class Trace:
    """Calls of one operation, by code object. `current` is the trace that counts now, in all threads."""

    current: "Trace | None" = None

    def __init__(self):
        self.calls = Counter()

    @contextmanager
    def running(self):
        Trace.current = self
        try:
            yield
        finally:
            Trace.current = None

    def row(self, name):
        modules = {code.co_filename for code in self.calls}
        return f"| {name} | {len(modules)} | {len(self.calls)} | {sum(self.calls.values())} |"

    def modules(self):
        by_module = Counter()
        for code, calls in self.calls.items():
            by_module[code.co_filename.rpartition("django_faktory/")[2]] += calls
        return "\n".join(f"    {calls:4} {module}" for module, calls in by_module.most_common())


def count(frame, event, _):
    """Count a call: the profile function of every thread."""
    trace = Trace.current
    if trace is not None and event == "call" and "/django_faktory/" in frame.f_code.co_filename:
        trace.calls[frame.f_code] += 1


def traced(operation):
    """Run the operation until it is warm, then once more with a trace."""
    for _ in range(WARM_UP):
        operation()
    time.sleep(QUIET_S)
    trace = Trace()
    with trace.running():
        operation()
        time.sleep(QUIET_S)
    return trace


@contextmanager
def served():
    """Run a server in a thread of this process, as `runfaktory` makes it; yield its port."""
    from django_faktory.brokers.orm import OrmBroker
    from django_faktory.server.server import Server

    server = Server(OrmBroker("default", announce=lambda *_: None, announces_in_thread=True), port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    server.started.wait(10)
    try:
        yield server.address[1]
    finally:
        server.stop()
        thread.join(20)


def wire_traces():
    with served() as port:
        client = Client.worker(port, "traced")
        jids = []

        def push():
            jids.append(uuid.uuid4().hex)
            job = {"jid": jids[-1], "jobtype": "noop", "args": [], "queue": "default", "retry": 25}
            client.ask(f"PUSH {json.dumps(job)}")

        yield "PUSH", traced(push)
        yield "FETCH", traced(lambda: jids.append(json.loads(client.ask("FETCH default"))["jid"]))
        for _ in range(WARM_UP + 1):
            push()
            jids.append(json.loads(client.ask("FETCH default"))["jid"])
        yield "ACK", traced(lambda: client.ask(f"ACK {json.dumps({'jid': jids.pop()})}"))
        client.close()


def admin_trace():
    from django.contrib.auth.models import User
    from django.test import Client as Browser
    from django.test.utils import setup_test_environment
    from django.urls import reverse
    from django.utils import timezone

    from django_faktory.models import Job

    setup_test_environment()
    browser = Browser()
    browser.force_login(User.objects.get_or_create(username="traces", is_staff=True, is_superuser=True)[0])
    Job.objects.all().delete()
    dead = {"state": "dead", "enqueued_at": None, "finished_at": timezone.now(), "purge_at": timezone.now()}
    job = Job.objects.create(jid="traced-dead", jobtype="noop", queue="default", payload="{}", **dead)

    def retry():
        Job.objects.filter(pk=job.pk).update(**dead)
        answer = browser.post(
            reverse("admin:django_faktory_job_changelist"),
            {"action": "retry", "_selected_action": [job.pk], "confirmed": "yes"},
        )
        assert answer.status_code == 302, answer.status_code

    return "retry in the admin", traced(retry)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the modules of each operation, with their calls")
    options = parser.parse_args()
    threading.setprofile(count)  # for the threads of the server, which start later
    sys.setprofile(count)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.page_settings")
    prepare()
    empty()
    from benchmarks.tasks import noop

    traces = [("enqueue of a task", traced(lambda: noop.enqueue(1, 2))), *wire_traces(), admin_trace()]
    print("| operation | modules | functions | calls |\n|---|---:|---:|---:|")
    for name, trace in traces:
        print(trace.row(name))
        if options.list:
            print(trace.modules())
    empty()


if __name__ == "__main__":
    main()
