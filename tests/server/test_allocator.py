"""The server returns freed memory to the operating system."""

import platform
import subprocess
import sys

import pytest

from tests.programs import ROOT

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is configured"),
]

GROWS_AND_SHRINKS = """
from django_faktory.server import allocator
from tests.waiting import wait_until

allocator.CHECK_S = 0.05
looks = []
resident_bytes = allocator._resident_bytes
allocator._resident_bytes = lambda: looks.append(0) or resident_bytes()
assert allocator.return_large_blocks()
wait_until(lambda: looks)
blocks = [b"x" * (100_000 + number) for number in range(1_000)]
high = resident_bytes()
seen = len(looks)
wait_until(lambda: len(looks) > seen + 5)  # trims that find nothing to return
top = blocks.pop()  # without it malloc itself would return the blocks below
blocks.clear()
wait_until(lambda: resident_bytes() < high - 80_000_000, what="the freed blocks are returned")
"""


def test_freed_memory_is_returned_to_the_operating_system():
    done = subprocess.run(
        [sys.executable, "-c", GROWS_AND_SHRINKS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
