"""Accepted values for arguments and results."""

import enum
from collections import OrderedDict, UserDict, deque
from datetime import date
from decimal import Decimal
from types import MappingProxyType
from uuid import UUID

import pytest
from django.utils.safestring import mark_safe
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.json import jsontext
from django_faktory.tasks.json_values import encode_json, normalize

pytestmark = pytest.mark.core


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Celsius(float):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]]),
        (b"bytes", "bytes"),
        (mark_safe("<b>"), "<b>"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Celsius(36.6), 36.6),
        (OrderedDict(a=(1,)), {"a": [1]}),
        (UserDict(a=1), {"a": 1}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        (deque([1, 2]), [1, 2]),
        (range(3), [0, 1, 2]),
        ({mark_safe("key"): True}, {"key": True}),
    ],
)
def test_values_that_django_accepts_are_normalized_to_plain_json_types(value, plain):
    found = normalize(value)
    assert found == plain
    assert type(found) is type(plain)
    assert jsontext.decode(encode_json(found)) == plain


@pytest.mark.parametrize(
    "value", [object(), date(2026, 5, 1), Decimal(1), UUID(int=1), {1, 2}, 1j, bytearray(b"x"), print]
)
def test_values_without_a_json_type_are_refused_at_any_depth(value):
    for hidden in (value, [value], {"key": (value,)}):
        with pytest.raises(TypeError, match="Unsupported type: <class"):
            normalize(hidden)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Celsius("-inf"), b"\xff"])
def test_values_that_json_would_alter_are_refused(value):
    with pytest.raises(ValueError, match="Unsupported value: "):
        normalize([value])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_json_values_round_trip_unchanged(value):
    assert normalize(value) == value
    assert jsontext.decode(encode_json(normalize(value))) == value


@pytest.mark.parametrize("value", [2**53 + 1, 2**64, -(2**63) - 1, 10**4000, 0.1, 1e308, -0.0, "\x00", "\ud800", "😀"])
def test_extreme_json_values_round_trip_exactly(value):
    assert repr(jsontext.decode(encode_json(value))) == repr(value)
