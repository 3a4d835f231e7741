"""Fuzz the server's side of a connection, guided by coverage: `make fuzz`.

    python fuzz/fuzz_server_connection.py [libFuzzer's options] [folders]

Without atheris it prints a message, and fails if CI=true. A failing input is written to a file named crash-…; pass that
file as the only argument to run it again. The checks are those of tests/core/protocol/hostile.py.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import atheris
except ImportError as error:
    version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor} on {sys.platform}"
    print(f"fuzzing is left out: atheris is not installed for {version} ({error}); make fuzz")
    sys.exit(1 if os.environ.get("CI") == "true" else 0)

with atheris.instrument_imports(include=["django_faktory"]):
    import django_faktory.core.protocol.connection  # noqa: F401

from tests.core.protocol.hostile import HELLO, check


def one_input(data):
    """Check one input. Its first byte selects the size of the pieces that the other bytes are split into.

    It also selects the client: one that must log in first, or one that has sent HELLO, with a small or a large limit.
    """
    if not data:
        return
    shape, rest = data[0], data[1:]
    step = (len(rest) or 1, 1, 7, 64)[shape & 3]
    pieces = [rest[at : at + step] for at in range(0, len(rest), step)]
    if shape & 4:
        check(pieces, password="secret")
    else:
        check([HELLO, *pieces], limit=(16 * 1024 * 1024, 256)[shape >> 3 & 1])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
