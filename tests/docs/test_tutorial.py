"""Run the tutorial's examples unchanged, with a worker that processes all jobs between any two steps."""

import re
import time
from datetime import timedelta

import pytest

from django_faktory.models import Batch, Job
from django_faktory.tasks import base
from django_faktory.testing import drain
from example_project.shop import tasks as shop_tasks
from example_project.shop.models import Delivery
from tests.docs.pages import DOCS, examples, text_of

pytestmark = [pytest.mark.once, pytest.mark.django_db]

PAGE = DOCS / "tutorial.md"


@pytest.fixture
def typed(monkeypatch, settings):
    """Return a function that runs the next example, which must contain `words`, and returns all names defined."""
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    settings.SHOP_URL = "http://127.0.0.1:1"  # no partner listens at this address
    left, names = list(examples(PAGE)), {"__name__": "typed_in"}

    def type_in(words):
        example = left.pop(0)
        assert words in example.code
        exec(compile(example.code, str(example), "exec"), names)
        return names

    yield type_in
    assert left == [], "every example has run"


def test_the_tutorial_examples_have_the_described_results(typed, monkeypatch):
    order = typed("place_order(customer")["order"]
    assert {job.state for job in Job.objects.about(order)} == {"enqueued", "scheduled"}
    assert Job.objects.about(order).count() == 4
    typed("set_rollback")
    drain()
    typed("tasks.send_invoice.enqueue")
    drain()
    result = typed("result.refresh()")["result"]
    assert (result.status.name, result.return_value) == ("SUCCESSFUL", order.invoice.pk)
    typed("4000000000000002")
    drain(until=timedelta(seconds=5))
    declined = typed("declined.refresh()")["declined"]
    assert declined.status.name == "FAILED"
    assert [one.exception_class_path.rpartition(".")[2] for one in declined.errors] == ["CardDeclined"] * 2
    typed("failed_with")
    assert Job.objects.get(jid=declined.id).state == "enqueued"
    typed("tasks.ask_for_review.using")
    typed("deliver(Order")
    drain()
    assert Delivery.objects.get().left_at
    assert set(Batch.objects.values_list("success_st", flat=True)) == {"2"}
    typed("def thank")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the mails of the example
    thanks = typed("thank.enqueue")["result"]
    drain()
    thanks.refresh()
    assert thanks.status.name == "SUCCESSFUL"


def test_the_tutorial_names_existing_tasks_of_the_shop():
    table = text_of("tutorial.md").partition("## An order")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert len(named) == 6
    assert [task for task in named if not hasattr(shop_tasks, task)] == []
