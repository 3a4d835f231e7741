"""Run the database tests through a PgBouncer: `python -m tests.bouncer`; with `--pool`, through Django's own pool.

`-n` is the number of processes. Other arguments go to pytest, which runs all tests that use the database.
"""

import argparse
import os
import subprocess
import sys
import zlib
from pathlib import Path

from tests import services
from tests.bouncer import SESSIONS
from tests.bouncer.bouncer import Bouncer, sessions_left
from tests.own_servers import Guard

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = 4


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--pool", action="store_true")
    parser.add_argument("-n", dest="processes", type=int, default=PROCESSES)
    options, more = parser.parse_known_args()
    with Guard(["postgresql", "redis"]):
        sys.exit(run(options, more))


def run(options, more):
    """Run the tests; return pytest's exit code."""
    needed = [services.postgresql(), services.django_pool() if options.pool else services.pgbouncer()]
    if missing := [service for service in needed if service.missing]:
        sys.exit("\n".join(f"{service.name}: {service.missing}" for service in missing))
    print(*needed, sep="\n", flush=True)  # noqa: T201  (output for the caller)
    more = ["-n", str(in_what_is_left(options.processes)), *more]
    if options.pool:
        return run_tests({"FAKTORY_TEST_VIA": "pool"}, more)
    bouncer = Bouncer()
    try:
        return run_tests(bouncer.environment, more)
    finally:
        bouncer.clean_up()


def in_what_is_left(processes):
    """Return `processes`, or fewer if PostgreSQL has not enough free connections for them."""
    left = sessions_left()
    most = (left // SESSIONS - 1) // 2  # each has two databases, and they share the server's own
    if most < 1:
        sys.exit(
            f"PostgreSQL has {left} connections left and {3 * SESSIONS} are needed: end others, or raise the limit"
        )
    if most < processes:
        print(f"in {most} processes: PostgreSQL has {left} connections left", flush=True)  # noqa: T201
    return min(processes, most)


def run_tests(environment, more):
    """Run the tests in a separate process; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not core and (each_database or not once)", *more]
    tag = f"via{zlib.crc32(str(ROOT).encode()):08x}"
    environment = {"FAKTORY_TEST_TAG": tag, **os.environ, "FAKTORY_TEST_DB": "postgresql", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
