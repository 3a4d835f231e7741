"""Fixtures shared by all tests. If a server cannot be reached, its tests are skipped, or fail if CI=true."""

import gc
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from contextlib import suppress

import django
import pytest
from django.db import connections

from django_faktory.store.outages import of_this_node
from tests import emptying, examples, fork_server, services, snapshots
from tests.settings import KIND

_MARK = re.compile(r"\bmark\.(\w+)")
_VARIED = re.compile(r"\b(examples|hypothesis)\b")

gc.set_threshold(20_000, 20, 20)  # the default of 700 objects took 15 % of the time of a collection of tests
emptying.install()
examples.install()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        fork_server.end_with_parent()


def pytest_report_header():
    database = services.DATABASES[KIND]()
    label = f"{database.name}: {database.missing}" if database.missing else str(database)
    return f"on: {label}, Django {django.__version__}, Python {sys.version.split(maxsplit=1)[0]}"


def pytest_ignore_collect(collection_path, config):
    """Do not import a module if `-m` deselects all its tests: an import takes CPU time in each process."""
    expression = config.option.markexpr
    if not expression or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    of_module = _MARK.findall(text.partition("\npytestmark = ")[2].partition("\n\n")[0])
    of_tests = {*(Counter(_MARK.findall(text)) - Counter(of_module)), *(["varied"] if _VARIED.search(text) else [])}
    if of_tests & set(re.findall(r"\w+", expression)):
        return None
    with suppress(TypeError, SyntaxError):  # a mark with arguments; pytest itself reports an error
        return None if eval(expression, {}, defaultdict(bool, dict.fromkeys(of_module, True))) else True


def pytest_collection_modifyitems(items):
    """Mark tests whose number of examples depends on the run."""
    for item in items:
        has_examples = getattr(item.module, "examples", None) is examples.examples
        if has_examples or getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.varied)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Escape halves of surrogate pairs, which tests log and pytest-xdist cannot send: its process would end."""
    return _escape((yield))


def _escape(value):
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escape(one) for key, one in value.items()}
    return type(value)(map(_escape, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings):
    """Create the test databases from copies instead of migrating each."""
    for connection in connections.all():
        snapshots.install(connection)
        if "MUTANT_UNDER_TEST" in os.environ:  # mutmut forks a process for each mutant and runs several at a time
            connection.settings_dict["TEST"]["NAME"] += f".{os.getpid()}"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """End leftover sessions before PostgreSQL drops the databases: sessions of killed processes may still be open."""
    yield
    with django_db_blocker.unblock():
        for connection in connections.all():
            # If no selected test uses an alias, it was not set up: its NAME is the server's own database, which others
            # use.
            is_of_tests = connection.settings_dict["NAME"] == connection.settings_dict["TEST"]["NAME"]
            if connection.vendor == "postgresql" and is_of_tests:
                name = connection.settings_dict["NAME"]
                connection.close()
                with connection._nodb_cursor() as cursor:  # a pooler keeps sessions open, this one's too
                    cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        connections.close_all()


@pytest.fixture(autouse=True)
def _no_outage():
    """A node logs an outage once, and all tests of a process are one node."""
    of_this_node.forget()


@pytest.fixture(scope="session", autouse=True)
def known_features(django_db_blocker):
    """Find out once what SQLite supports: system checks of Django 6.1 ask for it, also in tests without a database."""
    with django_db_blocker.unblock():
        for connection in connections.all():
            if connection.vendor == "sqlite":
                assert connection.features.supports_json_field
                connection.close()


@pytest.fixture(scope="session")
def redis_url():
    """Return the URL of a Redis server that responds."""
    _require(services.redis())
    return services.redis_url()


@pytest.fixture(scope="session")
def node_folder():
    """Return the folder in which programs can `require("faktory-worker")`."""
    _require(services.node_client())
    return services.NODE_FOLDER


@pytest.fixture(scope="session")
def go_folder(tmp_path_factory):
    """Build the programs of `tests/interop/go`; return their folder."""
    _wish_for(services.go_client())
    folder = tmp_path_factory.mktemp("go")
    services.build_go(services.GO_FOLDER, folder)
    return folder


@pytest.fixture(scope="session")
def ruby_folder():
    """Return the folder with the Ruby programs; `ruby` finds faktory_worker_ruby there."""
    _wish_for(services.ruby_client())
    return services.RUBY_FOLDER


@pytest.fixture(scope="session")
def chromium_path():
    """Return the path of the Chromium program."""
    _require(services.chromium())
    return services.chromium_path()


@pytest.fixture(scope="session")
def axe_script():
    """Return the path of axe-core's script."""
    _require(services.axe_core())
    return services.AXE_FOLDER / "axe.min.js"


def _require(service):
    if service.missing:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"{service.name}: {service.missing}")


def _wish_for(service):
    if service.missing:
        pytest.skip(f"{service.name}: {service.missing}")


@pytest.fixture
def broken_app(tmp_path, monkeypatch, settings):
    """Return a function that installs an app with this text as its tasks module and returns the file."""
    folder = tmp_path / "broken_app"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def make(text):
        (folder / "tasks.py").write_text(text)
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "broken_app"]
        return folder / "tasks.py"

    yield make
    for name in [name for name in sys.modules if name.startswith("broken_app")]:
        del sys.modules[name]


@pytest.fixture
def start_maintenance(transactional_db):
    """Return a function that runs Maintenance in a thread, as nodes do; all threads are joined at the end."""
    from django_faktory.runtime.maintenance import Maintenance  # models can be imported only when the apps are ready

    started = []

    def start(**options):
        loop = Maintenance("default", **options)
        thread = threading.Thread(target=loop.run)
        thread.start()
        started.append((loop, thread))
        return loop

    yield start
    for loop, thread in started:
        loop.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def end_of_background_steps():
    """Wait for the steps of maintenance that a test's rounds have started: they use its database."""
    yield
    for thread in threading.enumerate():
        if thread.name in ("faktory-recount", "faktory-retention", "faktory-vacuum"):
            thread.join(30)
