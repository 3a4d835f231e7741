"""PostgreSQL, MariaDB and Redis of one test run: on free ports of the loopback, in a temporary folder.

`python -m tests.own_servers COMMAND …` runs a command with them, `pytest -p tests.own_servers` the tests.
A guard process starts the servers and ends them when its standard input closes, so a killed run leaves none behind.
An address in the environment (PGHOST, MYSQL_HOST, REDIS_URL) wins over a server of the run's own.
Standard library only, no Django.
"""

import contextlib
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / ".demo" / "servers"
"""Data directories created by the servers' own programs, kept for later runs."""

START_S = 120
STOP_S = 30
ATTEMPTS = 5
"""Another process may take a free port before the server binds it."""

READY = re.compile(rb"ready (to accept|for) connections", re.IGNORECASE)
CONNECTIONS = 500


class Server:
    """A server program with its data, which is lost at the end: nothing is flushed to disk."""

    name = ""
    variables: tuple[str, ...] = ()
    """If one of these is in the environment, the tests use that server."""
    system_user = ""
    """User that runs the server if we are root."""
    goodbye = signal.SIGKILL

    def __init__(self, folder):
        self.folder = folder / self.name
        self.data = self.folder / "data"
        self.port = 0
        self._process = None

    @classmethod
    def is_wanted(cls):
        return not any(name in os.environ for name in cls.variables)

    @classmethod
    def is_installed(cls):
        return all(cls.programs()) and not (_is_root() and cls.system_user and not _has_user(cls.system_user))

    @classmethod
    def programs(cls):
        """Return the paths of the programs that the server needs; None for a missing one."""
        raise NotImplementedError

    def initialize(self):
        """Return the command that fills an empty data directory; an empty list if the server needs none."""
        return []

    def command(self):
        """Return the command that runs the server in the foreground."""
        raise NotImplementedError

    def environment(self):
        """Return the environment variables with the server's address."""
        raise NotImplementedError

    def prepare(self):
        """Create the folder and the data directory, from the template if there is one."""
        self.folder.mkdir(mode=0o700)
        command = self.initialize()
        template = TEMPLATES / f"{self.name}-{self._key(command)}"
        if command and template.is_dir():
            shutil.copytree(template, self.data, symlinks=True)
        else:
            self.data.mkdir(mode=0o700)
        self._own()
        if command and not template.is_dir():
            self._run(command)
            _keep(self.data, template)

    def _key(self, command):
        versions = [
            subprocess.run([path, "--version"], capture_output=True, check=True).stdout for path in self.programs()
        ]
        words = " ".join(map(str, command)).replace(str(self.folder), "")
        return hashlib.sha256(b"".join(versions) + words.encode()).hexdigest()[:12]

    def _own(self):
        if _is_root() and self.system_user:
            for path in (self.folder, *self.folder.rglob("*")):
                shutil.chown(path, self.system_user, _group(self.system_user))

    def _run(self, command):
        done = subprocess.run(command, **self._options(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-500:]} {done.stderr[-1000:]}")

    def _options(self):
        """Return the user, folder and environment of its processes."""
        as_user = {}
        if _is_root() and self.system_user:
            as_user = {"user": self.system_user, "group": _group(self.system_user), "extra_groups": []}
        return {"cwd": self.folder, "env": {**os.environ, "LC_ALL": "C"}, "stdin": subprocess.DEVNULL, **as_user}

    def launch(self):
        self.port = _free_port()
        with self._log.open("wb") as log:
            command = [*ending_with_us(self.goodbye), *self.command()]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **self._options())

    @property
    def _log(self):
        return self.folder / "log"

    def wait(self):
        """Wait until it accepts connections; relaunch it on another port if it ended."""
        deadline = time.monotonic() + START_S
        for _ in range(ATTEMPTS):
            while self._process.poll() is None and time.monotonic() < deadline:
                if READY.search(self._log.read_bytes()):
                    return
                time.sleep(0.02)
            self.stop()
            self.launch()
        self.stop()
        raise RuntimeError(f"{self.name} did not start: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self):
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(self.goodbye)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PostgreSQL(Server):
    name = "postgresql"
    variables = ("PGHOST", "PGPORT")
    system_user = "postgres"
    goodbye = signal.SIGQUIT  # an immediate shutdown: after SIGKILL its shared memory would remain
    settings: ClassVar = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "max_connections": CONNECTIONS,
        "shared_buffers": "128MB",
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
        "wal_level": "minimal",  # halves the time of creating a test database
        "max_wal_senders": 0,
        "max_wal_size": "4GB",
        "checkpoint_timeout": "1h",
        "autovacuum": "off",  # would change plans and page counts while a test measures them
        "jit": "off",
    }

    @classmethod
    def programs(cls):
        on_path = shutil.which("pg_ctl")
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
        folder = Path(os.path.realpath(on_path or found[-1])).parent if on_path or found else None
        return [folder and shutil.which(name, path=folder) for name in ("postgres", "initdb")]

    def initialize(self):
        _, initdb = self.programs()
        how = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
        return [initdb, f"--pgdata={self.data}", *how]

    def command(self):
        postgres, _ = self.programs()
        settings = [f"--{name}={value}" for name, value in {**self.settings, "port": self.port}.items()]
        return [postgres, "-D", str(self.data), *settings]

    def environment(self):
        return {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": "postgres", "PGPASSWORD": ""}


class MariaDB(Server):
    name = "mariadb"
    variables = ("MYSQL_HOST", "MYSQL_PORT")
    system_user = "mysql"
    settings: ClassVar = {
        "bind-address": "127.0.0.1",
        "character-set-server": "utf8mb4",
        "collation-server": "utf8mb4_general_ci",
        "max-connections": CONNECTIONS,
        "innodb-buffer-pool-size": "256M",
        "innodb-doublewrite": "OFF",
        "innodb-flush-log-at-trx-commit": 0,
        "innodb-flush-method": "nosync",
        "socket": "socket",
        "pid-file": "pid",
    }
    log_size = "--innodb-log-file-size=32M"  # part of the template, which is copied

    @classmethod
    def programs(cls):
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
        return [_first_of(names, path) for names in (("mariadbd",), ("mariadb-install-db", "mysql_install_db"))]

    def initialize(self):
        _, install = self.programs()
        return [
            install,
            "--no-defaults",
            f"--datadir={self.data}",
            "--auth-root-authentication-method=normal",
            self.log_size,
        ]

    def command(self):
        mariadbd, _ = self.programs()
        # A server that starts deletes the temporary tables of all servers with the same folder for them.
        own = {"port": self.port, "tmpdir": self.folder}
        settings = [f"--{name}={value}" for name, value in {**self.settings, **own}.items()]
        return [mariadbd, "--no-defaults", f"--datadir={self.data}", "--skip-name-resolve", self.log_size, *settings]

    def environment(self):
        return {"MYSQL_HOST": "127.0.0.1", "MYSQL_PORT": str(self.port), "MYSQL_USER": "root", "MYSQL_PASSWORD": ""}


class Redis(Server):
    name = "redis"
    variables = ("REDIS_URL",)

    @classmethod
    def programs(cls):
        return [shutil.which("redis-server")]

    def command(self):
        [program] = self.programs()
        return [program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.data), "--save", ""]

    def environment(self):
        return {"REDIS_URL": f"redis://127.0.0.1:{self.port}/0"}


SERVERS = {server.name: server for server in (PostgreSQL, MariaDB, Redis)}


class Guard:
    """The process that starts the servers, and ends them when its parent process has ended."""

    def __init__(self, names=tuple(SERVERS)):
        names = [
            name for name in names if name in SERVERS and SERVERS[name].is_wanted() and SERVERS[name].is_installed()
        ]
        self.environment = {}
        self._process = None
        if names:
            command = [sys.executable, "-m", "tests.own_servers", "--guard", *names]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes)
            line = self._process.stdout.readline()
            self.environment = json.loads(line) if line else {}
        if self.environment:
            self.environment["FAKTORY_TEST_OWN"] = "1"

    def __enter__(self):
        os.environ.update(self.environment)
        return self

    def __exit__(self, *_):
        for name in self.environment:
            os.environ.pop(name, None)
        if self._process:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


def guard(names):
    """Start servers, print their environment, and end them when standard input closes."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the tests handle these; this process ends at end of input
    folder = Path(tempfile.mkdtemp(prefix="faktory-servers-"))
    folder.chmod(0o711)  # a server that runs as another user must traverse it
    servers = [SERVERS[name](folder) for name in names]
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.prepare, servers))
        for server in servers:  # in the main thread: the kernel ends a server with the thread that launched it
            server.launch()
        for server in servers:
            server.wait()
        environment = {name: value for server in servers for name, value in server.environment().items()}
        print(json.dumps(environment), flush=True)  # noqa: T201  (the parent reads it)
        sys.stdin.read()
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser):
    """Start the servers before pytest-django reads the settings."""
    parser.extra_info["guard"] = Guard().__enter__()


def pytest_unconfigure(config):
    if started := config._parser.extra_info.pop("guard", None):
        started.__exit__()


def _keep(data, template):
    """Copy a new data directory to the template; another run may do so at the same time."""
    template.parent.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=template.parent, prefix="new-"))
    shutil.copytree(data, copy / "data", symlinks=True)
    with contextlib.suppress(OSError):
        (copy / "data").rename(template)
    shutil.rmtree(copy)
    for path in template.parent.glob(f"{template.name.rpartition('-')[0]}-*"):
        if path != template:
            shutil.rmtree(path, ignore_errors=True)


def ending_with_us(number):
    """Return a command prefix that makes the kernel send this signal when the thread that started the command ends."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal.Signals(number).name.removeprefix("SIG")] if setpriv else []


def _is_root():
    return os.geteuid() == 0


def _has_user(name):
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def _group(user):
    return pwd.getpwnam(user).pw_gid


def _first_of(names, path):
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def _free_port():
    with contextlib.closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main():
    if sys.argv[1:2] == ["--guard"]:
        guard(sys.argv[2:])
        return 0
    with Guard():
        return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
