"""Python 3.11 under a tracer, such as coverage, hangs while an interruption waits for its thread."""

import sys

import pytest

UNTRACED = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}
"""Environment in which coverage does not trace a program."""

hangs_under_tracers = pytest.mark.skipif(
    sys.version_info < (3, 12) and sys.gettrace() is not None,
    reason="Python 3.11 under a tracer hangs while an interruption waits for its thread",
)
