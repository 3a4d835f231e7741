"""Row-level security as on the page: the tenant of a job is a session variable while its task runs."""

import pytest
from django.db import connection

from django_faktory.testing import JobFailed, drain
from tests.bouncer import needs_session
from tests.docs.pages import examples
from tests.project import middleware
from tests.project import tasks as project_tasks
from tests.tenants.conftest import PAGE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="about PostgreSQL"),
    needs_session("the tenant is a session variable"),
]


def current():
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('app.tenant', TRUE)")
        [name] = cursor.fetchone()
    return name


@pytest.fixture
def page(settings, monkeypatch):
    """Run the page's example with its middleware in use, and return its names."""
    names = {}
    [code] = [one.code for one in examples(PAGE) if "class Tenant(" in one.code]
    exec(code, names)
    monkeypatch.setattr(middleware, "TenantOfRows", names["Tenant"], raising=False)
    settings.FAKTORY = {"MIDDLEWARE": ["tests.project.middleware.TenantOfRows"]}
    yield names
    connection.close()  # its session keeps the variable


def test_the_tenant_of_each_job_is_set_while_its_task_runs(page, monkeypatch):
    seen = []
    monkeypatch.setattr(project_tasks, "noticing", lambda: seen.append(current()))
    for number in range(20):
        page["set_tenant"](("acme", "bolt")[number % 2])
        project_tasks.calls_noticing.enqueue()
    page["set_tenant"]("")
    drain(raise_errors=True)
    assert seen == ["acme", "bolt"] * 10
    assert current() == ""


def test_the_tenant_is_unset_after_a_task_that_failed(page, monkeypatch):
    def fails():
        raise ValueError(current())

    monkeypatch.setattr(project_tasks, "noticing", fails)
    page["set_tenant"]("acme")
    project_tasks.calls_noticing.enqueue()
    with pytest.raises(JobFailed, match="acme"):
        drain(raise_errors=True)
    assert current() == ""
