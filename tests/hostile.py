"""Texts with which a client may attack viewers, and a database filled with one of them in every field.

They take the way of the wire: each command is written as a line and parsed by the protocol's own parser.
"""

import json
import unicodedata
from datetime import timedelta
from html.parser import HTMLParser
from urllib.parse import urlencode

from django.utils import timezone

from django_faktory.brokers import get_broker
from django_faktory.core.payloads import Ack, FetchRequest, failure
from django_faktory.core.protocol import commands
from django_faktory.core.queries import is_about
from django_faktory.errors import FaktoryError
from django_faktory.models import Batch, Job, JobLock, OutboxEntry, WorkerProcess
from django_faktory.models.cron import CronEntry, CronRun
from django_faktory.store.cron import entries
from django_faktory.tasks import cron

HARMLESS = "harmless text"
SIZE = 60_000
"""Characters of the long word. A command other than PUSH has at most 262,144 bytes, and some have it four times."""
MEGABYTE = "<b>huge</b>" * (1_000_000 // 11)
"""A word that only a PUSH may contain."""
TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

TEXTS = {
    "script": "<script>alert(1)</script>",
    "script that ends one": "</script><script>alert(1)</script>",
    "picture": "<img src=x onerror=alert(1)>",
    "drawing": "<svg/onload=alert(1)>",
    "form": '</form><form action="https://evil.example/"><input name=why>',
    "end of a table": "</td></tr></table><h1>nothing is wrong</h1>",
    "end of a title": "</title><body onload=alert(1)>",
    "end of a text area": "</textarea><script>alert(1)</script>",
    "double quote": '" onmouseover="alert(1)" x="',
    "single quote": "' onfocus='alert(1)' autofocus x='",
    "no quote": "x onmouseover=alert(1) //",
    "address of a script": "javascript:alert(document.cookie)",
    "address of data": "data:text/html,<script>alert(1)</script>",
    "entities": "&lt;script&gt;alert(1)&lt;/script&gt; &amp;#x3c;b&amp;#x3e; &#60;b&#62;",
    "comment": "<!--><b>--!> ]]><![CDATA[<b>",
    "base": '<base href="//evil.example/"><style>*{display:none}</style>',
    "template": "{{ request.user.password }}{% load static %}{# #} ${7*7} #{7*7}",
    "format": "%s %(password)s %n %d {0.__class__} {password!r}",
    "SQL": "'; DROP TABLE django_faktory_job; -- \" ` \\",
    "Markdown": "[click](javascript:alert(1)) ![x](//evil.example/x.png) # head\n```html\n<b>",
    "console markup": "[bold red]all is well[/] [link=https://evil.example]x[/link] :smile:",
    "ANSI": "\x1b[2J\x1b[31mred\x1b]0;title\x07\x1b]8;;https://evil.example\x1b\\link\x9b31m",
    "control characters": "a\x01b\x08c\x0bd\x0ce\x7ff\x85g\rh\ti",
    "newlines": "first line\r\nSet-Cookie: a=b\r\n\r\n<b>body</b>\nlast line",
    "NUL": "before\x00after<b>",
    "half of a character": "before\ud83dafter<b>",
    "right to left": "invoice\u202egnp.exe\u202c \u2066isolated\u2067 \u200fmark <b>",
    "zero width": "pay\u200bpal\u200d\ufeff\u2060\u00ad<b>",
    "characters that pile up": "Z" + "\u0335\u0301\u0327" * 60 + "<b>",
    "one long word": "W" * 240 + "<b>",
    "huge": "<b>huge</b>" * (SIZE // 11),
    "emoji and others": "👩‍👩‍👧 𝕳𝖔𝖘𝖙𝖎𝖑𝖊 ﷽ 漢字 <b>\U0010ffff",
    "path": "../../../../etc/passwd%2e%2e%00?a=b&c=d#e",
}  # fmt: skip
"""Texts, each by the attack that it tries."""

NOT_IN_NAMES = {"NUL", "half of a character", "huge"}
"""Texts that cannot be a jid, jobtype or wid: no database stores them, or they exceed 255 characters."""

NOT_PRINTABLE = {name for name, text in TEXTS.items() if not text.isprintable()}

FIRST = ("address of a script", "address of data", "path", "no quote")
"""Texts that attack only if a value begins with them."""
MAX_JOINED = 240
"""Characters of joined texts: they fit in a name with a prefix."""


def _join_texts():
    """Return the texts in few groups, by their names: some tests open 50 pages for each group."""
    groups = [[name] for name in FIRST]
    for name in [name for name in TEXTS if name not in FIRST]:
        for group in groups:
            # Places of names reject a whole group if they reject one of its texts.
            is_same_kind = all((group[0] in kind) == (name in kind) for kind in (NOT_IN_NAMES, NOT_PRINTABLE))
            if is_same_kind and len(" ".join(TEXTS[one] for one in [*group, name])) <= MAX_JOINED:
                group.append(name)
                break
        else:
            groups.append([name])
    return {", ".join(group): " ".join(TEXTS[name] for name in group) for group in groups}


JOINED = _join_texts()
"""Groups of `TEXTS`, joined by spaces."""

REFUSED = {
    "jid": NOT_IN_NAMES, "jobtype": NOT_IN_NAMES, "wid": NOT_IN_NAMES | NOT_PRINTABLE,
    "queue": set(TEXTS),
    "bid": set(TEXTS), "parent": set(TEXTS), "jid of a callback": NOT_IN_NAMES, "jobtype of a callback": NOT_IN_NAMES,
    "lock": {"NUL", "half of a character"}, "at": set(TEXTS), "created_at": set(TEXTS), "expires_at": set(TEXTS),
    "unique_for": set(TEXTS), "unique_until": set(TEXTS), "result_ttl": set(TEXTS), "retry": set(TEXTS),
}  # fmt: skip
"""Texts that are rejected, by place; every other place accepts every text."""


class Sent:
    """A client that sends each text in one place at a time, and records the places that reject it."""

    def __init__(self, text):
        self.text = text
        self.refused = set()
        self.broker = get_broker()
        self._count = 0

    def line(self, line):
        """Parse the line as a server does."""
        return commands.parse(line)

    def as_name(self, place, short="harmless-name"):
        """Return the text if this place accepts it as a name, else `short`; sends it to find out."""
        probe = {
            "jid": lambda text: self.push(jid=text),
            "jobtype": lambda text: self.push(jobtype=text),
            "queue": lambda text: self.push(queue=text),
            "wid": self.hello,
            "bid": lambda text: self.push(custom={"bid": text}),
            "parent": lambda text: self.batch(parent_bid=text),
            "jid of a callback": lambda text: self.batch(callback={"jid": text}),
            "jobtype of a callback": lambda text: self.batch(callback={"jobtype": text}),
            "lock": lambda text: self.push(custom={"lock": text}),
            "at": lambda text: self.push(at=text),
            "created_at": lambda text: self.push(created_at=text),
            "retry": lambda text: self.push(retry=text),
            **{
                option: lambda text, option=option: self.push(custom={option: text})
                for option in ("expires_at", "result_ttl")
            },
            "unique_for": lambda text: self.push(custom={"unique_for": text}),
            "unique_until": lambda text: self.push(custom={"unique_for": 9, "unique_until": text}),
        }[place]
        try:
            probe(self.text)
        except FaktoryError as refusal:
            error = str(refusal)
        else:
            return self.text
        assert error.isprintable(), "one printable line, with the client's text escaped"
        self.refused.add(place)
        return short

    def push(self, *, custom=None, **members):
        """Push a job and return its jid."""
        self._count += 1
        job = {"jid": f"job-{self._count:06}", "jobtype": "harmless", "args": [], "custom": custom or {}, **members}
        payload = self.line(f"PUSH {json.dumps(job)}").job
        [refusal] = self.broker.push([payload])
        if refusal:
            raise refusal
        return payload.jid

    def hello(self, wid):
        """Register a worker and return its wid."""
        members = {"v": 2, "wid": wid, "hostname": self.text, "pid": 7, "labels": [self.text, self.text]}
        members |= {"queues": [self.text, "mail"], "threads": 5}
        found = commands.parse_hello(json.dumps(members))
        self.broker.hello(found.identity)
        return wid

    def batch(self, *, callback=None, **members):
        """Create a batch and return its bid."""
        job = {"jobtype": "harmless", "args": [self.text], **(callback or {})}
        made = {"description": self.text, "success": job, "complete": {**job, "jid": ""}, **members}
        return self.broker.new_batch(self.line(f"BATCH NEW {json.dumps(made)}").batch)


def fill(text, *, argument=None):
    """Write the text to every field that a client or a remote server can fill; return the places that rejected it.

    `argument` replaces the text in arguments, other members of jobs, and results.
    """
    sent = Sent(text)
    names = {place: sent.as_name(place) for place in REFUSED if place not in ("bid", "parent")}
    for place in ("bid", "parent"):
        sent.as_name(place)
    Job.objects.all().delete()
    Batch.objects.all().delete()
    WorkerProcess.objects.all().delete()
    _jobs(sent, names, argument or text)
    _others(sent, names)
    return sent.refused


def _jobs(sent, names, argument):
    """Store a dead job, a running one with a lock, a succeeded one with a result, and members of batches."""
    text, broker = sent.text, sent.broker
    wid = sent.hello(names["wid"])
    custom = {"kwargs": {"key": argument, "inner": {argument: [argument]}}, text: text, "traceparent": text}
    whole = {"jobtype": names["jobtype"], "args": [argument, {argument: argument}], text: argument}
    sent.push(**whole, custom=custom, jid=names["jid"], queue="died", retry=-1)
    [[died]] = broker.fetch([FetchRequest(queues=("died",), wid=wid)])
    failed = sent.line(
        "FAIL "
        + json.dumps({"jid": died.jid, "errtype": text, "message": text, "backtrace": [text, text, "last line"]})
    )
    report = failure(jid=died.jid, wid=wid, errtype=failed.errtype, message=failed.message, backtrace=failed.backtrace)
    assert broker.fail([report]) == [True]
    about = {"about": f"shop.order/{text if is_about(f'shop.order/{text}') else 7}"}
    jid = sent.push(**whole, custom={**custom, **about, "lock": names["lock"], "track": 1}, queue="runs")
    sent.push(**whole, custom={"lock": names["lock"]}, queue="runs")
    [[running]] = broker.fetch([FetchRequest(queues=("runs",), wid=wid)])
    assert running.jid == jid
    track = {"jid": jid, "percent": 40, "desc": text}
    broker.track_set([sent.line(f"TRACK SET {json.dumps(track)}").update])
    sent.push(**whole, custom={"result_ttl": 600}, queue="done")
    [[done]] = broker.fetch([FetchRequest(queues=("done",), wid=wid)])
    broker.ack([Ack(jid=done.jid, wid=wid, attempt=done.attempt, result=json.dumps({text: argument}))])
    callback = {"jobtype": names["jobtype of a callback"]}
    parent = sent.batch(callback=callback)
    child = sent.batch(callback=callback, parent_bid=parent)
    for bid in (parent, child):
        sent.push(**whole, custom={"bid": bid}, queue="members")
        broker.commit_batch(bid)


def _others(sent, names):
    """Store a cron entry, if the text is allowed in one, and the error of a remote server that refused a job."""
    text = sent.text
    try:
        job = {"jobtype": names["jobtype"], "args": [text], "job": {"custom": {text: text}}}
        one = cron.build_definition({"name": text, "schedule": "0 3 * * *", **job}, is_json=True)
    except FaktoryError:
        sent.refused.add("cron entry")
        one = cron.build_definition({"name": "harmless", "schedule": "0 3 * * *", "jobtype": "harmless"})
    entry = CronEntry(origin="admin", **one._asdict())
    entries.save(entry, using="default")
    stored = "".join(char for char in text if char != "\x00" and not "\ud800" <= char <= "\udfff")
    CronRun.objects.create(entry=entry, tick=timezone.now(), jid="job-000001", outcome="refused", note=stored[:1000])
    OutboxEntry.objects.create(jid=names["jid"], queue="mail", job="{}", error=stored)
    assert JobLock.objects.count() == 1


def hurry():
    """Set times to a fixed age, so that pages show the same text however long the requests take."""
    moment = timezone.now() - timedelta(days=3)
    Job.objects.filter(enqueued_at__isnull=False).update(enqueued_at=moment)
    Job.objects.filter(started_at__isnull=False).update(started_at=moment)
    # Expired locks have a mark: it would appear while the requests run.
    JobLock.objects.update(expires_at=timezone.now() + timedelta(days=1))


class _Elements(HTMLParser):
    """Collect the elements of a page without its texts."""

    def __init__(self, *, is_ours=True):
        super().__init__(convert_charrefs=True)
        self._is_ours = is_ours
        self.found = []
        self.texts = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name != "style" or not self._is_ours, (tag, value)
            if name in ("href", "src", "action", "formaction"):
                is_web = value.startswith(("http://", "https://"))  # the framework turns them into links
                if is_web and not self._is_ours:
                    continue
                assert value.startswith(("/", "?", ".", "#")) or value == "", (tag, name, value[:80])
                assert not value.startswith("//"), (tag, name, value[:80])
        if tag != "br":  # Django writes it for a line break
            self.found.append((tag, tuple(sorted(name for name, _ in attrs))))

    def handle_endtag(self, tag):
        self.found.append((f"/{tag}", ()))

    def handle_comment(self, data):
        self.found.append(("comment", ()))

    def handle_decl(self, decl):
        self.found.append(("declaration", ()))

    def unknown_decl(self, data):
        self.found.append(("declaration", ()))

    def handle_pi(self, data):
        self.found.append(("instruction", ()))

    def handle_data(self, data):
        if self.found and self.found[-1][0] != "textarea":  # a text in an edit field is shown unchanged
            self.texts.append(data)


def elements(page, *, is_ours=True):
    """Return every element of this HTML with its attribute names, in order; fail on scripts and on external links."""
    reader = _Elements(is_ours=is_ours)
    reader.feed(page)
    reader.close()
    return reader.found


def asked(**params):
    """Return these query parameters, each cut to a length that a server accepts."""
    return urlencode({name: text.encode("utf-8", "replace").decode()[:1500] for name, text in params.items()})


def unwelcome(page):
    """Return the characters that must not be shown: control, text-reversing and unprintable characters."""
    reader = _Elements()
    reader.feed(page)
    reader.close()
    return sorted({char for text in reader.texts for char in text if is_unwelcome(char)})


def is_unwelcome(char):
    """Return True if a page or terminal must not show this character."""
    return (unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n\r") or char in TURNING
