"""Compare the store with a plain model of it. Failed asserts of the machine are explained as in a test."""

import pytest

pytest.register_assert_rewrite("tests.store.model.machine")
