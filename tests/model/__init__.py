"""The store beside a plain model of it. What it asserts is told in full, as in a test."""

import pytest

pytest.register_assert_rewrite("tests.model.machine")
