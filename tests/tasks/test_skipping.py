"""Blocks of `with` statements that are skipped, and those that are found to be impossible to skip before they run."""

import contextlib
import sys

import pytest

from django_faktory.tasks.skipping import Skipper, find_block

pytestmark = pytest.mark.core


class Skipped:
    def __enter__(self):
        frame = sys._getframe(1)
        start = find_block(frame)
        if start is None:
            raise ValueError("cannot be skipped")
        self.skipper = Skipper(frame, start)
        self.skipper.begin()
        return self

    def __exit__(self, kind, *_):
        return self.skipper.end(kind)


SKIPPED = {
    "a return": "with Skipped() as one:\n    return 'ran'",
    "no target": "with Skipped():\n    return 'ran'",
    "an attribute as target": "holder = type('Holder', (), {})()\nwith Skipped() as holder.one:\n    return 'ran'",
    "a call of several lines": "with Skipped(\n) as one:\n    return 'ran'\nassert one",
    "a target of its own line": "with Skipped() as (\n    one):\n    return 'ran'\nassert one",
    "two managers of two lines": "with (Skipped() as one,\n      Skipped() as two):\n    return 'ran'",
    "another manager before it": "with contextlib.nullcontext(), Skipped():\n    return 'ran'",
    "an endless loop": "with Skipped():\n    while True:\n        return 'ran'",
    "an annotation": "with Skipped():\n    one: int\n    return 'ran'",
    "a text": "with Skipped():\n    'text'\n    return 'ran'",
    "an import": "with Skipped():\n    import os\n    return 'ran'",
    "a condition": "with Skipped():\n    if sys:\n        return 'ran'",
    "a comprehension": "with Skipped():\n    return [one for one in 'ran'\n        if one]",
    "a function": "with Skipped():\n    def one(): ...\n    return 'ran'",
    "a match": "with Skipped():\n    match 1:\n        case 1: return 'ran'",
    "a loop around it": "for _ in range(3):\n    with Skipped():\n        return 'ran'",
    "a continue": "for _ in range(3):\n    with Skipped():\n        continue",
    "a try around it": "try:\n    with Skipped():\n        return 'ran'\nexcept BaseException:\n    return 'caught'",
    "one within another": "with Skipped():\n    with Skipped():\n        return 'ran'",
}
REFUSED = {
    "one line": "with Skipped(): return 'ran'",
    "a try": "with Skipped():\n    try:\n        return 'ran'\n    finally:\n        ran.append(1)",
    "no code": "with Skipped():\n    pass",
    "another manager behind it": "with Skipped(), contextlib.nullcontext():\n    return 'ran'",
    "an exit stack": "with contextlib.ExitStack() as stack:\n    stack.enter_context(Skipped())\n    return 'ran'",
    "a plain call": "try:\n    Skipped().__enter__()\n    return 'ran'\nfinally:\n    pass",
}
ran = []


def function_of(body):
    names = {"Skipped": Skipped, "contextlib": contextlib, "sys": sys, "ran": ran}
    exec("def function():\n" + "".join(f"    {line}\n" for line in [*body.splitlines(), "return 'skipped'"]), names)
    return names["function"]


@pytest.mark.parametrize("form", SKIPPED)
def test_the_block_is_skipped_and_its_target_is_set(form):
    tracer = sys.gettrace()
    assert function_of(SKIPPED[form])() == "skipped"
    assert sys.gettrace() is tracer


@pytest.mark.parametrize("form", REFUSED)
def test_a_block_that_cannot_be_skipped_is_found_before_it_runs(form):
    with pytest.raises(ValueError, match="cannot be skipped"):
        function_of(REFUSED[form])()
    assert ran == []
