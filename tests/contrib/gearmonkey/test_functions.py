"""Test how an input becomes arguments, how a result becomes output, and which task serves which function."""

import subprocess
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_faktory import task
from django_faktory.contrib.gearmonkey import gearmonkey_task, registry
from django_faktory.contrib.gearmonkey.maintenance import MaintenanceLoop
from django_faktory.contrib.gearmonkey.redis_worker import SweepResult
from django_faktory.contrib.gearmonkey.registry import call_of, input_of, output_of
from django_faktory.errors import BrokerUnavailable, InvalidPayload
from django_faktory.tasks.compat import InvalidTask
from tests.project import tasks

pytestmark = pytest.mark.once

MANY = 1024 * 1024


@pytest.mark.parametrize(
    ("raw", "args", "kwargs"),
    [
        (b"", [], {}),
        (b"hello", ["hello"], {}),
        (b"42", ["42"], {}),
        (b'["a", 1, null]', ["a", 1, None], {}),
        (b' {"width": 10}', [], {"width": 10}),
        (b"[not json", ["[not json"], {}),
        ("grün".encode(), ["grün"], {}),
        (b"[]", [], {}),
        (b'[""]', [""], {}),
    ],
)
def test_an_input_is_parsed_as_arguments(raw, args, kwargs):
    assert call_of(raw, max_bytes=MANY) == (args, kwargs)


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b"\xff\xfe", "expected UTF-8, got byte 0xff at 0"), (b"x" * 11, "at most 10 bytes"), (b"[" * 10, None)],
)
def test_an_invalid_input_is_rejected_with_a_reason(raw, words):
    if words is None:
        assert call_of(raw, max_bytes=10) == ([raw.decode()], {})
        with pytest.raises(InvalidPayload, match="deep"):
            call_of(b"[" * 100_000 + b"]" * 100_000, max_bytes=MANY)
        return
    with pytest.raises(InvalidPayload, match=words):
        call_of(raw, max_bytes=10)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([], {}),
        (["hello"], {}),
        ([""], {}),
        (["[1]"], {}),
        (["[no json"], {}),
        ([1], {}),
        (["a", "b"], {}),
        ([], {"a": [1]}),
        ([[1]], {}),
        ([{"a": 1}], {}),
    ],
)
def test_arguments_survive_a_round_trip_through_an_input(args, kwargs):
    assert call_of(input_of(args, kwargs), max_bytes=MANY) == (args, kwargs)


def test_an_input_of_positional_and_keyword_arguments_is_rejected():
    with pytest.raises(TypeError, match="positional or keyword arguments, got both"):
        input_of([1], {"a": 2})


@pytest.mark.parametrize(
    ("result", "output"),
    [(None, b""), ("null", b""), ('"text"', b"text"), ("42", b"42"), ('{"a":1}', b'{"a":1}'), ('""', b"")],
)
def test_a_result_is_converted_to_an_output(result, output):
    assert output_of(result) == output


def test_a_setting_maps_a_function_to_a_task():
    with override_settings(FAKTORY={"GEARMONKEY_FUNCTIONS": {"sum": tasks.add.jobtype}}):
        assert registry.served_tasks()["sum"] == tasks.add


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"GEARMONKEY_FUNCTIONS": {"sum": "no.such.task"}}, r"GEARMONKEY_FUNCTIONS\['sum'\]: no task is registered"),
        ({"GEARMONKEY_FUNCTIONS": {"taken.twice": tasks.add.jobtype}}, "expected one task, got"),
        ({"GEARMONKEY_FUNCTIONS": {"all": "tests.contrib.gearmonkey.test_functions.whole"}}, "is atomic"),
    ],
)
def test_an_invalid_mapping_of_functions_is_rejected(settings, words):
    with override_settings(FAKTORY=settings), pytest.raises(ImproperlyConfigured, match=words):
        registry.served_tasks()


def test_an_invalid_function_name_is_rejected_when_the_task_is_defined():
    with pytest.raises(InvalidTask, match="gearmonkey: expected the name of a function"):
        task(gearmonkey="a:b")(tasks.add.func)


def test_a_remote_task_cannot_be_scheduled_by_its_priority():
    with pytest.raises(ValueError, match=r"prio: expected high, normal or low; a time is given by using"):
        gearmonkey_task("f", prio="scheduled")


WITHOUT_REDIS = """
import sys
sys.modules["redis"] = None
import django
django.setup()
from django.core.management import call_command
from django_faktory import admin
from django_faktory.contrib import gearmonkey
from django_faktory.management.commands import runfaktory
from django_faktory.runtime import roles
assert gearmonkey.OPT_BLOCKING
try:
    call_command("runfaktory", "--gearmonkey", "redis://localhost", "--no-reload")
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_without_redis_py_only_gearmonkey_is_unavailable():
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_REDIS], capture_output=True, text=True, check=False, timeout=60
    )
    assert 'redis-py is not installed: pip install "django-faktory[redis]"' in completed.stdout, completed.stderr


@task(gearmonkey="taken.twice")
def twice(): ...


@task(atomic=True)
def whole(): ...


class Swept:
    """A worker of a Redis that sweeps and audits as it is told: jobs, or an error."""

    def __init__(self, found):
        self._found = found

    def sweep(self):
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def audit(self):
        return ["f:3"]


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (SweepResult([], []), ["lost jobs queued again jobs=f:3"]),
        (
            SweepResult(["f:1"], ["f:2"]),
            [
                "jobs of workers that died are queued again jobs=f:1",
                "jobs that kill their workers are given up jobs=f:2",
                "lost jobs queued again jobs=f:3",
            ],
        ),
        (BrokerUnavailable("gone"), ["the sweep waits for the server error=gone"]),
        (RuntimeError("odd"), ["the sweep failed"]),
    ],
)
def test_a_round_of_maintenance_logs_what_it_found_and_never_raises(caplog, found, lines):
    MaintenanceLoop(Swept(found), audits=True).run_once()
    assert [record.getMessage() for record in caplog.records] == lines
