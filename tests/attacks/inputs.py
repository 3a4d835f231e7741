"""Define the costliest inputs that each verb of the server permits, and the costliest that it rejects.

An input is a function of the longest permitted line and the connection's number. It returns the parts of a command.
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache

from django_faktory.core.protocol import batches, commands, limits, management, tracking

WORKER = {"hostname": "attacker", "pid": 1, "labels": []}
SMALL_COMMANDS = 100
"""Number of commands that one connection sends before it reads the replies."""

SMALL_BYTES, SMALL_LINE_BYTES = 2**17, 2**19
"""Sizes in the tests: of a normal input, and of one that must exceed a limit of 256 KiB."""

ANSWERED = rb"[+$]"
REFUSED = rb"-ERR "
NO_ROOM = b"-ERR too many long commands are unfinished"
"""The reply to a long line while other connections have unfinished long commands; valid for every attack."""

NAMES_A_LIMIT = rb"-ERR .*(at most|too long|too many|more than|deeper than)"


@dataclass(frozen=True)
class Attack:
    """One input. Every reply must match `reply`; a connection may also be closed without a reply."""

    name: str
    verb: type | None
    is_legal: bool
    parts: object = field(repr=False)
    reply: bytes = ANSWERED
    replies: int = 1
    hello: str = "worker"
    """Role in which a connection sends HELLO: "worker" or "producer"; "" sends none."""
    is_last: bool = False
    """True if the connection ends with the reply, so that the next round opens another one."""
    reads: bool = True
    server: str = "plain"
    """Required option of the server: "password" or "tls"; "plain" for neither."""
    addresses: bool = False
    """True if each connection comes from a separate address."""
    small: int = SMALL_BYTES
    """Size in the tests; at full size an input is as long as the longest permitted line."""

    def __str__(self):
        verb = self.verb.__name__ if self.verb else "connection"
        return f"{verb}: {self.name}"


@lru_cache(4)
def filler(size, piece=b"x"):
    """Return about `size` bytes. The result is cached, so that 60 connections share one object."""
    return piece * (size // len(piece))


def line(verb, value):
    return b"%s %s\r\n" % (verb.encode(), json.dumps(value, separators=(",", ":")).encode())


def around(head, middle, tail):
    return (head, middle, tail + b"\r\n")


def job(number, *, size, args=None, **members):
    """Return a PUSH of nearly `size` bytes, almost all of them in its arguments."""
    members = {"jid": f"attack-{number:04d}", "jobtype": "noop", "queue": "attacked"} | members
    head = json.dumps(members)[:-1].encode() + b',"args":['
    middle = filler(size - 1000) if args is None else args
    quote = b'"' if args is None else b""
    return around(b"PUSH " + head + quote, middle, quote + b"]}")


def names(count, length, prefix="q"):
    return " ".join(f"{prefix}{number:06d}{'n' * (length - 7)}" for number in range(count)).encode()


def longest_names(size):
    """Return the maximum number of queue names at their maximum length; fewer names for small sizes."""
    return names(min(limits.MAX_FETCH_QUEUES, size // 1000), 255)


def many(text):
    return lambda size, number: (b"".join([text(number, n) for n in range(SMALL_COMMANDS)]),)


def deep(size, levels=None):
    levels = levels or size // 2 - 2000
    return filler(levels, b"[") + filler(levels, b"]")


def bulk(size, number, limit=None, **members):
    one = json.dumps({"jobtype": "n", "args": [], "queue": "attacked"} | members)[:-1]
    count = min((size - 100) // (len(one) + 30), 150_000 if limit is None else limit)
    jobs = (f'{one},"jid":"b{number:03d}-{n:07d}"}}' for n in range(count))
    return (f"PUSHB [{','.join(jobs)}]\r\n".encode(),)


def most_jobs(size, number):
    return bulk(size, number, limit=limits.MAX_BULK_JOBS)


def unique_bulk(size, number, **members):
    return bulk(size, number, limit=limits.MAX_LOOKED_UP_JOBS, custom={"unique_for": 60}, **members)


def jids(count):
    return b",".join([b'"%08x"' % number for number in range(count)])


def mutate(**wanted):
    return line("MUTATE", {"cmd": "kill", "target": "dead", "filter": wanted})


def mutate_jids(count):
    return lambda size, number: (
        b'MUTATE {"cmd":"kill","target":"retries","filter":{"jids":[%s]}}\r\n' % jids(min(count, size // 12 - 20)),
    )


def queue_names(verb):
    legal = lambda size, number: (b"QUEUE %s %s\r\n" % (verb, longest_names(size)),)  # noqa: E731
    illegal = lambda size, number: (b"QUEUE %s %s\r\n" % (verb, names(size // 10, 8)),)  # noqa: E731
    return legal, illegal


def batch_new(size, number):
    callback = {"jobtype": "Done", "args": ["x" * min(size // 2 - 1000, 250_000)]}
    return (line("BATCH NEW", {"description": "attack", "success": callback}),)


def of_batch(verb):
    text = verb.encode()
    return (
        many(lambda number, n: b"BATCH %s b-%032d\r\n" % (text, n)),
        lambda size, number: (b"BATCH %s b-" % text, filler(size - 1000), b"\r\n"),
    )


def object_of(verb, **members):
    """Return a function that makes a command: its object contains one string as long as a line permits."""

    def parts(size, number):
        head = json.dumps(members)[:-1].encode() + (b"," if members else b"")
        return around(verb.encode() + b" " + head + b'"s":"', filler(size - 1000), b'"}')

    return parts


def hello_line(number, n=0, **members):
    return line("HELLO", {"v": 2, "wid": f"attacker-{number:03d}-{n:05d}"} | WORKER | members)


def ask(text):
    return lambda size, number: (text,)


def small(verb, **members):
    return many(lambda number, n: line(verb, {"jid": f"small-{number:03d}-{n:04d}"} | members))


def legal(verb, name, parts, reply=ANSWERED, **more):
    return Attack(name, verb, True, parts, reply, **more)


def illegal(verb, name, parts, reply=NAMES_A_LIMIT, small=SMALL_LINE_BYTES, **more):
    return Attack(name, verb, False, parts, reply, small=small, **more)


EITHER = rb"(\$|\+OK|-ERR )"
"""Pattern for commands with unknown names, which are answered or rejected."""

PAUSES, TOO_MANY_PAUSES = queue_names(b"PAUSE")
RESUMES, TOO_MANY_RESUMES = queue_names(b"RESUME")
REMOVES, TOO_MANY_REMOVES = queue_names(b"REMOVE")
LATENCIES, TOO_MANY_LATENCIES = queue_names(b"LATENCY")
OPENS, LONG_OPEN = of_batch("OPEN")
COMMITS, LONG_COMMIT = of_batch("COMMIT")
ASKS, LONG_ASK = of_batch("STATUS")
STARS = ("*" + "a" * 9) * limits.MAX_STARS

OF_JOBS = (
    legal(commands.Push, "one long string", lambda size, number: job(number, size=size)),
    legal(commands.Push, "128 levels deep, wide", lambda size, number: job(
        number, size=size, args=deep(size, 120) + b"," + filler(min(size, 2**20) - 2000, b"[],") + b"0")),
    legal(commands.Push, "only brackets", lambda size, number: job(
        number, size=size, args=filler(size - 2000, b"[" * 60 + b"]" * 60 + b",") + b"0")),
    legal(commands.Push, "brackets between strings", lambda size, number: job(
        number, size=size, args=filler(size - 2000, b'"[",[],') + b"0")),
    legal(commands.Push, "unique, most arguments", lambda size, number: job(
        number, size=size, args=filler(limits.MAX_COMPARED - 100, b'{"k":1.0},') + b"0", custom={"unique_for": 60}),
          rb"(\+OK|-NOTUNIQUE)"),
    illegal(commands.Push, "unique, long arguments", lambda size, number: job(
        number, size=size, args=filler(size - 2000, b'{"k":1.0},') + b"0", custom={"unique_for": 60})),
    legal(commands.Push, "many members", lambda size, number: job(
        number, size=2000, **{f"m{n}": [[]] * 150 for n in range(90)})),
    legal(commands.Push, "many members of custom", lambda size, number: job(
        number, size=2000, custom={f"m{n}": 1 for n in range(min(600_000, size // 14))})),
    legal(commands.Push, "many small commands", small("PUSH", jobtype="n", args=[], queue="attacked"),
          replies=SMALL_COMMANDS),
    illegal(commands.Push, "a million levels deep", lambda size, number: job(
        number, size=size, args=deep(size)), rb"-ERR .*(deep|level)"),
    illegal(commands.Push, "too many members", lambda size, number: job(
        number, size=2000, **{f"m{n}": 1 for n in range(min(60_000, size // 14))}), rb"-ERR .*at most 100 members"),
    illegal(commands.Push, "longer than a line", lambda size, number: job(number, size=size + 5000), is_last=True),
    legal(commands.PushBulk, "many jobs", most_jobs),
    illegal(commands.PushBulk, "too many jobs", bulk, rb"(\$|-ERR .*at most)"),
    legal(commands.PushBulk, "many unique jobs", unique_bulk),
    legal(commands.PushBulk, "many unique jobs with arguments", lambda size, number: unique_bulk(
        size, number, args=[{"k": 1.0}] * 600)),
    legal(commands.PushBulk, "one long job", lambda size, number: around(
        b'PUSHB [{"jid":"bulk-%04d","jobtype":"n","queue":"attacked","args":["' % number,
        filler(size - 2000), b'"]}]')),
    illegal(commands.PushBulk, "numbers", lambda size, number: around(b"PUSHB [", filler(size - 100, b"0,"), b"0]"),
            rb"[-$]", small=2**14),
    illegal(commands.PushBulk, "deep", lambda size, number: around(b"PUSHB ", deep(size), b""), rb"[-$]",
            small=SMALL_BYTES),
    legal(commands.Fetch, "1000 long names", lambda size, number: (b"FETCH %s\r\n" % longest_names(size),)),
    illegal(commands.Fetch, "more names", lambda size, number: (b"FETCH %s\r\n" % names(size // 10, 8),)),
    illegal(commands.Fetch, "a long name", lambda size, number: (b"FETCH ", filler(size - 100), b"\r\n"), EITHER),
    legal(commands.AckJob, "many small commands", small("ACK"), replies=SMALL_COMMANDS),
    illegal(commands.AckJob, "a long string", object_of("ACK", jid="unknown-0001")),
    illegal(commands.AckJob, "deep", lambda size, number: around(b"ACK ", deep(size, 100_000), b""), REFUSED),
    legal(commands.FailJob, "many small commands", small("FAIL"), EITHER, replies=SMALL_COMMANDS),
    legal(commands.FailJob, "a long backtrace", lambda size, number: around(
        b'FAIL {"jid":"unknown-%04d","backtrace":[' % number, filler(size - 1000, b'"line",'), b'""]}'), EITHER),
    legal(commands.FailJob, "a long message", lambda size, number: around(
        b'FAIL {"jid":"unknown-%04d","message":"' % number, filler(size - 1000), b'"}'), EITHER),
    illegal(commands.FailJob, "a backtrace of objects", lambda size, number: around(
        b'FAIL {"jid":"unknown-%04d","backtrace":[' % number, filler(size - 1000, b"{},"), b"{}]}"), REFUSED,
        small=SMALL_BYTES),
)  # fmt: skip

OF_MANAGEMENT = (
    legal(management.Mutate, "many jids", mutate_jids(limits.MAX_JIDS - 10)),
    legal(management.Mutate, "a glob of many stars", ask(mutate(regexp=STARS))),
    illegal(management.Mutate, "too many jids", mutate_jids(10**6), rb"(\+OK|-ERR .*at most)", small=SMALL_BYTES),
    illegal(management.Mutate, "a long glob", lambda size, number: around(
        b'MUTATE {"cmd":"kill","target":"dead","filter":{"regexp":"', filler(size - 1000, b"*a"), b'"}}')),
    legal(management.PauseQueues, "1000 long names", PAUSES),
    illegal(management.PauseQueues, "more names", TOO_MANY_PAUSES),
    legal(management.ResumeQueues, "1000 long names", RESUMES),
    illegal(management.ResumeQueues, "more names", TOO_MANY_RESUMES),
    legal(management.RemoveQueues, "1000 long names", REMOVES),
    illegal(management.RemoveQueues, "more names", TOO_MANY_REMOVES),
    legal(management.QueueLatency, "1000 long names", LATENCIES),
    illegal(management.QueueLatency, "more names", TOO_MANY_LATENCIES),
    legal(management.Flush, "many small commands", many(lambda number, n: b"FLUSH\r\n"),
          rb"-ERR FLUSH is disabled", replies=SMALL_COMMANDS),
    illegal(management.Flush, "a long line", lambda size, number: (b"FLUSH ", filler(size - 100), b"\r\n"), REFUSED),
    legal(commands.Info, "many small commands", many(lambda number, n: b"INFO\r\n"), replies=SMALL_COMMANDS),
    illegal(commands.Info, "longer than a line", lambda size, number: (b"INFO ", filler(size + 100), b"\r\n"),
            is_last=True),
)  # fmt: skip

OF_WORKERS = (
    legal(commands.Hello, "new workers", lambda size, number: (
        hello_line(number, labels=["l" * 60] * 50),), rb"\+OK", hello="", is_last=True),
    illegal(commands.Hello, "more than 4 KiB", lambda size, number: around(
        b'HELLO {"v":2,"hostname":"', filler(size), b'"}'), hello="", is_last=True),
    illegal(commands.Hello, "again and again", many(hello_line), rb"-ERR unknown command", replies=SMALL_COMMANDS),
    legal(commands.End, "again and again", ask(b"END\r\n"), rb"\+OK", is_last=True),
    illegal(commands.End, "longer than a line", lambda size, number: (b"END ", filler(size + 100), b"\r\n"),
            is_last=True),
    legal(commands.BeatWorker, "many small commands", many(
        lambda number, n: line("BEAT", {"wid": f"attacker-{number:03d}-00000", "rss_kb": n})), replies=SMALL_COMMANDS),
    illegal(commands.BeatWorker, "a long string", object_of("BEAT", wid="attacker-000")),
    illegal(commands.BeatWorker, "a long wid", lambda size, number: (
        line("BEAT", {"wid": "w" * min(size // 2, 200_000)}),)),
)  # fmt: skip

OF_BATCHES = (
    legal(batches.BatchNew, "a long callback", batch_new),
    illegal(batches.BatchNew, "a longer callback", lambda size, number: around(
        b'BATCH NEW {"success":{"jobtype":"D","args":["', filler(size - 1000), b'"]}}')),
    legal(batches.BatchOpen, "many small commands", OPENS, EITHER, replies=SMALL_COMMANDS),
    illegal(batches.BatchOpen, "a long bid", LONG_OPEN, REFUSED),
    legal(batches.BatchCommit, "many small commands", COMMITS, EITHER, replies=SMALL_COMMANDS),
    illegal(batches.BatchCommit, "a long bid", LONG_COMMIT, REFUSED),
    legal(batches.BatchAsk, "many small commands", ASKS, EITHER, replies=SMALL_COMMANDS),
    illegal(batches.BatchAsk, "a long bid", LONG_ASK, REFUSED),
    legal(tracking.TrackSet, "many small commands", small("TRACK SET", percent=5), replies=SMALL_COMMANDS),
    legal(tracking.TrackSet, "a long desc", lambda size, number: (
        line("TRACK SET", {"jid": "unknown-0001", "desc": "d" * min(size // 2, 250_000)}),)),
    illegal(tracking.TrackSet, "a longer desc", lambda size, number: around(
        b'TRACK SET {"jid":"unknown-0001","desc":"', filler(size - 1000), b'"}')),
    legal(tracking.TrackGet, "many small commands", many(lambda number, n: b"TRACK GET unknown-%04d\r\n" % n),
          replies=SMALL_COMMANDS),
    illegal(tracking.TrackGet, "a long jid", lambda size, number: (b"TRACK GET ", filler(size - 100), b"\r\n"), EITHER),
)  # fmt: skip

CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)

OF_CONNECTIONS = (
    illegal(None, "garbage before HELLO", lambda size, number: (bytes(range(256)) * 16, b"\r\n"), REFUSED, hello="",
            is_last=True),
    illegal(None, "a TLS handshake without TLS", lambda size, number: (CLIENT_HELLO, b"\r\n"), REFUSED, hello="",
            is_last=True),
    illegal(None, "unknown verbs", many(lambda number, n: b"\xc3\xa9 %d\r\n" % n), rb"-ERR unknown command",
            replies=SMALL_COMMANDS),
    illegal(None, "empty lines", many(lambda number, n: b"\r\n"), rb"-ERR unknown command", replies=SMALL_COMMANDS),
    illegal(None, "no UTF-8", lambda size, number: (b"PUSH ", filler(size - 100, b"\xff\xfe"), b"\r\n"),
            rb"-ERR invalid JSON: the line is not UTF-8"),
    illegal(None, "half a line", lambda size, number: (b"PUSH ", filler(size - 100)), NAMES_A_LIMIT, reads=False),
    illegal(None, "no reply is read", bulk, reads=False),
    illegal(None, "wrong passwords", lambda size, number: (line("HELLO", {"v": 2, "pwdhash": "0" * 64}),),
            rb"-ERR (Invalid password|too many wrong passwords)", hello="", is_last=True, server="password",
            addresses=True),
    illegal(None, "plain text to a TLS port", lambda size, number: (filler(min(size, 2**20)), b"\r\n"), rb".*",
            hello="", is_last=True, server="tls"),
    illegal(None, "TLS handshakes that do not end", lambda size, number: (CLIENT_HELLO[:50],), hello="", reads=False,
            server="tls"),
)  # fmt: skip

ATTACKS = (*OF_JOBS, *OF_MANAGEMENT, *OF_WORKERS, *OF_BATCHES, *OF_CONNECTIONS)
