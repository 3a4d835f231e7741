"""Run the example project with its web server and runfaktory, enqueue real jobs, and show their states.

--once: end after the jobs, with a summary, and with exit code 0 only if every job ended as expected. Ctrl-C stops
everything that the script started.
"""

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import django

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 60
STOPPED_WITHIN_S = 35
ROWS = 15
COLOURS = {"succeeded": 32, "dead": 31, "retries": 33, "working": 36, "scheduled": 34}


class Expected(NamedTuple):
    """A job of the demo: what it shows, and the expected state and number of attempts."""

    jid: str
    shows: str
    state: str
    attempts: int


def main():
    parser = argparse.ArgumentParser(description="Run the example project and show the states of its jobs.")
    parser.add_argument("--once", action="store_true", help="end after the jobs, with a summary")
    parser.add_argument("--within", type=float, default=120, help="with --once: seconds the jobs have (%(default)s)")
    parser.add_argument("--web-port", type=int, default=8000, help="or the next free one (%(default)s)")
    parser.add_argument("--faktory-port", type=int, default=7419, help="or the next free one (%(default)s)")
    parser.add_argument("--logs", type=Path, default=ROOT / ".demo", help="folder for the processes' output")
    options = parser.parse_args()
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: a shell's background job ignores it
        signal.signal(request, signal.default_int_handler)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\nstopped")
        return 1 if options.once else 0


def run(options):
    web, faktory = free_port(options.web_port), free_port(options.faktory_port)
    shop = f"http://127.0.0.1:{web}"
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "example_project.settings", "SHOP_URL": shop}
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    options.logs.mkdir(exist_ok=True)
    password = secrets.token_urlsafe(9)
    print_step(f"shop    {shop}/")
    print_step(f"admin   {shop}/admin/   login: admin   password: {password}")
    print_step(f"faktory tcp://127.0.0.1:{faktory}   logs: {options.logs}/")
    manage = [sys.executable, "-u", str(ROOT / "manage.py")]
    print_step("migrating the example project's database, then starting: some seconds")
    subprocess.run([*manage, "migrate", "--verbosity=0", "--skip-checks"], cwd=ROOT, check=True)
    django.setup()
    set_admin_password(password)
    worker = [*manage, "runfaktory", f"127.0.0.1:{faktory}", "--processes=1", "--concurrency=4", "--no-reload"]
    server = [*manage, "runserver", "--noreload", f"127.0.0.1:{web}"]
    with (
        running("web", server, port=web, logs=options.logs) as check_web,
        running("runfaktory", worker, port=faktory, logs=options.logs) as check_worker,
    ):
        print_step("jobs run")
        return put_jobs_through((check_web, check_worker), once=options.once, within_s=options.within)


def put_jobs_through(checks, *, once, within_s):
    from django_faktory.models import Job  # after django.setup()

    newest = Job.objects.order_by("-pk").first()
    since_now = Job.objects.filter(pk__gt=newest.pk if newest else 0).order_by("pk")
    expected = place_orders(since_now)
    delivery = send_delivery()
    screen = Screen({job.jid: job.shows for job in expected})
    deadline = time.monotonic() + within_s
    is_note_shown = False
    while not (once and time.monotonic() > deadline):
        for check in checks:
            check()
        jobs = list(since_now.all())
        screen.show(jobs)
        if has_ended(jobs, expected) and not is_open(delivery):
            if once:
                break
            if not is_note_shown:
                screen.note = "All as expected. Order something in the shop, or look at the admin. Ctrl-C stops."
                is_note_shown = True
        time.sleep(0.2)
    jobs_code = summary(list(since_now.all()), expected)
    return batches_summary(delivery) or jobs_code


def place_orders(since_now):
    """Place an order as a customer does, and enqueue a few more tasks; return the expected outcomes."""
    from django.utils import timezone

    from example_project.shop import tasks
    from example_project.shop.orders import place_order

    order = place_order(customer="ada@example.org", item="Analytical Engine", price="1843.00")
    from_order = {job.jobtype.rpartition(".")[2]: job.jid for job in since_now.all()}
    today = timezone.localdate().isoformat()
    report = tasks.daily_report.using(run_after=timedelta(seconds=4)).enqueue(today)
    return [
        Expected(from_order["send_invoice"], "mail, in the order's transaction", "succeeded", 1),
        Expected(from_order["check_stock"], "an async task", "succeeded", 1),
        Expected(from_order["call_webhook"], "refused once, then tried again", "succeeded", 2),
        Expected(from_order["ask_for_review"], "scheduled, in a minute", "scheduled", 0),
        Expected(report.id, "scheduled, in 4 seconds", "succeeded", 1),
        Expected(tasks.charge_card.enqueue(order.pk, "4242424242424242").id, "a good card", "succeeded", 1),
        Expected(tasks.charge_card.enqueue(order.pk, "4000000000000002").id, "declined for good", "dead", 2),
    ]


def send_delivery():
    """Create three orders that are delivered together as parcels: seven batches, three levels deep."""
    from example_project.shop.models import Order
    from example_project.shop.orders import deliver

    goods = ("Analytical Engine", "Difference Engine", "Punched cards")
    orders = [Order.objects.create(customer="ada@example.org", item=item, price="100.00") for item in goods]
    return deliver(orders)


def tree_of(delivery):
    """Return the batch of a delivery and all its descendants."""
    from django_faktory.models import Batch

    found, level = [], list(Batch.objects.filter(bid=delivery.bid))
    while level:
        found += level
        level = list(Batch.objects.filter(parent_bid__in=[batch.bid for batch in level]).order_by("pk"))
    return found


def is_open(delivery):
    return any(batch.finished_at is None for batch in tree_of(delivery))


def batches_summary(delivery):
    """Print how each batch ended, a child below its parent; return the exit code."""
    tree = tree_of(delivery)
    good = [batch for batch in tree if (batch.pending, batch.success_st) == (0, "2")]
    print(f"\n{'batch':<50} {'jobs':>5} {'pending':>7}  success callback")
    texts = {"": "NO: not enqueued", "1": "NO: not finished", "2": "done"}

    def print_children(parent):
        for batch in (one for one in tree if one.parent_bid == parent):
            name = "  " * batch.depth + batch.description
            print(f"{name:<50.50} {batch.total:>5} {batch.pending:>7}  {texts[batch.success_st]}")
            print_children(batch.bid)

    print_children("")
    delivery.refresh_from_db()
    print(
        f"{len(good)} of {len(tree)} batches ended as expected, {delivery} {'left' if delivery.left_at else 'DID NOT LEAVE'}"
    )
    return 0 if len(good) == len(tree) and delivery.left_at else 1


def has_ended(jobs, expected):
    ends = {job.jid: (str(job.state), job.claims) for job in jobs}
    return all(ends.get(job.jid) == (job.state, job.attempts) for job in expected)


def summary(jobs, expected):
    """Print the outcome of each job; return the exit code."""
    found = {job.jid: job for job in jobs}
    good = 0
    print(f"\n{'task':<16} {'shows':<34} {'state':<10} {'tries':>5}  as expected")
    for job in expected:
        state, tries = (found[job.jid].state, found[job.jid].claims) if job.jid in found else ("gone", 0)
        is_right = (state, tries) == (job.state, job.attempts)
        good += is_right
        verdict = "yes" if is_right else f"NO: {job.state} after {job.attempts}"
        name = found[job.jid].jobtype.rpartition(".")[2] if job.jid in found else "?"
        print(f"{name:<16} {job.shows:<34} {state:<10} {tries:>5}  {verdict}")
    print(f"{good} of {len(expected)} jobs ended as expected")
    return 0 if good == len(expected) else 1


class Screen:
    """Shows the jobs' states: redrawn in a terminal, otherwise one line for each change."""

    def __init__(self, shows):
        self.note = ""
        self._shows = shows
        self._drawn = 0
        self._seen = {}
        self._is_terminal = sys.stdout.isatty()

    def show(self, jobs):
        if self._is_terminal:
            self._redraw(jobs[-ROWS:])
        else:
            self._print_changes(jobs)

    def _redraw(self, jobs):
        width = shutil.get_terminal_size().columns - 1
        lines = [f"{'task':<16} {'state':<10} {'tries':>5}  ", *map(self._line, jobs), "", self.note]
        shown = [self._coloured(line[:width]) for line in lines]
        up = f"\x1b[{self._drawn}A" if self._drawn else "\n"
        sys.stdout.write(up + "\x1b[J" + "\n".join(shown) + "\n")
        sys.stdout.flush()
        self._drawn = len(shown)

    def _print_changes(self, jobs):
        for job in jobs:
            if self._seen.get(job.jid) != (job.state, job.claims):
                self._seen[job.jid] = (job.state, job.claims)
                print(self._line(job), flush=True)

    def _line(self, job):
        name = job.jobtype.rpartition(".")[2]
        trouble = job.errtype.rpartition(".")[2]
        notes = " – ".join(filter(None, [self._shows.get(job.jid, ""), trouble]))
        return f"{name:<16} {job.state:<10} {job.claims:>5}  {notes}"

    @staticmethod
    def _coloured(line):
        for state, colour in COLOURS.items():
            line = line.replace(f" {state} ", f" \x1b[{colour}m{state}\x1b[0m ", 1)
        return line


@contextmanager
def running(name, command, *, port, logs):
    """Run a process with its output in a file; it is ready when it accepts connections, and stopped at the end.

    Yields a function that ends the demo if the process has ended.
    """
    path = logs / f"{name}.log"
    with path.open("w") as log:
        # A session of its own: only this script receives Ctrl-C, and then stops its processes in order.
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(name, process, port, path)
        yield lambda: check_alive(name, process, path)
    finally:
        stop(name, process)


def wait_until_ready(name, process, port, log):
    deadline = time.monotonic() + READY_WITHIN_S
    while not accepts(port):
        check_alive(name, process, log)
        if time.monotonic() > deadline:
            give_up(f"{name} did not start within {READY_WITHIN_S} s", log)
        time.sleep(0.1)


def check_alive(name, process, log):
    if process.poll() is not None:
        give_up(f"{name} ended with exit code {process.returncode}", log)


def give_up(why, log):
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    sys.exit(f"{why}; its log, {log}, ends:\n{tail}")


def stop(name, process):
    """Ask the process to end, and wait; a second Ctrl-C kills it at once."""
    process.terminate()
    try:
        process.wait(STOPPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        print_step(f"{name} did not stop within {STOPPED_WITHIN_S} s and is killed")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a process group of its own
            process.wait()


def accepts(port):
    with closing(socket.socket()) as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port(wanted):
    """Return this port, or the next free one."""
    for port in range(wanted, wanted + 100):
        with closing(socket.socket()) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    sys.exit(f"no free port from {wanted} to {wanted + 99}")


def set_admin_password(password):
    """Create the admin's login, or change its password: it is printed, so it must not stay valid."""
    from django.contrib.auth import get_user_model  # after django.setup()

    user, _ = get_user_model().objects.get_or_create(username="admin")
    user.is_staff = user.is_superuser = True
    user.set_password(password)
    user.save()


def print_step(text):
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
