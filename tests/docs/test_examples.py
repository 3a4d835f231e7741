"""Run every Python example, page by page in order, and its tests; settings in examples must pass the system checks.

`PRESUMED` defines the names that a page presumes (`Order`, `transaction`); `NOT_RUN` lists examples that cannot run.
"""

import ast
import inspect
import re
import unittest
from contextvars import ContextVar
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import ERROR

from django_faktory.checks import cron, limits
from django_faktory.checks import settings as settings_checks
from django_faktory.tasks import base
from django_faktory.testing import drain
from tests.docs.pages import ROOT, examples, name
from tests.project import middleware
from tests.project import tasks as project_tasks

pytestmark = pytest.mark.once

AWAITS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
"""Allow top-level `await`, as asyncio's shell does."""

PRESUMED = """
import os
from datetime import datetime, timedelta
from decimal import Decimal
from django.db import transaction
from django.utils import timezone
from django_faktory import Batch, Cron, Discard, FaktoryError, JobContext, Kill, NotUnique, Retry, task
from django_faktory.models import Job, Queue
from example_project.shop.models import Invoice, Order
INSTALLED_APPS, DATABASES, TASKS = [], {"default": {}}, {}
"""

BEFORE = {
    "docs/arguments.md": "Order.objects.create(pk=7, customer='a@example.org', item='cards', price=1)",
    "docs/cron.md": "@task(name='shop.close_day')\ndef close_day(till): ...",
    "docs/locks.md": "pages = save = None",
    "docs/queries.md": """
from example_project.shop.tasks import send_invoice
order = Order.objects.create(customer="a@example.org", item="cards", price=1)
""",
    "docs/quickstart.md": "from django_faktory.testing import drain",
    "docs/transactions.md": "from example_project.shop.tasks import send_invoice",
    "docs/howto/from-celery.md": "gateway = None\n@task(name='shop.report')\ndef report(days): ...",
}
"""Additional definitions that a page presumes."""

FILLED = {
    "Order.objects.create(...)": "Order.objects.create(customer='a@example.org', item='cards', price=1)",
    "Invoice.objects.create(...)": "Order.objects.create(customer='a@example.org', item='cards', price=1)",
    "\n...\n": "\ndrain()\n",
    "from shop.models": "from example_project.shop.models",
}
"""Replacements for the dots in examples, and for the app that pages presume."""

OWN_TASKS = re.compile(r"^from shop\.tasks import .*\n", re.MULTILINE)
"""Imports of tasks that an earlier example of the page defines."""

ELSEWHERE = {
    "docs/batches.md": "tests/tasks/test_docs_batches.py",
    "docs/long-jobs.md": "tests/tasks/test_docs_long_jobs.py",
    "docs/limits.md": "tests/store/limits/test_docs.py",
    "docs/howto/multi-tenant.md": "tests/tenants/conftest.py",
    "docs/middleware.md": "tests/tasks/test_docs_middleware.py",
    "docs/testing.md": "tests/testing/test_documented.py",
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
}
"""Pages with examples that another module runs and checks."""

NOT_RUN = {
    "from django_faktory.contrib.gearmonkey import OPT_BLOCKING, OPT_ROLLCALL, Client": "wants a Redis with workers",
    "from django_faktory.contrib.gearmonkey import Worker": "works until it is stopped",
    "from wagtail import hooks": "wants Wagtail",
    'FAKTORY = {"REDACT": "shop.privacy.redact"}': "names a function that the page has yet to write",
    'FAKTORY = {"DATABASE": "jobs"}  # data in "default", jobs in "jobs": OUTBOX is ["default"] by default': (
        "names databases that are not there"
    ),
}
"""The first line of each example that cannot run, and the reason."""


def pages_with_examples():
    return sorted({name(one.page) for one in examples()} - ELSEWHERE.keys())


def first_line(example):
    return example.code.partition("\n")[0]


def run(example, names):
    names["__name__"] = re.sub(r"\W+", "_", f"example_{example}")
    text = OWN_TASKS.sub("", example.code)
    for dots, meant in FILLED.items():
        text = text.replace(dots, meant)
    for statement in compile(text, str(example), "exec", flags=ast.PyCF_ONLY_AST | AWAITS).body:
        code = compile(ast.Module([statement], []), str(example), "exec", flags=AWAITS)
        if code.co_flags & inspect.CO_COROUTINE:
            async_to_sync(partial(awaited, code, names))()
        else:
            exec(code, names)


def failures_of_tests(names):
    """Run the TestCases that the examples define."""
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    cases = [one for one in names.values() if inspect.isclass(one) and issubclass(one, unittest.TestCase)]
    result = unittest.TestResult()
    unittest.TestSuite(load(one) for one in cases if one.__module__.startswith("example_")).run(result)
    return [trace for _, trace in (*result.failures, *result.errors)]


async def awaited(code, names):
    await eval(code, names)


def errors_of_checks():
    looks = (settings_checks.check_settings, cron.check_cron, limits.check_limits)
    return [str(message) for look in looks for message in look() if message.level >= ERROR]


@pytest.mark.core
@pytest.mark.parametrize("example", list(examples()), ids=str)
def test_each_example_is_valid_python(example):
    compile(example.code, str(example), "exec", flags=AWAITS)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("page", pages_with_examples())
def test_the_examples_of_a_page_run(page, monkeypatch, settings):
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    names: dict[str, object] = {}
    conf_before = settings.FAKTORY
    names["__name__"] = re.sub(r"\W+", "_", f"before_{page}")
    exec(PRESUMED + BEFORE.get(page, ""), names)
    for example in examples(ROOT / page):
        if first_line(example) in NOT_RUN:
            continue
        names.pop("FAKTORY", None)
        run(example, names)
        if "FAKTORY" in names:
            settings.FAKTORY = names["FAKTORY"]
            assert errors_of_checks() == [], example
            settings.FAKTORY = conf_before
    assert failures_of_tests(names) == []


@pytest.mark.core
def test_each_listed_exception_refers_to_an_existing_example():
    firsts = {first_line(one) for one in examples()}
    assert [line for line in NOT_RUN if line not in firsts] == []
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []


@pytest.mark.django_db
def test_the_documented_middleware_passes_the_tenant_to_the_job(monkeypatch, settings):
    """Run the first example of the page; tests/tasks/test_docs_middleware.py runs the others."""
    current = ContextVar("current_tenant", default=None)
    names = {"current_tenant": current}
    exec(next(examples(ROOT / "docs" / "middleware.md")).code, names)
    monkeypatch.setattr(middleware, "Tenant", names["Tenant"], raising=False)
    settings.FAKTORY = {"MIDDLEWARE": ["tests.project.middleware.Tenant"]}
    seen = []
    monkeypatch.setattr(project_tasks, "noticing", lambda: seen.append(current.get()))
    before = current.set("acme")
    project_tasks.calls_noticing.enqueue()
    current.reset(before)
    drain(raise_errors=True)
    assert seen == ["acme"]
    assert current.get() is None
