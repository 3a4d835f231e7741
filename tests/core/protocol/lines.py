"""Random and hostile lines of PUSH, FETCH and ACK: of the usual shape, near it, and far from it."""

import json

MEMBERS = {
    "jid": ['"%s"', '"%s"', '"%s"', '"short"', "17", "null", '""', '"\\u0000aaaaaaaaa"', '"%s\\n"',
        '"' + "j" * 256 + '"', '"ü%s"'],
    "jobtype": ['"noop"', '"noop"', '"noop"', '""', "null", "[]", '"no\\top"', '"' + "t" * 256 + '"', '"Käse 🧀"',
        '"\x7f"'],
    "args": ["[]", "[1,2]", '[1,"string",3]', '[{"a":{"b":[null,true,1.0]}}]', "[12345678901234567890123]", '["jid"]',
        "{}", "null", '"[]"', "[NaN]", "[1,]", "[" * 127 + "]" * 127, "[" * 130 + "]" * 130, '["\\u0000"]',
        '["\\ud800"]', '["\x01"]', '[{"a":1,"a":2}]', "[1e999]", "[-0]", "[01]", '["{"]', ' [1 , "a b"] ',
        '["Käse 🧀"]'],
    "queue": ['"%q"', '"%q"', '"%q"', '""', "null", '"a b"', '"a\\u0062"', "1", '"' + "q" * 256 + '"', '"q.w-e_1"'],
    "retry": ["5", "25", "0", "-1", "-7", "null", "5.0", "5e0", "-0", "99999999999999999999", "true", '"5"', '""',
        "+5", "05"],
    "created_at": ['"2026-11-21T00:00:00Z"', '"2026-11-21T00:00:00.123456789Z"', '"2026-11-21T00:00:00+01:00"', '""',
        "null", "1", '"2026-02-30T00:00:00Z"', '"2026-11-21T24:00:00Z"', '"2026-11-21t00:00:00z"',
        '"2026-11-21 00:00:00Z"', '"2026-11-21T00:00:60Z"', '"0001-01-01T00:00:00Z"', '"0000-01-01T00:00:00Z"',
        '"9999-12-31T23:59:59.9999999999Z"', '"٢٠٢٦-11-21T00:00:00Z"', '"2026-11-21T00:00:00.Z"'],
    "reserve_for": ["60", "1800", "10", "86400", "86401", "-1", "null", "60.5", '"60"'],
    "backtrace": ["0", "5", "-1", "1000", "null", "false"],
    "priority": ["5", "9", "0", "10", "null"],
    "at": ['""', '"2020-01-01T00:00:00Z"', '"2050-01-01T00:00:00Z"', '"soon"', "null"],
    "custom": ["{}", "null", '{"expires_in":3600}', '{"a":1,"a":2}', '{"track":1}', "[]", '{"lock":"key"}',
        '{"result_ttl":60}'],
    "enqueued_at": ['"2020-01-01T00:00:00Z"'],
    "failure": ["{}"],
    "\\u006aid": ['"87654321"'],
    "unknown": ["1", '"x"', "[[]]"],
}  # fmt: skip
USUAL = ("jid", "jobtype", "args", "queue", "retry", "created_at")
QUEUES = ("a", "b", "c", "a b", "b a c", "a a", "a ü b", "c  a", " a", "a\tb", "a * b", "a" * 256 + " a")


def push(random, jid, queue="a"):
    """Return a PUSH, usually of a job with usual members, sometimes with hostile ones."""
    names = [*USUAL]
    for name in MEMBERS:
        if random.random() < (0.05 if name in USUAL else 0.03):
            names.append(name)  # a second time, if it is usual
    if random.random() < 0.5:
        random.shuffle(names)
    if random.random() < 0.1:
        del names[random.randrange(len(names))]
    is_hostile = random.random() < 0.5
    members = []
    for name in names:
        values = MEMBERS[name]
        value = random.choice(values) if is_hostile and random.random() < 0.3 else values[0]
        members.append((name, value.replace("%s", jid).replace("%q", queue)))
    comma, colon = random.choice([(",", ":"), (",", ":"), (", ", ": "), (" , ", " : "), (",\t", "\t:")])
    job = comma.join(f'"{name}"{colon}{value}' for name, value in members)
    return "PUSH {" + job + random.choice(["}", "}", "}", "}", "} ", "}}", "", "\r"])


def ack(random, jid):
    """Return an ACK, usually a valid one."""
    texts = [
        f'{{"jid":"{jid}"}}',
        f'{{"jid":"{jid}"}}',
        f'{{"jid": "{jid}"}}',
        f'{{ "jid" : "{jid}" }} ',
        f'{{"jid":"{jid}","x":1}}',
        f'{{"jid":"none","jid":"{jid}"}}',
        f'{{"jid":"{jid}","jid":1}}',
        '{"jid":1}',
        '{"jid":""}',
        "{}",
        "[]",
        f'"{jid}"',
        '{"jid":"' + "j" * 300 + '"}',
        '{"jid":"\\u0000"}',
        '{"jid":"\\ud800"}',
        '{"jid":"ü"}',
        f'{{"jid":"{jid}"',
        f'{{"jid":"{jid}"}}x',
        "{" * 200,
        '{"jid":' + "[" * 200,
        json.dumps({"jid": jid, "wid": "other"}),
    ]
    return "ACK " + random.choice(texts if random.random() < 0.5 else texts[:2])


def fetch(random):
    """Return a FETCH of at least one queue among a, b and c."""
    return "FETCH " + random.choice(QUEUES)


def mutated(random, line):
    """Return the line with a byte changed, removed, repeated or inserted; never a line end or one more line."""
    at = random.randrange(len(line))
    changed = random.choice([b"", line[at : at + 1] * 2, bytes([random.randrange(256)]), line[at : at + 1] + b"\x80"])
    return (line[:at] + changed + line[at + 1 :]).replace(b"\n", b" ")
