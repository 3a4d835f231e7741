"""Servers and programs that tests need: which are available, in which version, and how to fix a missing one.

Does not import Django: `scripts/test.py` uses it before Django is loaded. Addresses come from `tests/settings.py`.
"""

import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

NODE_FOLDER = Path(__file__).parent / "interop" / "node"
GO_FOLDER = NODE_FOLDER.parent / "go"
RUBY_FOLDER = NODE_FOLDER.parent / "ruby"
AXE_FOLDER = Path(__file__).parent / "browser" / "node" / "node_modules" / "axe-core"
TIMEOUT_S = 3
GO_BUILD_S = 120


@dataclass(frozen=True)
class Service:
    name: str
    version: str = ""
    missing: str = ""
    """Why it cannot be used, and how to fix it; empty if it can be used."""

    def __str__(self):
        return f"{self.name} {self.version}".strip()


def redis_url():
    return os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")


def sqlite():
    return Service("SQLite", sqlite3.sqlite_version)


def postgresql():
    name = "PostgreSQL"
    host, port = os.environ.get("PGHOST", "127.0.0.1"), os.environ.get("PGPORT", "5432")
    try:
        import psycopg  # an extra of the package
    except ImportError as error:
        return Service(name, missing=f"its driver is not installed ({error}); remove .venv and run make again")
    try:
        with psycopg.connect(
            host=host,
            port=port,
            user=os.environ.get("PGUSER", "postgres"),
            password=os.environ.get("PGPASSWORD", ""),
            dbname="postgres",
            connect_timeout=TIMEOUT_S,
        ) as connection:
            version = connection.info.server_version
    except psycopg.Error as error:
        reason = f"no server at {host}:{port} ({_line(error)}); start one, or set PGHOST, PGPORT, PGUSER, PGPASSWORD"
        return Service(name, missing=reason)
    return Service(name, f"{version // 10_000}.{version % 10_000}")


def mariadb():
    name = "MariaDB"
    host, port = os.environ.get("MYSQL_HOST", "127.0.0.1"), os.environ.get("MYSQL_PORT", "3306")
    try:
        import MySQLdb  # an extra of the package, compiled at installation
    except ImportError:
        reason = (
            "its driver is not installed: mysqlclient is compiled on the spot and needs the C headers; install "
            "libmariadb-dev, pkg-config and gcc, then run make again"
        )
        return Service(name, missing=reason)
    try:
        connection = MySQLdb.connect(
            host=host,
            port=int(port),
            user=os.environ.get("MYSQL_USER", "root"),
            passwd=os.environ.get("MYSQL_PASSWORD", ""),
            connect_timeout=TIMEOUT_S,
        )
    except MySQLdb.Error as error:
        reason = (
            f"no server at {host}:{port} ({_line(error)}); start one, or set MYSQL_HOST, MYSQL_PORT, MYSQL_USER, "
            "MYSQL_PASSWORD"
        )
        return Service(name, missing=reason)
    version = connection.get_server_info().partition("-")[0]
    connection.close()
    return Service(name, version)


def redis():
    name = "Redis"
    try:
        from redis import Redis, RedisError  # an extra of the package
    except ImportError as error:
        return Service(name, missing=f"its client is not installed ({error}); remove .venv and run make again")
    try:
        with Redis.from_url(redis_url(), socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S) as client:
            return Service(name, str(client.info("server")["redis_version"]))
    except (RedisError, ValueError) as error:
        address = urlsplit(redis_url())  # the URL itself may contain a password
        where = f"{address.hostname}:{address.port or 6379}"
        return Service(name, missing=f"no server at {where} ({_line(error)}); start one, or set REDIS_URL")


def redis_program():
    """Check the server program: a test that flushes, fills and restarts Redis needs one of its own."""
    name = "redis-server"
    program = shutil.which(name)
    if program is None:
        return Service(name, missing="the program is not installed; install Redis (apt install redis-server)")
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return Service(name, output.partition("v=")[2].partition(" ")[0])


def pgbouncer():
    name = "PgBouncer"
    program = pgbouncer_path()
    if program is None:
        return Service(name, missing="the program is not installed; install it (apt install pgbouncer)")
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return Service(name, output.partition("\n")[0].rpartition(" ")[2])


def pgbouncer_path():
    """Return the path of the program, or None. FAKTORY_TEST_PGBOUNCER names another one."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    return shutil.which(os.environ.get("FAKTORY_TEST_PGBOUNCER", "pgbouncer"), path=folders)


def django_pool():
    """Check the package that Django's option `pool` requires."""
    name = "psycopg_pool"
    try:
        return Service(name, version(name))
    except PackageNotFoundError:
        return Service(name, missing="not installed; remove .venv and run make again")


def node_client():
    name = "Node's faktory-worker"
    if shutil.which("node") is None:
        return Service(name, missing="node is not installed; install Node.js with npm, then run make again")
    if not (NODE_FOLDER / "node_modules" / "faktory-worker").is_dir():
        return Service(name, missing="not installed; if npm is available, run: make setup")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return Service(name, f"on node {version.strip()}")


def go_client():
    """Check that the Go programs build; Go itself downloads modules that are missing from its cache."""
    name = "Go's faktory_worker_go"
    if shutil.which("go") is None:
        return Service(name, missing="go is not installed; install Go 1.19 or newer (apt install golang-go)")
    with tempfile.TemporaryDirectory() as folder:
        try:
            build_go(GO_FOLDER, Path(folder))
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            return Service(name, missing=f"its modules cannot be built ({_line(reason)}); GOPROXY names the source")
    version = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True).stdout
    return Service(name, f"on {version.strip()}")


def build_go(source, target):
    """Build programs, each a folder of `source`, into `target`, with the module requirements of `GO_FOLDER`."""
    shutil.copytree(source, target / "source")
    shutil.copy(GO_FOLDER / "go.mod", target / "source")
    for program in sorted((target / "source").glob("*/main.go")):
        command = ["go", "build", "-o", str(target / program.parent.name), f"./{program.parent.name}"]
        environment = {"GOFLAGS": "-mod=mod", **os.environ}
        folder = target / "source"
        subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=GO_BUILD_S
        )


def ruby_client():
    name = "Ruby's faktory_worker_ruby"
    if shutil.which("ruby") is None:
        return Service(name, missing="ruby is not installed; install Ruby 2.7 or newer (apt install ruby)")
    ask = 'require "faktory_worker_ruby"; print Faktory::VERSION, " on ruby ", RUBY_VERSION'
    done = subprocess.run(["ruby", "-e", ask], capture_output=True, text=True, check=False)
    if done.returncode or shutil.which("faktory-worker") is None:
        return Service(name, missing="not installed; run: gem install faktory_worker_ruby (its programs on the PATH)")
    return Service(name, done.stdout)


def chromium():
    """Check the browser that shows pages as a person sees them; Playwright controls it."""
    name = "Chromium"
    if importlib.util.find_spec("playwright") is None:
        return Service(name, missing="Playwright is not installed; remove .venv and run make again")
    program = chromium_path()
    if program is None:
        return Service(
            name, missing="not installed; run: make setup (or install Debian's package chromium-headless-shell)"
        )
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return Service(name, next((word for word in output.split() if word[0].isdigit()), ""))


def chromium_path():
    """Return the path of an installed program, or else of one that Playwright downloaded, or None.

    The headless shell is the same browser without windows: all tests with it take half of the processor time.
    """
    fetched = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    shells = fetched.glob("chromium_headless_shell-*/chrome-*/*headless*shell")
    full = fetched.glob("chromium-*/chrome-linux*/chrome")
    return (
        shutil.which("chromium-headless-shell")
        or next(map(str, sorted(shells, reverse=True)), None)
        or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        or next(map(str, sorted(full, reverse=True)), None)
    )


def axe_core():
    """Check the script that finds problems of accessibility; it runs in the browser, npm only installs it."""
    name = "axe-core"
    try:
        return Service(name, json.loads((AXE_FOLDER / "package.json").read_text())["version"])
    except OSError:
        return Service(name, missing="not installed; if npm is available, run: make setup")


DATABASES = {"sqlite": sqlite, "postgresql": postgresql, "mariadb": mariadb}
OTHERS = (redis, redis_program, node_client, chromium, axe_core)
OPTIONAL = (go_client, ruby_client, pgbouncer)
"""Services without which their tests are skipped, even if CI=true."""


def _line(error):
    """Return the first line of a driver's error message, which may have several."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
