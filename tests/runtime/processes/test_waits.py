"""Waits of jobs in real worker processes, and a sender of a signal that is killed."""

import os
import signal
import subprocess
import sys

import pytest
from django.db import connection

from django_faktory.models import Job, JobSignal
from tests.runtime.processes import tasks
from tests.runtime.processes.test_runfaktory import WORKER, reaches, state_of

pytestmark = [pytest.mark.slow, pytest.mark.once_if_quick, pytest.mark.django_db(transaction=True)]

# Hooks run in the order of their registration: the process ends right after the commit, before it wakes the job.
SENDER = """
import os, sys, signal, django
django.setup()
from django.db import transaction
from tests.runtime.processes.tasks import awaits_approval
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    awaits_approval.get_result(sys.argv[1]).signal("approved", 7)
"""


def send_and_die(jid):
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.runtime.processes.settings",
        "FAKTORY_TEST_NAME": str(connection.settings_dict["NAME"]),
        "FAKTORY_TEST_SETTINGS": "{}",
    }
    connection.close()
    sender = subprocess.run([sys.executable, "-c", SENDER, jid], env=os.environ | environment, timeout=60, check=False)
    assert sender.returncode == -signal.SIGKILL


def test_a_signal_ends_the_wait_although_its_sender_is_killed_before_it_wakes_the_job(runfaktory):
    job = tasks.awaits_approval.enqueue()
    program = runfaktory(*WORKER)
    reaches(job, "scheduled")
    send_and_die(job.id)
    assert state_of(job) in ("scheduled", "enqueued", "working", "succeeded")
    reaches(job, "succeeded")
    assert tasks.awaits_approval.get_result(job.id).return_value == 7
    assert (JobSignal.objects.count(), Job.objects.get(jid=job.id).failures) == (0, 0)
    program.wait_for_log("job waits for signal 'approved'")


def test_a_signal_reaches_a_waiting_job_of_another_process_at_once(runfaktory):
    job = tasks.awaits_approval.enqueue()
    runfaktory(*WORKER)
    reaches(job, "scheduled")
    tasks.awaits_approval.get_result(job.id).signal("approved", 8)
    assert state_of(job) != "scheduled"
    reaches(job, "succeeded")
