"""System checks: each id, its cause, and the remedy that it names."""

import re
import subprocess
import sys

import pytest
from django.core.checks import run_checks
from django.db import connection, connections
from django.test import override_settings

from django_faktory import conf
from django_faktory.checks import settings as settings_checks
from django_faktory.tasks.compat import Task, task_backends
from tests.server.raw import CERTIFICATE
from tests.settings import KIND

BACKEND = "django_faktory.backend.FaktoryBackend"
OTHERS = "django_tasks" if Task.__module__.startswith("django_tasks") else "django.tasks"

# From Django 6.1 on, the checks of models query each database for its features.
pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db(databases=["default", "other"])]


def ids(found=None):
    found = run_checks() if found is None else found
    return [message.id for message in found if message.id.startswith("django_faktory.")]


def message_of(identity):
    [message] = [message for message in run_checks() if message.id == f"django_faktory.{identity}"]
    return f"{message.msg} | {message.hint}"


@pytest.fixture
def database():
    """Return a function that changes the settings of the jobs' database, without connecting to it."""
    before = connection.settings_dict.copy(), connection.vendor

    def change(vendor, **settings):
        connection.settings_dict.update(settings)
        connection.vendor = vendor
        return connection

    yield change
    connection.settings_dict.clear()
    connection.settings_dict.update(before[0])
    del connection.vendor  # the instance's attribute, which hides the class's


def test_the_test_settings_pass_all_checks():
    assert ids() == []


def test_use_tz_false_is_an_error():
    with override_settings(USE_TZ=False):
        assert "USE_TZ: expected True" in message_of("E011")


@pytest.mark.parametrize("key", conf.SETTINGS)
def test_the_default_of_each_setting_satisfies_its_rule(key):
    assert settings_checks.is_valid(key, conf.DEFAULTS[key])


def test_an_unknown_key_is_an_error_that_suggests_the_nearest():
    with override_settings(FAKTORY={"CONCURENCY": 5}):
        assert message_of("E001") == "FAKTORY: unknown key 'CONCURENCY' | Did you mean 'CONCURRENCY'?"
    with override_settings(FAKTORY={"zzz": 5}):
        assert "Known: ALARM_EMAILS, ALARM_LATENCY, ALARM_REPEAT, ALARM_WEBHOOK, ALLOW_FLUSH, " in message_of("E001")


WRONG = {
    "BROKER": ["redis", [], "no.such.Broker", "builtins.dict"], "DATABASE": [""],
    "BIND": ["7419", ":7419", "localhost:port", "localhost:99999", 7419], "PASSWORD": [None],
    "PASSWORD_TRIES": [-1, True], "REDACT": [5, "no.such.function", "tests.project.redacting.SEEN"],
    "REFUSED_COMMANDS": [["PUSH"], "MUTATE"], "TLS_CERT": [None], "TLS_KEY": [5],
    "COMMAND_TIMEOUT": [0], "MAX_COMMAND_BYTES": [100], "MAX_CONNECTIONS": [0],
    "HELLO_TIMEOUT": ["5", float("inf")], "PROCESSES": [0], "CONCURRENCY": [True, None], "MAX_JOBS": [0, "1000"],
    "MAX_RSS": [0.5, 2**20 + 1], "QUEUES": [[], "default", ["a b"], ["a:0"], [":3"], [5]], "SHUTDOWN_TIMEOUT": [-1],
    "BEAT_INTERVAL": [0], "POLL_INTERVAL": [None], "MAX_ATTEMPTS": [0], "RESERVE_FOR": [59, 86_401],
    "RESULT_TTL": [-1], "WORKER_TIMEOUT": [0], "DEAD_TTL": ["1d"], "API_READS": ["20", "0/second"],
    "API_WRITES": ["20/fortnight", None], "BATCH_COMMIT_WITHIN": [0, None], "BATCH_TTL": [-1, "7d"],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_value_is_an_error_that_names_the_rule(key, value):
    with override_settings(FAKTORY={key: value}):
        assert message_of("E002").startswith(f"FAKTORY['{key}']: expected ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MIDDLEWARE", ["tests.project.broken_import.Tenant"]),
        ("BROKER", "tests.project.broken_import.Broker"),
        ("REDACT", "tests.project.broken_import.redact"),
    ],
)
def test_the_error_of_a_module_that_cannot_be_imported_is_not_hidden(key, value):
    with override_settings(FAKTORY={key: value}):
        assert ": ModuleNotFoundError: No module named 'no_such_package' | " in message_of("E002")


def test_valid_values_pass_the_check():
    with override_settings(FAKTORY={"BIND": "[::1]:0", "MAX_RSS": None, "QUEUES": ["a:3", "b"], "BEAT_INTERVAL": 0.5}):
        assert ids() == []


def test_an_invalid_password_setting_is_never_shown():
    with override_settings(FAKTORY={"PASSWORD": ["hunter2"]}):
        assert "hunter2" not in message_of("E002")


def test_the_faktory_setting_must_be_a_dict():
    with override_settings(FAKTORY=["CONCURRENCY"]):
        assert message_of("E007").startswith("FAKTORY: expected a dict, got list")
        assert ids() == ["django_faktory.E007"]


def test_an_unknown_database_is_an_error_that_names_the_known_ones():
    with override_settings(FAKTORY={"DATABASE": "jobs"}):
        assert "'jobs'; known: 'default'" in message_of("E003")
    with override_settings(FAKTORY={"DATABASE": "jobs", "BROKER": "remote"}):
        assert ids() == ["django_faktory.W040"]  # the shop's nightly report would never be enqueued


def test_a_password_file_that_cannot_be_read_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKTORY_PASSWORD", str(tmp_path / "missing"))
    assert f"FAKTORY_PASSWORD: expected a readable file with the password at {tmp_path}/missing" in message_of("E004")
    (tmp_path / "missing").write_text("secret\n")
    assert ids() == []
    assert conf.password() == "secret"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"\r\n\n", "an empty file"),
        (b"s\xffcret", "text that is not UTF-8"),
        (None, "Is a directory"),
    ],
)
def test_an_unusable_password_file_is_an_error(tmp_path, monkeypatch, content, words):
    monkeypatch.delenv("FAKTORY_PASSWORD", raising=False)
    path = tmp_path / "password"
    path.mkdir() if content is None else path.write_bytes(content)
    with override_settings(FAKTORY={"PASSWORD": str(path)}):
        message = message_of("E004")
    assert message.startswith(f"FAKTORY['PASSWORD']: expected a readable file with the password at {path}, got: ")
    assert words in message
    assert "cret" not in message


@pytest.mark.parametrize(
    ("content", "password"),
    [("plain", "plain"), ("dos\r\n", "dos"), (" spaces stay \n", " spaces stay "), ("é😀\n", "é😀")],
)
def test_a_password_file_is_read_without_its_line_end(tmp_path, monkeypatch, content, password):
    path = tmp_path / "password"
    path.write_bytes(content.encode())
    monkeypatch.setenv("FAKTORY_PASSWORD", str(path))
    assert conf.password() == password


def test_the_environment_password_overrides_the_setting(monkeypatch):
    with override_settings(FAKTORY={"PASSWORD": "setting"}):
        monkeypatch.setenv("FAKTORY_PASSWORD", "")
        assert conf.password() == "setting"
        monkeypatch.setenv("FAKTORY_PASSWORD", "environment")
        assert conf.password() == "environment"


def test_a_certificate_that_cannot_be_used_is_an_error(tmp_path):
    with override_settings(FAKTORY={"TLS_CERT": tmp_path / "missing"}):
        assert f"a certificate at {tmp_path}/missing, got: No such file" in message_of("E012")
    with override_settings(FAKTORY={"TLS_KEY": str(CERTIFICATE)}):
        assert message_of("E012").startswith("FAKTORY['TLS_KEY']: expected TLS_CERT with it, got none | PEM file with")
    with override_settings(FAKTORY={"TLS_CERT": CERTIFICATE, "TLS_KEY": str(CERTIFICATE)}):
        assert ids() == []


@pytest.mark.parametrize(
    ("value", "reason"), [("tcp://localhost:7419", "set FAKTORY_URL instead"), ("NO_SUCH_VARIABLE", "which is not set")]
)
def test_faktory_provider_must_name_a_variable_that_holds_a_url(monkeypatch, value, reason):
    monkeypatch.setenv("FAKTORY_PROVIDER", value)
    assert reason in message_of("E005")


def test_a_faktory_provider_that_names_a_url_variable_passes(monkeypatch):
    monkeypatch.setenv("FAKTORY_PROVIDER", "MY_FAKTORY")
    monkeypatch.setenv("MY_FAKTORY", "tcp://localhost:7419")
    assert ids() == []


def test_a_heartbeat_interval_too_long_for_worker_timeout_is_a_warning():
    with override_settings(FAKTORY={"BEAT_INTERVAL": 40, "WORKER_TIMEOUT": 60}):
        assert "at least twice BEAT_INTERVAL" in message_of("W004")


@pytest.mark.parametrize(
    "entry",
    [
        {"BACKEND": f"{OTHERS}.backends.dummy.DummyBackend"},
        {"BACKEND": "no.such.Backend"},
        {"BACKEND": "builtins.len"},
        {},
    ],
)
def test_a_tasks_setting_without_the_faktory_backend_is_a_warning(entry):
    with override_settings(TASKS={"default": entry}):
        assert ids(settings_checks.check_tasks_setting()) == ["django_faktory.W001"]


def test_a_queue_name_the_protocol_cannot_carry_is_an_error():
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": ["fine", "not fine", "", 5]}}):
        assert ids() == ["django_faktory.E008"] * 3


def test_options_of_the_backend_are_an_error():
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"CONCURRENCY": 5}}}):
        assert message_of("E009").startswith("TASKS['default']: OPTIONS: expected none, got 'CONCURRENCY'")


WITHOUT_THE_APP = """
import django
from django.conf import settings

settings.configure(TASKS={"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}})
django.setup()
from django.core.checks import run_checks
from django_faktory.tasks.compat import task_backends

task_backends["default"]  # as the import of any task does
print([message.id for message in run_checks()])
"""


def test_a_project_that_has_not_installed_the_app_is_checked_once_a_task_is_imported():
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_APP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['django_faktory.E010']"


def test_the_backend_without_the_app_is_an_error(settings):
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "django_faktory"]
    assert ids(task_backends["default"].check()) == ["django_faktory.E010"]
    settings.FAKTORY = {"BROKER": "remote"}
    assert ids(task_backends["default"].check()) == []


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, ["transaction_mode", "init_command", "timeout"]),
        ({"transaction_mode": "DEFERRED", "timeout": 5}, ["transaction_mode", "init_command", "timeout"]),
        ({"transaction_mode": "immediate", "timeout": 20}, ["init_command"]),
        ({"init_command": "PRAGMA journal_mode = wal", "transaction_mode": "EXCLUSIVE"}, ["timeout"]),
        ({"init_command": "PRAGMA journal_mode=WAL", "timeout": "20"}, ["transaction_mode", "timeout"]),
    ],
)
def test_sqlite_without_the_options_that_workers_need_is_a_warning(database, options, missing):
    database("sqlite", NAME="/srv/jobs.sqlite3", OPTIONS=options)
    found = message_of("W002")
    assert [
        name for name in ("transaction_mode", "init_command", "timeout") if f"{name}: " in found.split("|")[0]
    ] == missing


def test_the_suggested_sqlite_options_pass_the_check(database):
    database("sqlite", NAME="/srv/jobs.sqlite3", OPTIONS={})
    hint = message_of("W002").split(" | ")[1]
    pasted = eval(f"{{{hint}}}")
    database("sqlite", NAME="/srv/jobs.sqlite3", **pasted)
    assert ids() == []


def test_sqlite_in_memory_gives_no_warning(database):
    database("sqlite", NAME=":memory:", OPTIONS={})
    assert ids() == []


@pytest.mark.parametrize("level", [None, "repeatable read"])
def test_mysql_isolation_levels_with_gap_locks_are_a_warning(database, level):
    database("mysql", OPTIONS={"isolation_level": level})
    assert "isolation_level" in message_of("W003")


def test_mysql_with_djangos_default_isolation_level_passes(database):
    database("mysql", OPTIONS={})
    assert ids() == []
    database("mysql", OPTIONS={"isolation_level": "READ COMMITTED"})
    assert ids() == []


def test_serializable_transactions_on_mysql_are_an_error(database):
    database("mysql", OPTIONS={"isolation_level": "serializable"})
    assert ids() == ["django_faktory.E016"]
    assert '"isolation_level": "read committed"' in message_of("E016")


@pytest.mark.skipif(KIND != "postgresql", reason="needs a driver of PostgreSQL")
@pytest.mark.parametrize(("level", "name"), [("REPEATABLE_READ", "repeatable read"), ("SERIALIZABLE", "serializable")])
def test_isolation_levels_of_postgresql_above_read_committed_are_an_error(database, level, name):
    from django.db.backends.postgresql.psycopg_any import IsolationLevel  # needs a driver

    database("postgresql", OPTIONS={"isolation_level": IsolationLevel[level]})
    assert ids() == ["django_faktory.E016"]
    assert f"expected read committed, got {name}" in message_of("E016")
    database("postgresql", OPTIONS={"isolation_level": IsolationLevel.READ_COMMITTED})
    assert ids() == []


@pytest.mark.skipif(KIND == "sqlite", reason="SQLite has no isolation levels")
@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_the_server_isolation_level_is_checked_only_if_the_database_is_named(level):
    if connection.vendor == "mysql" and level != "serializable":
        pytest.skip("a warning of its own, W003")
    sql = {
        "postgresql": f"SET default_transaction_isolation = '{level}'",
        "mysql": f"SET SESSION TRANSACTION ISOLATION LEVEL {level}",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(sql)
    try:
        [message] = settings_checks.check_isolation(databases=["default"])
    finally:
        with connection.cursor() as cursor:
            cursor.execute(sql.replace(level, "read committed"))
    assert message.id == "django_faktory.E016"
    assert f"expected read committed, got {level}" in message.msg.lower().replace("-", " ")
    assert re.search(r"read\W+committed", message.hint)
    assert settings_checks.check_isolation(databases=["default"]) == []
    assert settings_checks.check_isolation(databases=None) == []


def test_a_database_without_autocommit_is_an_error(database):
    database(connection.vendor, AUTOCOMMIT=False)
    assert ids() == ["django_faktory.E017"]
    assert "expected True, got False" in message_of("E017")
    with override_settings(FAKTORY={"DATABASE": "other", "OUTBOX": ["default"]}):
        assert "DATABASES['default']: AUTOCOMMIT" in message_of("E017")
    with override_settings(FAKTORY={"DATABASE": "other"}):
        assert "DATABASES['default']: AUTOCOMMIT" in message_of("E017")  # the outbox is enabled by default
    with override_settings(FAKTORY={"DATABASE": "other", "OUTBOX": []}):
        assert ids() == []


def test_a_remote_broker_skips_the_database_checks(database):
    database("sqlite", NAME="/srv/jobs.sqlite3", OPTIONS={})
    with override_settings(FAKTORY={"BROKER": "remote"}):
        assert ids() == ["django_faktory.W040"]  # the shop's nightly report would never be enqueued


def test_the_test_database_version_passes_the_check():
    assert ids(run_checks(databases=["default"])) == []


def test_a_database_too_old_is_an_error(monkeypatch):
    name = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor
    monkeypatch.setitem(settings_checks.OLDEST, name, (999,))
    [message] = settings_checks.check_database_version(databases=["default"])
    assert message.id == "django_faktory.E006"
    assert "jobs need 999 or newer" in message.msg
    assert connection.display_name in message.msg


@pytest.mark.skipif(KIND != "mariadb", reason="only MariaDB's backend may be connected to MySQL")
def test_mysql_is_an_error(monkeypatch):
    monkeypatch.setitem(connections["default"].__dict__, "mysql_is_mariadb", False)
    [message] = settings_checks.check_database_version(databases=["default"])
    assert (message.id, "jobs need MariaDB" in message.msg) == ("django_faktory.E006", True)


def test_no_database_is_queried_unless_django_names_it():
    assert settings_checks.check_database_version(databases=None) == []
    assert settings_checks.check_database_version(databases=["other"]) == []
    assert "default" in connections
