"""Fixtures of the three ways to the operations: pages, API and command line."""

from tests.contrib.api.conftest import api, as_root, empty_cache, root, user
from tests.management.cli.conftest import faktory

__all__ = ["api", "as_root", "empty_cache", "faktory", "root", "user"]
