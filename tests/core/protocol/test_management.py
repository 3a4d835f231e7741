"""MUTATE, QUEUE and FLUSH as text, in both directions. Rules: W5, W23 to W25."""

import pytest

from django_faktory.core.json.jsontext import compact
from django_faktory.core.mutation import Mutation
from django_faktory.core.protocol.commands import parse
from django_faktory.core.protocol.management import Mutate, PauseQueues
from django_faktory.errors import InvalidPayload

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "mutation"),
    [
        ('{ "cmd" : "clear", "target" : "dead" }', Mutation(command="clear", target="dead")),
        ('{"cmd":"kill","target":"dead","filter":null}', Mutation(command="kill", target="dead")),
        ('{"cmd":"kill","target":"dead","filter":{}}', Mutation(command="kill", target="dead")),
        (
            '{"cmd":"kill","target":"dead","filter":{"jids":null,"jobtype":"","regexp":null}}',
            Mutation(command="kill", target="dead"),
        ),
        (
            '{"cmd":"kill","target":"dead","filter":{"jids":["a","b","a"]}}',
            Mutation(command="kill", target="dead", jids=("a", "b")),
        ),
    ],
)
def test_empty_and_null_filters_select_every_job(text, mutation):
    """W23: empty and null filters select every job."""
    assert parse(f"MUTATE {text}") == Mutate(mutation)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("MUTATE", "invalid JSON: expected an object"),
        ("MUTATE []", "invalid JSON: expected an object"),
        (
            'MUTATE {"cmd":"KILL","target":"dead"}',
            "unknown mutate operation 'KILL': cmd: expected clear, kill, discard or",
        ),
        ('MUTATE {"cmd":[],"target":"dead"}', "unknown mutate operation []"),
        ('MUTATE {"target":"dead"}', "unknown mutate operation None"),
        (
            'MUTATE {"cmd":"kill","target":"enqueued"}',
            "invalid target for mutation command: target: expected scheduled,",
        ),
        ('MUTATE {"cmd":"kill","target":{}}', "invalid target for mutation command"),
        ('MUTATE {"cmd":"kill","target":"dead","filter":[]}', "invalid MUTATE: filter: expected an object"),
        ('MUTATE {"cmd":"kill","target":"dead","filter":{"jids":"a"}}', "invalid MUTATE: jids: expected an array"),
        ('MUTATE {"cmd":"kill","target":"dead","filter":{"jids":[1]}}', "invalid MUTATE: jids: expected an array of"),
        ('MUTATE {"cmd":"kill","target":"dead","filter":{"jobtype":1}}', "invalid MUTATE: jobtype: expected a string"),
        ('MUTATE {"cmd":"kill","target":"dead","filter":{"regexp":[]}}', "invalid MUTATE: regexp: expected a string"),
        (
            f'MUTATE {{"cmd":"kill","target":"dead","filter":{{"regexp":"{"*" * 1001}"}}}}',
            "invalid MUTATE: regexp: expected at most 1000 characters, got 1001",
        ),
        ("QUEUE", "no such QUEUE subcommand: ; use PAUSE, RESUME, REMOVE or LATENCY"),
        ("QUEUE STOP a", "no such QUEUE subcommand: STOP; use PAUSE"),
        ("QUEUE PAUSE", "QUEUE PAUSE: expected the names of queues, or * for all, got none"),
        ("QUEUE remove ", "QUEUE REMOVE: expected the names of queues"),
        ("QUEUE PAUSE a b!", 'cannot get "b!" queue: queue names must match'),
        ("QUEUE RESUME a *", 'cannot get "*" queue: queue names must match'),
        ("QUEUE LATENCY *", "QUEUE LATENCY does not support wildcards; name the queues"),
        ("QUEUE LATENCY a/b", 'cannot get "a/b" queue'),
    ],
)
def test_an_invalid_command_is_refused_with_the_broken_rule(line, message):
    """W5, W23, W24: the message names the broken rule."""
    with pytest.raises(InvalidPayload) as refusal:
        parse(line)
    assert str(refusal.value).startswith(message)


KILL = '{"cmd":"kill","target":"dead"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *[
            (
                f'MUTATE {KILL},"{name}":{{"jids":["a"]}}}}',
                f"invalid MUTATE: unknown member '{name}'; did you mean filter?",
            )
            for name in ("Filter", "filters", "fliter", "FILTER", "filter ")
        ],
        *[
            (f'MUTATE {KILL},"{name}":[]}}', f"invalid MUTATE: unknown member '{name}'; did you mean filter.{name}?")
            for name in ("jids", "jobtype", "regexp")
        ],
        *[
            (f'MUTATE {KILL},"filter":{{"{name}":[]}}}}', f"invalid MUTATE: filter: unknown member '{name}'; {hint}")
            for name, hint in [
                ("jid", "did you mean jids?"),
                ("job_type", "did you mean jobtype?"),
                ("Regexp", "did you mean regexp?"),
                ("queue", "expected jids, jobtype, regexp"),
            ]
        ],
        (f'MUTATE {KILL},"max":1}}', "invalid MUTATE: unknown member 'max'; expected cmd, target, filter"),
        (f'MUTATE {KILL},"filter":{{"jids":["a"]}},"filter":null}}', "invalid JSON: key 'filter' given twice"),
        (f'MUTATE {KILL},"filter":{{"jobtype":"a","jobtype":""}}}}', "invalid JSON: key 'jobtype' given twice"),
        (
            'MUTATE {"cmd":"clear","target":"dead","filter":{"jids":["a"]}}',
            "invalid MUTATE: filter: clear takes none and drops the whole set; use discard",
        ),
        ("FLUSH default", "invalid FLUSH: expected nothing after it, got default; it deletes all jobs"),
        ('FLUSH {"queue":"a"}', "invalid FLUSH: expected nothing after it"),
    ],
)
def test_a_command_that_changes_many_jobs_refuses_what_it_does_not_understand(text, message):
    """W23, W25: a misspelled guard would otherwise change every job."""
    with pytest.raises(InvalidPayload) as refusal:
        parse(text)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("verb", ["PAUSE", "pause", "Pause"])
def test_queue_subcommands_are_case_insensitive(verb):
    """W5: repeated names and spaces are dropped too."""
    assert parse(f"QUEUE {verb} a  b a") == PauseQueues(("a", "b"))


@pytest.mark.parametrize(
    ("text", "compacted"),
    [
        ('{"a":1}', '{"a":1}'),
        ('{ "a" : [ 1 , 2 ] }\n', '{"a":[1,2]}'),
        ('{"a b": "c \\" d", "e" :" "}', '{"a b":"c \\" d","e":" "}'),
        ('{"a": "\\\\", "b": " "}', '{"a":"\\\\","b":" "}'),
    ],
)
def test_compact_removes_white_space_between_tokens_but_not_in_strings(text, compacted):
    """W23: globs are matched against the compact text."""
    assert compact(text) == compacted
