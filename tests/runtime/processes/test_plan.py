"""Test the run configuration that results from options and settings of runfaktory."""

import os
import socket
from importlib import import_module

import pytest
from django.core.management.base import CommandError
from django.db import ConnectionHandler

from django_faktory.backend import registered_queues
from django_faktory.runtime.config import config_warnings, make_run_config
from django_faktory.tasks import base
from tests.server.raw import CERTIFICATE
from tests.settings import KIND

pytestmark = [pytest.mark.slow, pytest.mark.core]


@pytest.fixture
def plan(settings, monkeypatch):
    """Return a function that makes a plan from options and settings."""
    for name in ("FAKTORY_URL", "FAKTORY_PROVIDER"):
        monkeypatch.delenv(name, raising=False)

    def made(*, FAKTORY=None, **options):  # noqa: N803  (the setting's name)
        settings.FAKTORY = FAKTORY or {}
        nothing = dict.fromkeys(
            [
                "address",
                "queues",
                "processes",
                "concurrency",
                "servers",
                "max_jobs",
                "max_rss",
                "url",
                "gearmonkey",
                "reload",
                "tls_cert",
                "tls_key",
                "health",
            ]
        )
        flags = dict.fromkeys(["server_only", "worker_only", "drain"], False) | {"health": None}
        return make_run_config(nothing | flags | options)

    return made


def test_without_options_server_and_workers_use_the_settings(plan):
    found = plan(FAKTORY={"BIND": "127.0.0.1:7777", "CONCURRENCY": 7, "QUEUES": ["a", "b:2"]})
    assert (found.serves, found.works, found.address) == (True, True, ("127.0.0.1", 7777))
    assert (found.concurrency, found.queues, found.alias) == (7, ("a", "b:2"), "default")


def test_options_take_precedence_over_settings(plan):
    found = plan(
        FAKTORY={"BIND": "127.0.0.1:7777", "CONCURRENCY": 7, "PROCESSES": 7, "QUEUES": ["a"]},
        address="[::1]:7778",
        concurrency="8",
        processes="9",
        queues="c, d:3",
    )
    assert (found.address, found.concurrency, found.processes, found.queues) == (("::1", 7778), 8, 9, ("c", "d:3"))


@pytest.mark.skipif(KIND == "sqlite", reason="SQLite allows one writer at a time")
def test_several_servers_share_the_port(plan):
    found = plan(servers="3", address="127.0.0.1:7419", server_only=True)
    assert found.servers == 3
    assert str(found).startswith("3 servers on 127.0.0.1:7419, ")


@pytest.mark.skipif(KIND != "sqlite", reason="about SQLite")
def test_on_sqlite_there_is_one_server(plan):
    with pytest.raises(CommandError, match="--servers: expected 1 on SQLite"):
        plan(servers="2")


def test_without_shared_ports_there_is_one_server(plan, monkeypatch):
    monkeypatch.delattr(socket, "SO_REUSEPORT", raising=False)
    with pytest.raises(CommandError, match="--servers: expected 1, because processes cannot share a port"):
        plan(servers="2")


def test_process_limits_are_read_from_options_then_settings(plan):
    ours = {"MAX_JOBS": 100, "MAX_RSS": 512}
    assert [(found.max_jobs, found.max_rss) for found in (plan(), plan(FAKTORY=ours))] == [(None, None), (100, 512)]
    found = plan(FAKTORY=ours, max_jobs="7", max_rss="300")
    assert (found.max_jobs, found.max_rss) == (7, 300)


def test_without_a_setting_the_queues_default_to_those_of_the_tasks(plan):
    import_module("tests.project.tasks")
    assert {"default", "mail"} <= set(plan().queues)


def test_processes_default_to_the_cpu_count_up_to_four_and_one_on_sqlite(plan):
    assert plan().processes == (1 if KIND == "sqlite" else min(4, len(os.sched_getaffinity(0))))
    assert plan(worker_only=True, url="tcp://there:7419").processes == min(4, len(os.sched_getaffinity(0)))


def test_the_url_option_takes_precedence_over_the_environment(plan, monkeypatch):
    monkeypatch.setenv("FAKTORY_URL", "tcp://elsewhere:7419")
    found = plan(worker_only=True, url="tcp://:s3cret@there:7420")
    assert (found.alias, found.url) == (None, "tcp://:s3cret@there:7420")
    assert "there:7420" in str(found)
    assert "s3cret" not in str(found)


def test_tls_files_are_read_from_options_or_settings(plan):
    ours = {"TLS_CERT": CERTIFICATE, "TLS_KEY": CERTIFICATE}
    assert plan().tls is None
    assert plan(FAKTORY=ours).tls == (str(CERTIFICATE), str(CERTIFICATE))
    assert plan(FAKTORY=ours, tls_cert=str(CERTIFICATE)).tls == (str(CERTIFICATE), "")
    assert " with TLS, " in str(plan(FAKTORY=ours))
    assert plan(FAKTORY=ours, worker_only=True).tls is None


def test_a_remote_broker_uses_the_url_from_the_environment(plan, monkeypatch):
    monkeypatch.setenv("FAKTORY_PROVIDER", "OUR_FAKTORY")
    monkeypatch.setenv("OUR_FAKTORY", "tcp://elsewhere:7419")
    assert plan(FAKTORY={"BROKER": "remote"}, worker_only=True).url == "tcp://elsewhere:7419"


def test_faktory_url_alone_does_not_replace_the_database(plan, monkeypatch):
    monkeypatch.setenv("FAKTORY_URL", "tcp://elsewhere:7419")
    assert plan(worker_only=True).alias == "default"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "7419"}, ["HOST:PORT", "'7419'"]),
        ({"address": "localhost:http"}, ["HOST:PORT", "'localhost:http'"]),
        ({"address": "localhost:70000"}, ["HOST:PORT", "'localhost:70000'"]),
        ({"health": "7480"}, ["--health", "HOST:PORT", "'7480'"]),
        ({"processes": "0"}, ["--processes", "1 to 1024", "'0'"]),
        ({"processes": "two"}, ["--processes", "'two'"]),
        ({"concurrency": "-1"}, ["--concurrency", "'-1'"]),
        ({"concurrency": "9999"}, ["--concurrency", "1024"]),
        ({"max_jobs": "0"}, ["--max-jobs", "1 to 2147483647", "'0'"]),
        ({"max_jobs": "9" * 5000}, ["--max-jobs", "'999"]),
        ({"max_rss": "512M"}, ["--max-rss", "1 to 1048576", "'512M'"]),
        ({"servers": "0"}, ["--servers", "1 to 1024", "'0'"]),
        ({"servers": "2", "worker_only": True}, ["--servers", "--worker-only"]),
        ({"servers": "2", "address": "127.0.0.1:0"}, ["--servers", "a port", "got 0"]),
        ({"queues": "a,,b"}, ["--queues", "name:weight", "''"]),
        ({"queues": "a:x"}, ["--queues", "'a:x'"]),
        ({"queues": "a b"}, ["--queues", "a b"]),
        ({"server_only": True, "worker_only": True}, ["got both"]),
        ({"worker_only": True, "address": "h:1"}, ["--worker-only", "'h:1'"]),
        ({"url": "tcp://there:7419"}, ["--worker-only"]),
        ({"worker_only": True, "url": "http://there"}, ["--url", "tcp://", "'http'"]),
        ({"worker_only": True, "url": "tcp://:s3cret@:7419"}, ["--url", "host"]),
        ({"FAKTORY": {"BROKER": "remote"}}, ["--worker-only", '"orm"']),
        ({"worker_only": True, "url": "tcp+tls://:s3cret@there?ca=/no/such"}, ["--url", "CA", "/no/such"]),
        ({"worker_only": True, "url": "tcp://:s3cret@there?ca=/no/such"}, ["--url", "tcp+tls://"]),
        ({"worker_only": True, "tls_cert": "c"}, ["--tls-cert", "--worker-only"]),
        ({"tls_key": "k"}, ["--tls-key", "--tls-cert"]),
        ({"tls_cert": "/no/such"}, ["certificate at /no/such"]),
        ({"FAKTORY": {"TLS_CERT": "/no/such"}}, ["certificate at /no/such"]),
        ({"drain": True, "server_only": True}, ["--drain"]),
        ({"drain": True, "reload": True}, ["--drain", "--reload"]),
    ],
)
def test_an_invalid_option_is_rejected_with_a_one_line_message(plan, options, words):
    with pytest.raises(CommandError) as caught:
        plan(**options)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert "\n" not in text
    assert "s3cret" not in text
    assert caught.value.returncode == 1


def test_only_a_queue_name_similar_to_a_known_one_causes_a_warning(plan):
    assert "mail" in registered_queues()
    [doubt] = config_warnings(plan(queues="mial:3,mail,elsewhere"))
    assert doubt == "queue 'mial': no task of this project uses it; did you mean 'mail'?"
    assert list(config_warnings(plan(queues="mial", server_only=True))) == []


def test_workers_without_any_task_cause_a_warning(plan, monkeypatch):
    monkeypatch.setattr(base, "_registry", {})
    [doubt] = config_warnings(plan(queues="mail"))
    assert "no task is known" in doubt
    assert "INSTALLED_APPS" in doubt


def test_an_in_memory_database_is_rejected(plan, settings, monkeypatch):
    memory = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    monkeypatch.setattr("django_faktory.runtime.config.connections", memory)
    with pytest.raises(CommandError, match=r"DATABASES\['default'\]: expected a file, got one in memory"):
        plan()
