"""Test that no log, `ps`, INFO, page, error page or repr shows a secret that this package was given."""

import json
import signal
import sys

import psutil
import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.test import RequestFactory, override_settings
from django.urls import reverse
from django.views.debug import ExceptionReporter

from django_faktory import brokers, conf
from django_faktory.brokers.client import parse_url
from django_faktory.core.protocol.connection import hash_password
from django_faktory.runtime.config import make_run_config
from tests.server.raw import RawClient

pytestmark = pytest.mark.once

SECRET = "m4rk3r-0f-a-s3cr3t"
URL = f"tcp://:{SECRET}@localhost:7419"


def family(pid):
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_logs_info_and_command_lines_of_a_running_server_show_no_secret(runfaktory, address):
    program = runfaktory(
        "127.0.0.1:0", "--processes", "1", "--no-reload",
        environment={"FAKTORY_PASSWORD": SECRET}, METRICS_TOKEN=SECRET + "-token", PASSWORD="another-" + SECRET,
    )  # fmt: skip
    server = address(program)
    wrong = RawClient(server)
    asked = json.loads(wrong.reply().removeprefix(b"+HI "))
    wrong.ask("HELLO " + json.dumps({"v": 2, "pwdhash": SECRET[::-1]}))
    client = RawClient(server)
    asked = json.loads(client.reply().removeprefix(b"+HI "))
    pwdhash = hash_password(SECRET, asked["s"], asked["i"])
    assert client.ask("HELLO " + json.dumps({"v": 2, "pwdhash": pwdhash})) == b"+OK"
    info = client.ask("INFO").decode()
    program.insist(signal.SIGTTIN, "stacks of all threads")
    commands = [word for process in family(program.pid) for word in process.cmdline()]
    program.signal(signal.SIGTERM)
    assert program.code() == 0
    client.close()
    wrong.close()
    program.wait_for_log("wrong password")
    text = "\n".join([program.text, info, *commands])
    assert SECRET not in text
    assert SECRET[::-1] not in text
    assert pwdhash not in text


@pytest.mark.slow
def test_a_password_in_a_command_line_url_causes_a_warning(runfaktory):
    program = runfaktory("--worker-only", "--drain", "--url", URL.replace("7419", "1"), "--no-reload")
    program.wait_for_log("`ps` shows its password")
    assert SECRET not in program.text


@pytest.mark.slow
def test_a_public_server_without_a_password_warns_when_it_starts(runfaktory):
    program = runfaktory("0.0.0.0:0", "--server-only", "--no-reload")
    program.wait_for_log("can be reached from other machines, and there is no password")
    program.wait_for_log("server listens")


def test_the_repr_of_run_config_address_and_broker_shows_no_password():
    options = {
        "worker_only": True, "server_only": False, "address": None, "url": URL, "tls_cert": None, "tls_key": None,
        "queues": "default", "processes": "1", "concurrency": "1", "drain": False, "reload": False, "gearmonkey": None,
        "health": None, "max_jobs": None, "max_rss": None, "servers": None,
    }  # fmt: skip
    plan = make_run_config(options)
    reprs = [f"{one!r} {one}" for one in (plan, parse_url(URL), brokers.remote_broker(URL))]
    assert SECRET not in " ".join(reprs)


@pytest.mark.parametrize("is_debug", [True, False])
def test_an_error_page_hides_secret_settings(is_debug):
    override = override_settings(FAKTORY={"PASSWORD": SECRET, "METRICS_TOKEN": SECRET, "BIND": "x"}, DEBUG=is_debug)
    with override:
        try:
            conf.get("no such setting")
        except KeyError:
            reporter = ExceptionReporter(RequestFactory().get("/"), *sys.exc_info())
        page = reporter.get_traceback_html() + reporter.get_traceback_text()
    assert "METRICS_TOKEN" in page
    assert SECRET not in page


def test_an_error_report_to_admins_shows_no_url_password():
    with override_settings(DEBUG=False):
        try:
            parse_url(f"nonsense://:{SECRET}@localhost")
        except Exception:  # noqa: BLE001  (any error)
            reporter = ExceptionReporter(None, *sys.exc_info())
        parsed = [frame for frame in reporter.get_traceback_frames() if frame["function"] == "parse_url"]
    assert parsed
    assert SECRET not in str(parsed[0]["vars"])


@pytest.mark.parametrize("value", [f"/no/such/{'x' * 5}", 5, "/"])
def test_system_checks_of_invalid_password_settings_show_no_secret(value):
    with override_settings(FAKTORY={"PASSWORD": value, "METRICS_TOKEN": SECRET + " with blanks"}):
        assert SECRET not in " ".join(str(message) for message in run_checks())


@pytest.mark.parametrize("name", ["overview", "job_changelist", "queue_changelist", "workerprocess_changelist"])
def test_admin_pages_show_no_secret(client, db, name):
    client.force_login(User.objects.create_superuser("root", password="pw"))
    with override_settings(FAKTORY={"PASSWORD": SECRET, "METRICS_TOKEN": SECRET}):
        address = reverse("admin:app_list", args=["django_faktory"]) if name == "overview" else None
        page = client.get(address or reverse(f"admin:django_faktory_{name}"))
    assert page.status_code == 200
    assert SECRET not in page.content.decode()
