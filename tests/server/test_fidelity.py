"""W11: a job's text comes back unchanged through PUSH and FETCH, over real sockets and this database."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_faktory.core.json import jsontext
from tests.examples import examples
from tests.server.raw import push, worker
from tests.settings import KIND

pytestmark = pytest.mark.once_if_quick

real = settings(
    max_examples=examples(60 if KIND == "sqlite" else 20),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""All examples share one server, one database and its clients: each example fetches the job that it pushed."""

OURS = (
    "jid",
    "jobtype",
    "queue",
    "priority",
    "retry",
    "at",
    "created_at",
    "enqueued_at",
    "failure",
    "reserve_for",
    "args",
)
MEANT = (*OURS, "custom", "backtrace")


def numbers():
    """Return JSON numbers as text: integers of any size, and fractions in all their notations."""
    digits = st.from_regex(r"-?(0|[1-9][0-9]{0,40})", fullmatch=True)
    return digits | st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)


def strings():
    """Return JSON strings as text: raw or escaped, with lone surrogates, NUL and emoji."""
    plain = st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), max_size=8)
    escape = st.sampled_from(
        [r"\u0000", r"\ud83d", r"\udE00", r"\ud83d\ude00", r"\n", r"\/", r"\u00e9", r"\\", r"\"", "😀"]
    )
    return st.lists(plain | escape, max_size=4).map(lambda parts: f'"{"".join(parts)}"')


def values():
    """Return any JSON value as text, with white space where JSON allows it."""
    space = st.sampled_from(["", " ", "\t", "  "])

    def nested(inner):
        pair = st.builds("{}{}:{}{}".format, strings(), space, space, inner)
        return st.builds("[{}{}]".format, space, st.lists(inner, max_size=4).map(",".join)) | st.builds(
            "{{{}{}}}".format, st.lists(pair, max_size=4).map(", ".join), space
        )

    return st.recursive(numbers() | strings() | st.sampled_from(["true", "false", "null"]), nested, max_leaves=8)


def arrays():
    return st.lists(values(), max_size=4).map(lambda items: f"[{','.join(items)}]")


@pytest.fixture
def there_and_back(connect):
    """Return a function that pushes a text, fetches and acknowledges the job, and returns it with its members."""
    client = connect(**worker())

    def go(text):
        assert client.ask(f"PUSH {text}".encode()) == b"+OK"
        got = client.ask("FETCH default").decode()
        jid = jsontext.decode(jsontext.members(got)["jid"])
        assert client.ask(f"ACK {json.dumps({'jid': jid})}") == b"+OK"
        return got, jsontext.members(got)

    return go


def same(text, there_and_back):
    """Push and fetch `text`: all members keep their text and order, and the server's own members follow them."""
    sent = jsontext.members(text)
    got, members = there_and_back(text)
    assert {key: members[key] for key in sent} == sent
    assert list(members)[: len(sent)] == list(sent)
    assert set(members) - set(sent) <= {"queue", "retry", "created_at", "enqueued_at"}
    assert got.startswith(text.rstrip()[:-1].rstrip())


@given(args=arrays())
@real
def test_args_are_returned_verbatim(there_and_back, args):
    same(f'{{"jid":"verbatim1","jobtype":"t","args":{args}}}', there_and_back)


@given(pairs=st.lists(st.tuples(st.from_regex("x[a-z]{0,5}", fullmatch=True), values()), max_size=5))
@real
def test_custom_is_returned_verbatim_including_duplicate_keys(there_and_back, pairs):
    custom = ",".join(f'"{key}":{value}' for key, value in pairs)
    same(f'{{"jid":"verbatim1","jobtype":"t","args":[],"custom":{{{custom}}}}}', there_and_back)


@given(data=st.data())
@real
def test_unknown_members_are_returned_verbatim_in_their_original_order(there_and_back, data):
    known = ['"jid":"verbatim1"', '"jobtype":"t"', '"args":[1]']
    keys = data.draw(st.lists(strings().filter(is_unknown), max_size=4, unique_by=json.loads))
    parts = known + [f"{key}:{data.draw(values())}" for key in keys]
    same("{" + ", ".join(data.draw(st.permutations(parts))) + "}", there_and_back)


def is_unknown(key):
    return json.loads(key) not in MEANT


@pytest.mark.parametrize("depth", [1, 2, 127, 128])
@pytest.mark.parametrize("place", ["args", "custom", "unknown"])
def test_values_nested_up_to_128_levels_are_returned_verbatim(there_and_back, connect, place, depth):
    """W7: the job's own object is the first level."""
    inner = depth - 2  # below the job's object and the member's own value
    nested = "[" * inner + "]" * inner if inner > 0 else "1"
    member = {"args": f'"args":[{nested}]', "custom": f'"custom":{{"a":{nested}}}', "unknown": f'"zz":[{nested}]'}[
        place
    ]
    rest = "" if place == "args" else ',"args":[]'
    same(f'{{"jid":"verbatim1","jobtype":"t",{member}{rest}}}', there_and_back)


@pytest.mark.parametrize(
    "args",
    [
        "[9007199254740993,-9223372036854775809,18446744073709551616,1" + "0" * 400 + "]",
        "[1.0,-0.0,-0,1e400,1E-400,0.1000000000000000055511151231257827]",
        r'["\u0000","\ud800","\udfff\ud800","\/","é","\u00e9","😀","\ud83d\ude00"]',
        '["\u2028\u2029\x7f\x85","￿"]',
        '[{"b":1,"a":2,"b":3}]',
        "[ ]",
    ],
)
def test_edge_case_numbers_and_strings_are_returned_verbatim(there_and_back, args):
    same(f'{{"jid":"verbatim1","jobtype":"t","args":{args}}}', there_and_back)


def test_pushb_keeps_the_text_of_each_job(connect):
    """W12: PUSHB keeps the text of each job too."""
    client = connect(**worker())
    texts = [
        f'{{"jid":"bulk-{number}..","zz":1.0,"jobtype":"t","args":[{args}]}}'
        for number, args in enumerate(["1.0", "1" + "0" * 30, r'"\ud800\u0000"'])
    ]
    assert client.ask(f"PUSHB [ {' , '.join(texts)} ]") == b"{}"
    for text in texts:
        assert client.ask("FETCH default").decode().startswith(text[:-1])


def test_a_requeued_failed_job_is_returned_verbatim_with_its_failure(connect):
    client = connect(**worker())
    text = r'{"jid":"failed-1","zz":1.0,"jobtype":"t","args":[1.0,"\ud800"],"custom":{"b":1e2,"a":-0}}'
    client.ask(f"PUSH {text}")
    client.ask("FETCH default")
    assert client.ask('FAIL {"jid":"failed-1","errtype":"E","message":"m"}') == b"+OK"
    assert client.ask('MUTATE {"cmd":"requeue","target":"retries"}') == b"+OK"
    got = client.ask("FETCH default").decode()
    assert got.startswith(text[:-1])
    assert json.loads(got)["failure"]["errtype"] == "E"


def test_another_connection_fetches_a_job_with_unchanged_args(connect):
    """Another connection fetches the same job unchanged."""
    producer, consumer = connect(), connect(**worker())
    args = ["x" * 100_000, {"deep": [1.5, None]}]
    assert producer.ask(push(jid="other-connection", args=args)) == b"+OK"
    assert json.loads(consumer.ask("FETCH default"))["args"] == args
