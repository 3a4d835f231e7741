"""Run the tests that have a database through a PgBouncer: `python -m tests.bouncer`; with `--pool`, Django's own pool.

Other arguments go to pytest, which runs everything that is not about other things than the database.
"""

import os
import subprocess
import sys
import zlib
from pathlib import Path

from tests import services
from tests.bouncer.bouncer import Bouncer

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = 4


def main():
    more = sys.argv[1:]
    is_pool = "--pool" in more
    needed = [services.postgresql(), services.django_pool() if is_pool else services.pgbouncer()]
    if missing := [service for service in needed if service.missing]:
        sys.exit("\n".join(f"{service.name}: {service.missing}" for service in missing))
    print(*needed, sep="\n", flush=True)  # noqa: T201  (told to who runs it)
    more = [one for one in more if one != "--pool"]
    if is_pool:
        sys.exit(run_tests({"FAKTORY_TEST_VIA": "pool"}, more))
    bouncer = Bouncer()
    try:
        code = run_tests(bouncer.environment, more)
    finally:
        bouncer.clean_up()
    sys.exit(code)


def run_tests(environment, more):
    """In a process of their own; pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(PROCESSES), "-m", "not core and not once", *more]
    tag = f"via{zlib.crc32(str(ROOT).encode()):08x}"
    environment = {"FAKTORY_TEST_TAG": tag, **os.environ, "FAKTORY_TEST_DB": "postgresql", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
