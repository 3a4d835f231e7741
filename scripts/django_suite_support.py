"""Backends and a test runner that `django_suite.py` puts in place of Django's."""

import json
import os
from copy import deepcopy
from pathlib import Path

from django.test.runner import DiscoverRunner

from django_faktory.backend import FaktoryBackend
from django_faktory.brokers import get_broker
from django_faktory.testing import drain


class KeptBackend(FaktoryBackend):
    """The real backend, with the two additional names that a dummy backend has."""

    def __init__(self, alias, params):
        super().__init__(alias, params)
        self.results = []

    def clear(self):
        get_broker().flush()
        self.results.clear()

    def enqueue_many(self, task, calls):
        results = super().enqueue_many(task, calls)
        self.results.extend(map(deepcopy, results))
        return results


class DrainedBackend(FaktoryBackend):
    """The real backend; after each enqueue the real worker code runs all ready jobs."""

    def enqueue_many(self, task, calls):
        results = super().enqueue_many(task, calls)
        drain()
        for result in results:
            result.refresh()
        return results


class Runner(DiscoverRunner):
    """Records which tests ran, and which of them did not pass."""

    def suite_result(self, suite, result, **kwargs):
        bad = [*result.failures, *result.errors, *((test, "") for test in result.unexpectedSuccesses)]
        outcome = {
            "ran": result.testsRun,
            "skipped": [test.id() for test, _ in result.skipped],
            "failed": sorted({getattr(test, "test_case", test).id() for test, _ in bad}),
        }
        Path(os.environ["DJANGO_SUITE_FOLDER"], "result.json").write_text(json.dumps(outcome))
        return super().suite_result(suite, result, **kwargs)
