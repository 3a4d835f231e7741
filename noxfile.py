"""The support matrix: each Python with each Django on SQLite, and each database and driver with the newest pair.

    nox                                   everything this machine has; the summary says what was left out, and why
    nox -s versions-3.12-6.0              one combination
    nox -t databases -- tests/management/cli -x      other tests than the default ones

Needs `pip install nox`. Each pair of Python and Django has a virtual environment of its own under .nox.
"""

import os
import subprocess
from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13")
DJANGOS = ("5.2", "6.0", "6.1")
PYTHON_OF = {"5.2": "3.11", "6.0": "3.12", "6.1": "3.12"}
"""The oldest Python of each Django that we support."""

INSTALLED = (
    "--editable",
    ".[api,cli,crypto,metrics,mysql,postgres,redis]",
    *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "dev", "docs", "example"),
)
DEPENDENT = ("tests/store", "tests/brokers", "tests/tasks", "tests/contract")
"""Folders of tests that depend on the version of Django or on the driver; `make test` runs all folders."""

SERVICES = {
    "postgresql": ("postgresql", {"FAKTORY_TEST_DB": "postgresql"}, DEPENDENT),
    "psycopg2": ("postgresql", {"FAKTORY_TEST_DB": "postgresql", "FAKTORY_TEST_DRIVER": "psycopg2"}, DEPENDENT),
    "mariadb": ("mariadb", {"FAKTORY_TEST_DB": "mariadb"}, DEPENDENT),
    "redis": ("redis_program", {"FAKTORY_TEST_DB": "sqlite"}, ("tests/contrib/gearmonkey", "tests/contrib/transfer")),
}
"""For each session: the required service of tests/services.py, the environment and the folders of tests."""

PYTHON = ("python", "-m", "tests.own_servers", "python")
"""Command prefix that starts the servers of the run first."""

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


def interpreter(version):
    """Return the path of a Python of this version, or None. Names on PATH may not work, for example those of pyenv."""
    places = [Path(folder) / f"python{version}" for folder in os.environ["PATH"].split(os.pathsep)]
    places += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    ask = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for place in filter(Path.exists, places):
        if subprocess.run([place, "-c", ask], capture_output=True, check=False).returncode == 0:
            return str(place)
    return None


def at_least(version, oldest):
    return [int(part) for part in version.split(".")] >= [int(part) for part in oldest.split(".")]


FOUND = {version: interpreter(version) for version in PYTHONS}
NEWEST = next((version for version in reversed(PYTHONS) if FOUND[version]), PYTHONS[0])
NEWEST_DJANGO = next(django for django in reversed(DJANGOS) if at_least(NEWEST, PYTHON_OF[django]))


def run_tests(session, django, environment, folders):
    """Install the package, print the versions, and run the tests."""
    session.install("--quiet", *INSTALLED, f"django=={django}.*")
    session.run("python", "-c", "import sys, django; print('Python', sys.version, 'Django', django.get_version())")
    tag = "nox_" + "".join(char if char.isalnum() else "_" for char in session.name)
    command = [*PYTHON, "-m", "pytest", "-q", "-n", "2", *(session.posargs or folders)]
    session.run(*command, env={"FAKTORY_TEST_TAG": tag[:30], **environment})


def missing(session, service):
    """Return why this service cannot be used, or an empty string."""
    ask = f"from tests import services; print(services.{service}().missing)"
    return session.run(*PYTHON, "-c", ask, silent=True).strip()


def add_versions(python, django):
    """Add a session with this Python and Django on SQLite."""

    @nox.session(name=f"versions-{python}-{django}", python=FOUND[python] or python, tags=["versions"])
    def with_versions(session):
        run_tests(session, django, {"FAKTORY_TEST_DB": "sqlite"}, DEPENDENT)


def add_service(name, service, environment, folders):
    """Add a session with a database, driver or server, and the newest Python and Django."""

    @nox.session(name=name, python=FOUND[NEWEST] or NEWEST, tags=["databases"])
    def with_service(session):
        session.install("--quiet", *INSTALLED, f"django=={NEWEST_DJANGO}.*")
        if why := missing(session, service):
            session.skip(why)
        run_tests(session, NEWEST_DJANGO, environment, folders)


for one in PYTHONS:
    for other in DJANGOS:
        if at_least(one, PYTHON_OF[other]):
            add_versions(one, other)
for one, (service, environment, folders) in SERVICES.items():
    add_service(one, service, environment, folders)
