"""The server's side of a connection under a fuzzer that sees which code its bytes reach: `make fuzz`.

    python fuzz/fuzz_server_connection.py [libFuzzer's options] [folders]

Without atheris it says so, and fails where CI=true. What it finds is written to a file named crash-…; give that file
as the only argument to see it again. The promises are those of tests/core/hostile.py.
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
    import django_faktory.protocol.connection  # noqa: F401

from tests.core.hostile import HELLO, check


def one_input(data):
    """The first byte says how the rest is cut, and who sends it."""
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
