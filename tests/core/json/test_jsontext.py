"""JSON as text: parts come back verbatim, and invalid JSON is refused."""

import json
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.json import jsontext
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**63, max_value=2**80),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.text(alphabet='"\\{}[],: \n\u2028é😀\x00'),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)
space = st.text(alphabet=" \t\r\n", max_size=3)
writers = st.sampled_from(
    [
        lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        lambda value: json.dumps(value, ensure_ascii=True, separators=(",", ":")),
        lambda value: json.dumps(value, indent=1),
        json.dumps,
    ]
)
objects = st.dictionaries(st.text(max_size=8), values, max_size=6)


@st.composite
def texts_of_objects(draw):
    """Draw an object's members as written, and a text that contains them, mostly with random white space."""
    write = draw(writers)
    parts = [(json.dumps(key, ensure_ascii=False), write(value)) for key, value in draw(objects).items()]
    if draw(st.booleans()):  # as `json.dumps` writes objects, which has a path of its own
        return parts, "{" + ", ".join(f"{key}: {value}" for key, value in parts) + "}"
    text = ",".join(f"{draw(space)}{key}{draw(space)}:{draw(space)}{value}{draw(space)}" for key, value in parts)
    return parts, f"{draw(space)}{{{text or draw(space)}}}{draw(space)}"


def answer(function, *args):
    """Return the function's result, or `InvalidPayload` if it refuses."""
    try:
        return function(*args)
    except InvalidPayload:
        return InvalidPayload


@given(texts_of_objects())
def test_members_keep_their_text_and_order(given_):
    """W11: members keep their order, and values their spelling."""
    parts, text = given_
    assert list(jsontext.members(text).items()) == [(json.loads(key), value) for key, value in parts]


@given(texts_of_objects())
def test_half_a_surrogate_pair_changes_nothing_for_the_other_members(given_):
    """The decoder refuses it, so the standard library reads the text."""
    _, text = given_
    longer = text.replace("{", '{"half":"\\ud800"' + ("," if jsontext.members(text) else ""), 1)
    assert jsontext.members(longer) == {"half": '"\\ud800"'} | jsontext.members(text)


@given(st.one_of(texts_of_objects().map(lambda drawn: drawn[1]), st.text(alphabet='{}[]":,\\u0129eE.-+ntrfalsul x')))
def test_a_damaged_text_is_refused_exactly_if_the_standard_library_refuses_it(text):
    for damaged in (text, text[:-1], text[1:], text.replace(":", ",", 1), text.replace('"', "'", 1), text + "x"):
        assert (answer(jsontext.members, damaged) is InvalidPayload) is not is_object(damaged), damaged


def is_object(text):
    try:
        pairs = json.loads(text, object_pairs_hook=Pairs, parse_constant=lambda _: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return False
    return isinstance(pairs, Pairs) and len(dict(pairs)) == len(pairs)


class Pairs(list):
    """Members of an object, with repeated keys."""


@given(objects, writers)
def test_joined_members_parse_back_to_the_same_members(found, write):
    parts = {key: write(value) for key, value in found.items()}
    joined = jsontext.join(parts.items())
    assert jsontext.members(joined) == parts
    assert json.loads(joined) == found


@given(texts_of_objects(), st.dictionaries(st.sampled_from(["enqueued_at", "failure", "zz"]), values))
def test_append_adds_members_at_the_end_and_keeps_the_rest_verbatim(given_, added):
    parts, text = given_
    extra = [(key, json.dumps(value)) for key, value in added.items() if json.dumps(key) not in dict(parts)]
    longer = jsontext.append(text, extra)
    found = jsontext.members(longer)
    assert list(found.items()) == [*((json.loads(key), value) for key, value in parts), *extra]
    assert longer.startswith(text.rstrip(" \t\r\n")[:-1].rstrip(" \t\r\n"))


def test_appending_nothing_changes_nothing():
    assert jsontext.append(' {"a": 1 } ', []) == ' {"a": 1 } '
    assert jsontext.append("{ }", [("a", "1")]) == '{"a":1}'


@given(st.lists(values, max_size=6), writers)
def test_array_items_are_returned_verbatim(found, write):
    texts = [write(value) for value in found]
    assert jsontext.items(f" [ {' , '.join(texts)} ] ") == texts


@pytest.mark.parametrize(
    "text",
    [
        "9007199254740993",
        "-" + "9" * 5000,
        "1.0",
        "1e400",
        '"\\u0000"',
        '"\\ud800"',
        '"\\/\\u00e9\\ud83d\\ude00"',
        '"\x7f\u2028"',
        "[ 1 ,2 ]",
        '{"b":1, "a":2, "b":3}',
    ],
)
def test_numbers_and_strings_keep_their_original_spelling(text):
    """W11: numbers and strings keep their spelling."""
    for around in (f'{{"args":{text}}}', f'{{ "args" : {text} }}'):
        assert jsontext.members(around) == {"args": text}
    assert jsontext.items(f"[{text}]") == [text]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '"{}"',
        "{",
        "}",
        '{"a":1,}',
        '{"a":1 "b":2}',
        '{"a":01}',
        '{"a":"\n"}',
        '{"a":1}{}',
        '\ufeff{"a":1}',
    ],
)
def test_text_that_is_not_an_object_is_refused(text):
    with pytest.raises(InvalidPayload, match=r"^invalid JSON: "):
        jsontext.members(text)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("around", ['{"a":%s}', '{"a":[%s]}', '{"a":{"b": %s}}'])
def test_nan_and_infinity_are_refused(around, constant):
    """W7: these constants are not valid JSON."""
    with pytest.raises(InvalidPayload, match=r"^invalid JSON: "):
        jsontext.members(around % constant)
    with pytest.raises(InvalidPayload, match=r"^invalid JSON: "):
        jsontext.decode(around % constant)


@pytest.mark.parametrize(
    "text",
    [
        '{"jid":1,"jid":2}',
        '{"jid": 1, "jid": 1}',
        '{"a":1,"\\u0061":2}',
        '{"é":1,"x":0, "\\u00e9":1}',
    ],
)
def test_duplicate_top_level_keys_are_refused(text):
    """W7: also if the key is spelled differently."""
    with pytest.raises(InvalidPayload, match="given twice"):
        jsontext.members(text)


@pytest.mark.parametrize("text", ["", "{}", "[", "[1", "[1,", "[1,]", "[1 2]", "[]]", "[NaN]", "[1] 2", "x", '["\n"]'])
def test_text_that_is_not_an_array_is_refused(text):
    with pytest.raises(InvalidPayload, match=r"^invalid JSON: "):
        jsontext.items(text)


@pytest.mark.parametrize(("open_", "close"), ["[]", ('{"a":', "}")])
def test_nesting_of_128_levels_is_accepted_and_129_is_refused(open_, close):
    """W7: the object itself is the first level."""

    def nested(levels):
        return f'{{"a":{open_ * (levels - 1)}{"null" if len(open_) > 1 else ""}{close * (levels - 1)}}}'

    assert list(jsontext.members(nested(128))) == ["a"]
    with pytest.raises(InvalidPayload, match="nested deeper than 128"):
        jsontext.members(nested(129))
    with pytest.raises(InvalidPayload, match="nested deeper than 128"):
        jsontext.members(nested(100_000))


def test_brackets_in_strings_and_sibling_arrays_do_not_count_as_depth():
    text = '{"a":"' + "[{" * 500 + '\\"[[","b":[' + ",".join(["[[]]"] * 200) + "]}"
    assert list(jsontext.members(text)) == ["a", "b"]
    deep_after = text[:-1] + ',"c":' + "[" * 128 + "]" * 128 + "}"
    with pytest.raises(InvalidPayload, match="nested deeper"):
        jsontext.members(deep_after)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_extreme_nesting_raises_an_error_instead_of_crashing(text):
    """W12: the depth of an array's elements is checked separately, when they are parsed."""
    with suppress(InvalidPayload):
        for item in jsontext.items(f"[{text}]"):
            jsontext.members(item)
            pytest.fail("too deep")
    with pytest.raises(InvalidPayload):
        jsontext.decode(text)


def test_extreme_nesting_is_refused_without_using_much_memory():
    """Refusing a megabyte of brackets used to take a third of a second of server time, and 16 MB."""
    text = "[" * 1_000_000 + "]" * 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload, match="nested deeper than 128"):
            jsontext.check_depth(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(text)


def levels_of(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels_of, inner), default=0)


nested = st.recursive(
    st.sampled_from(["[", '"', "\\", '\\"]', "{}", "\\\\", 1]) | st.text(alphabet='"\\{}[]é😀'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[{é', max_size=3), inner, max_size=3)
    ),
)


@given(nested, st.integers(0, 150), writers, st.integers(1, 50))
def test_the_measured_depth_is_that_of_the_value_for_any_size_of_the_parts(value, more, write, part):
    many = ["[]"] * 100 + [[]] * 100
    for _ in range(more):
        value = [value]
    text = write([value, many])
    depth = max(levels_of(value), 2)
    assert max(jsontext._measure_depth(text, part)) == depth + 1
    assert (answer(jsontext.check_depth, text) is InvalidPayload) is (depth + 1 > 128)


def test_the_first_elements_of_a_very_long_array_are_returned():
    text = "[" + "17, " * 500_000 + "17]"
    assert jsontext.items(text) == ["17"] * jsontext.MAX_ITEMS
    assert len(jsontext.items("[" + "17, " * 150_000 + "17]")) == 150_001
    for broken in (text[:-1] + "}", text[:-1]):
        with pytest.raises(InvalidPayload, match=r"^invalid JSON: "):
            jsontext.items(broken)


def test_a_long_invalid_text_gets_an_error_that_names_its_place():
    with pytest.raises(InvalidPayload, match=r"^invalid JSON: .*byte 1000005"):
        jsontext.members('{"a":' + "1" * 1_000_000 + "x}")


def test_an_error_about_megabytes_of_text_is_short():
    with pytest.raises(InvalidPayload) as caught:
        jsontext.members('{"' + "k" * 1_000_000 + '":1,"' + "k" * 1_000_000 + '":2}')
    assert len(str(caught.value)) < 200


@given(values)
def test_encoded_values_are_on_one_line_and_decode_to_the_same_value(value):
    text = jsontext.encode(value)
    assert jsontext.decode(text) == value
    assert "\n" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, "é", None, True, 1.5]}, '{"a":[1,"é",null,true,1.5]}'),
        ("\ud800", '"\\ud800"'),
        ("\u0000\x7f\n", '"\\u0000\x7f\\n"'),
        (2**70, str(2**70)),
        ((1, 2), "[1,2]"),
        (float("nan"), "null"),
    ],
)
def test_values_encode_to_the_expected_json_text(value, text):
    assert jsontext.encode(value) == text


@pytest.mark.parametrize("value", [object(), {1: object()}, 1j])
def test_encoding_a_value_without_a_json_type_raises_type_error(value):
    with pytest.raises(TypeError):
        jsontext.encode(value)
