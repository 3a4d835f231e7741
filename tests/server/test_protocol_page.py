"""docs/reference/protocol.md matches the server: it quotes each error and lists each command."""

import re
from pathlib import Path

import pytest

from django_faktory.core.protocol.commands import VERBS
from tests.server.raw import RawClient, push, worker

pytestmark = pytest.mark.once

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")

ANSWERS = [
    ("nonsense", "-ERR unknown command "),
    ("BATCH STATUS b-none", "-ERR no such batch b-"),
    ("PUSH {", "-ERR invalid JSON: "),
    ("PUSH {}", "-ERR jobs must have a reasonable jid parameter: "),
    ("PUSHB {", "-ERR invalid JSON: "),
    ("ACK {}", "-ERR invalid ACK "),
    ('FAIL {"jid":1}', "-ERR invalid FAIL"),
    ("FAIL {}", "-ERR missing JID: "),
    ('FAIL {"jid":"unknown-1"}', "-ERR Job not found "),
    ("BEAT {}", "-ERR invalid BEAT "),
    ('BEAT {"wid":"unknown-1"}', "-ERR unknown worker "),
    ('MUTATE {"cmd":"x","target":"dead"}', "-ERR unknown mutate operation "),
    ('MUTATE {"cmd":"kill","target":"x"}', "-ERR invalid target for mutation command: "),
    ('MUTATE {"cmd":"kill","target":"dead","filter":{"jid":[]}}', "-ERR invalid MUTATE"),
    ("QUEUE", "-ERR no such QUEUE subcommand: "),
    ("QUEUE PAUSE", "-ERR QUEUE PAUSE: expected the names of queues, or * for all, got none"),
    ("QUEUE LATENCY *", "-ERR QUEUE LATENCY does not support wildcards; name the queues"),
    ("FLUSH", "-ERR FLUSH is disabled; "),
    ('TRACK SET {"jid":1}', "-ERR invalid TRACK SET: "),
    ("TRACK GET", "-ERR invalid TRACK GET: expected the jid of a job"),
]


@pytest.mark.parametrize(("line", "beginning"), ANSWERS, ids=[line for line, _ in ANSWERS])
def test_an_error_matches_the_page_and_leaves_the_connection_open(connect, line, beginning):
    """Each error line is in the page. Rules: W5, W9, W16, W17, W21, W23 to W25, W27."""
    assert f"`{beginning.strip()}" in PAGE
    client = connect(**worker())
    assert client.ask(line).decode().startswith(beginning)
    assert client.ask(push(jid="still-open")) == b"+OK"


@pytest.mark.parametrize(
    ("line", "beginning"),
    [
        ("PUSH {}", "-ERR expected HELLO {…} as the first command, got "),
        ('HELLO {"v":3}', "-ERR invalid HELLO: v: expected 2 "),
        ('HELLO {"v":2,"pwdhash":"00"}', "-ERR Invalid password"),
    ],
)
def test_a_bad_hello_gets_the_documented_error_and_closes_the_connection(serve, line, beginning):
    """W2: the server closes after the error."""
    assert f"`{beginning.strip()}" in PAGE
    client = RawClient(serve(password="s3cret").address)
    assert client.reply().startswith(b'+HI {"v":2,')
    assert client.ask(line).decode().startswith(beginning.strip())
    assert client.is_closed()
    client.close()


def test_the_page_lists_every_command():
    [verbs] = re.findall(r"^verb +=(.*)$", PAGE, flags=re.MULTILINE)
    assert {verb.strip() for verb in verbs.split("|")} == set(VERBS)
    section = PAGE.partition("## The commands")[2].partition("\n## ")[0]
    assert {verb for verb in VERBS if f"| `{verb}" not in section} == {"HELLO"}
