"""Run the examples of docs/batches.md: this module is built from the page's code blocks."""

import re
from pathlib import Path

import pytest

from django_faktory import Batch
from django_faktory.models import Batch as Row
from django_faktory.testing import drain
from tests.project.tasks import fails_for_good

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "batches.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)

page = {"__name__": __name__}
exec(compile("\n\n".join(SNIPPETS), str(DOCUMENT), "exec"), page)


def names(ran):
    return [one.jobtype.rpartition(".")[2] for one in ran]


def test_a_callback_counts_the_failures_of_its_batch():
    with Batch(complete=page["count_failures"].callback(42)):
        fails_for_good.enqueue()
        page["resize"].enqueue(1, 1200)
    callback = [one for one in drain() if one.jobtype.endswith("count_failures")]
    assert [one.result.return_value for one in callback] == ["album 42: 1 of 2 failed"]


def test_the_album_example_publishes_after_all_images_are_resized():
    bid = page["make_album"](42, [1, 2, 3])
    assert page["progress"](bid) == "0 of 3"
    assert names(drain(raise_errors=True)) == ["resize"] * 3 + ["publish"]
    assert page["progress"](bid) == "3 of 3"
    assert page["progress"]("b-nowhere") == "long done"


def test_the_delivery_example_runs_send_off_last():
    page["deliver"](1, [1, 2])
    ran = names(drain(raise_errors=True))
    assert sorted(ran[:4]) == ["pick", "pick", "write_label", "write_label"]
    assert sorted(ran[4:-1]) == ["close_parcel", "close_parcel", "weigh", "weigh"]
    assert ran[4] == "weigh"
    assert ran[-1] == "send_off"


def test_the_crawl_example_adds_jobs_to_its_own_batch():
    with Batch(success=page["publish"].callback(1)) as batch:
        page["crawl"].enqueue("https://example.org")
    assert names(drain(raise_errors=True)) == ["crawl"] * 4 + ["publish"]
    assert batch.status().total == 4
    assert Row.objects.count() == 1


def test_the_fulfil_example_runs_its_steps_in_order():
    page["fulfil"](1)
    assert names(drain(raise_errors=True)) == ["reserve", "pack", "wrap", "ship", "send_off"]
