"""Test hostile texts on a phone: nothing overflows, no script runs, and no link leads elsewhere."""

import os

import pytest

from tests.admin.test_hostile import addresses
from tests.browser.test_pages import STICKS_OUT
from tests.hostile import TEXTS, fill

pytestmark = [pytest.mark.slow, pytest.mark.once]

WORST = ["one long word", "picture", "huge", "characters that pile up", "right to left", "newlines", "NUL"]
WORST = WORST[: int(os.environ.get("FAKTORY_TEST_TEXTS", "2"))]
"""Each takes about 15 s; `make soak` tests all of them."""


@pytest.mark.parametrize("name", WORST)
def test_hostile_texts_cause_no_overflow_or_script_on_a_phone(screen, name):
    fill(TEXTS[name])
    seen = screen(width=390)
    seen.page.on("dialog", lambda dialog: seen.complaints.append(f"a script ran: {dialog.message}"))
    wide = {}
    for place, address in addresses("harmless").items():
        if "history" in place or " by " in place or place == "part" or place == "tried":
            continue
        seen.go(address)
        seen.keep(f"hostile-{name}-{place}".replace(" ", "-"))
        if (width := seen.page.evaluate(STICKS_OUT)) > 0:
            wide[place] = width
    assert wide == {}
    assert seen.complaints == []
