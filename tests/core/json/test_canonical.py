"""Canonical JSON: equal texts for equal values, whatever their spelling."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.json import jsontext

pytestmark = pytest.mark.core


class Digits(str):
    """A number in its original spelling."""


def plainly(value):
    """Return the canonical text, computed from the values."""
    match value:
        case Digits():
            return str(value)
        case list():
            return f"[{','.join(map(plainly, value))}]"
        case dict():
            return f"{{{','.join(f'{json.dumps(key)}:{plainly(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


texts = st.text(max_size=5) | st.text('\\"\ud83d\ude00/\n\x7f ,:{}[]é', max_size=5) | st.just("a\\u" * 5_000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(json_values, max_size=3), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([",", " ,\n"]))
def test_canonical_json_equals_the_canonical_json_of_the_values(value, is_ascii, indent, comma):
    """Keys of stored jobs are hashes of this text."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent, separators=(comma, ": "))
    expected = plainly(json.loads(text, parse_int=Digits, parse_float=Digits))
    assert jsontext.canonical(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a":1,"a":2}]', '[{"a":2}]'),
        ('[{"b":1,"\\u0061":2,"a":{"x":[]}}]', '[{"a":{"x":[]},"b":1}]'),
        ('["\\ud83d\\ude00","\\ud83d"]', '["\\ud83d\\ude00","\\ud83d"]'),
        (" [ { } , [ ] , 1.0 , -0 ] ", "[{},[],1.0,-0]"),
    ],
)
def test_unusual_json_spellings_have_one_canonical_form(text, expected):
    assert jsontext.canonical(text) == expected
