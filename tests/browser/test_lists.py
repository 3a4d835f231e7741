"""The list of jobs fits beside Django's filters: no column is cut, whatever the names and texts of its jobs."""

import json

import pytest

from tests.browser.test_pages import PATH
from tests.factories import JobFactory, QueueFactory

pytestmark = [pytest.mark.slow, pytest.mark.once]

CUT = """() => {
const shown = document.querySelector('#result_list').closest('.results').getBoundingClientRect().right;
return [...document.querySelectorAll('#result_list tbody tr:first-child > *')]
.filter((cell) => cell.getBoundingClientRect().right > shown + 1).map((cell) => cell.className);
}"""


@pytest.mark.parametrize("state", ["dead", "retries", ""])
def test_no_column_of_the_list_of_jobs_is_cut(screen, state):
    text = json.dumps({"args": ["anna@example.org", "x" * 300]}, separators=(",", ":"))
    failure = json.dumps({"message": "no_answer_" * 30}, separators=(",", ":"))
    for name in ("dead", "retries", "succeeded"):
        JobFactory(
            **{name: True}, jid=f"01a223cf89928fda3d86ed1012c4{name[:4]}", payload=text, failure=failure,
            jobtype="warehouse.tasks.reserve_stock_for_order", errtype="shop.errors.PartnerDoesNotAnswer",
            queue=QueueFactory(name=f"billing_of_europe_{name}").name,
        )  # fmt: skip
    seen = screen(width=1280)
    seen.go(f"{PATH}job/?state={state}" if state else f"{PATH}job/?q=anna")
    assert seen.page.evaluate(CUT) == []
