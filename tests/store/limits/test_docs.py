"""Run the examples of docs/limits.md unchanged."""

import re
from pathlib import Path

from django_faktory.models import Job, Limit
from django_faktory.tasks import limits
from tests.store.limits.conftest import limit

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "limits.md").read_text(encoding="utf-8")
TASKS, SETTINGS, PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)

page = {"__name__": __name__}
exec(TASKS, page)


def test_example_tasks_have_their_documented_limits(transactional_db):
    limits.sync(using="default")
    allowances = {one.name.rpartition(".")[2]: (one.scope, one.allowance_text) for one in Limit.objects.all()}
    assert allowances["render"] == ("task", "5 at a time")
    assert allowances["call_api"] == ("task", "100/s")
    assert allowances["sync"] == ("key", "2 at a time and 10/m, 3 at once")
    page["sync"].enqueue(42)
    assert Job.objects.get().limit_key == f"{__name__}.sync:42"


def test_example_settings_contain_no_invalid_limit(settings):
    found = {}
    exec(SETTINGS, found)
    settings.FAKTORY = settings.FAKTORY | found["FAKTORY"]
    assert [one for one in limits.read_definitions() if isinstance(one, limits.InvalidDefinition)] == []


def test_example_code_pauses_limits_and_resumes_a_task(transactional_db):
    exec(PYTHON, {})
    assert not Limit.objects.exists()
    limit("task", "shop.tasks.charge", 5)
    exec(PYTHON.partition("limits.resume")[0], {})
    assert limits.paused() == ["shop.tasks.charge"]
