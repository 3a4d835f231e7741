"""QuerySet methods for jobs on each database: which jobs they select, by which index, and what bulk verbs change."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_faktory.core.json import jsontext
from django_faktory.core.lifecycle import State
from django_faktory.core.payloads import NewBatch
from django_faktory.core.queries import LATEST_FAILURE, parse_query
from django_faktory.errors import InvalidQuery
from django_faktory.models import Batch, Job, Queue
from django_faktory.models.job import RECENT
from django_faktory.store import notifier
from django_faktory.store.batches import batches
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from tests.factories import JobFactory, QueueFactory, payload
from tests.project.tasks import add

pytestmark = [pytest.mark.portable, pytest.mark.django_db]


def job_in(state, **fields):
    return JobFactory(**({state: True} if state != "enqueued" else {}), **fields)


def jids(found):
    return sorted(found.values_list("jid", flat=True))


def test_each_state_has_a_queryset_method_and_a_query_value():
    made = {str(state): job_in(str(state)).jid for state in State}
    assert {state: jids(getattr(Job.objects, state)()) for state in made} == {k: [v] for k, v in made.items()}
    assert {state: jids(Job.objects.matching(f"state:{state}")) for state in made} == {k: [v] for k, v in made.items()}


@pytest.mark.parametrize(
    ("by_words", "by_text", "meant", "others"),
    [
        (lambda q: q.queue("mail"), "queue:mail", {"queue": "mail"}, [{"queue": "Mail"}, {"queue": "mail2"}]),
        (
            lambda q: q.queue("a", "b*"),
            "queue:a,b*",
            {"queue": "beta"},
            [{"queue": "aa"}, {"queue": "Beta"}, {"queue": "c"}],
        ),
        (
            lambda q: q.task("shop.*"),
            "task:shop.*",
            {"jobtype": "shop.x"},
            [{"jobtype": "shop"}, {"jobtype": "Shop.x"}],
        ),
        (lambda q: q.task(add), f"task:{add.jobtype}", {"jobtype": add.jobtype}, [{"jobtype": "add"}]),
        (
            lambda q: q.failed_with("Timeout"),
            "error:Timeout",
            {"errtype": "requests.Timeout"},
            [{"errtype": "requests.timeout"}, {"errtype": "MyTimeout"}, {}],
        ),
        (lambda q: q.failed_with(KeyError), "error:builtins.KeyError", {"errtype": "builtins.KeyError"}, [{}]),
        (
            lambda q: q.about("shop.order/42"),
            "about:shop.order/42",
            {"about": "shop.order/42"},
            [{"about": "shop.order/4"}, {}],
        ),
        (lambda q: q.batch("b-1"), "batch:b-1", {"bid": "b-1"}, [{"bid": "b-2"}, {}]),
        (lambda q: q.filter(jid="jid-00000"), "jid:jid-00000", {"jid": "jid-00000"}, [{}]),
        (
            lambda q: q.with_args(42, "é"),
            'args:[42, "\\u00e9"]',
            {"payload": '{"jid":"x","args":[42,"é"]}'},
            [{"payload": '{"args":[42]}'}, {"payload": '{"args":[42,"é",1]}'}],
        ),
        (
            lambda q: q.containing('"a_b"', "%x"),
            'text:"\\"a_b\\"","%x"',
            {"payload": '{"args":["a_b","%x"]}'},
            [{"payload": '{"args":["acb","%x"]}'}, {"payload": '{"args":["A_B","%X"]}'}],
        ),
        (
            lambda q: q.with_message("is declined", 'card "é"'),
            'message:"is declined","card \\"é\\""',
            {"failure": '{"message":"card \\"\\u00e9\\" is declined"}'},
            [{"failure": '{"message":"is declined"}'}, {"payload": '{"args":["is declined"]}'}],
        ),
        (
            lambda q: q.with_words("order 4711", "declined"),
            'word:"order 4711",declined',
            {"payload": '{"args":["order 4711"]}', "failure": '{"message":"declined"}'},
            [{"payload": '{"args":["order 4711"]}'}, {"failure": '{"message":"declined"}'}, {}],
        ),
    ],
    ids=[
        "queue",
        "queues",
        "prefix",
        "task",
        "error",
        "class",
        "about",
        "batch",
        "jid",
        "args",
        "text",
        "message",
        "word",
    ],
)
def test_queryset_methods_and_query_text_select_the_same_jobs(by_words, by_text, meant, others):
    wanted = JobFactory(**meant)
    for other in others:
        JobFactory(**other)
    assert jids(by_words(Job.objects)) == jids(Job.objects.matching(by_text)) == [wanted.jid]


def test_arguments_are_found_in_the_json_style_of_other_libraries():
    for text in ('{"args": [1, "\\u00e9"]}', '{"args": [1, "é"]}', '{"args":[1,"\\u00e9"]}', '{"args":[1,"é"]}'):
        JobFactory(payload=text)
    assert Job.objects.with_args(1, "é").count() == 4


def test_arguments_with_a_lone_surrogate_are_found():
    found = JobFactory(payload='{"args":["\\ud800"]}')
    assert [*Job.objects.matching('args:["\\ud800"]')] == [*Job.objects.with_args("\ud800")] == [found]


def test_jobs_with_a_second_member_args_are_not_found_by_arguments():
    JobFactory(payload='{"args":[{"x":{"args":[1,2]}}]}')
    JobFactory(payload='{"args":[1,2],"custom":{"kwargs":{"args":[1,2]}}}')
    nested = JobFactory(payload='{"args":[{"args":[1,2]}]}')
    plain = JobFactory(payload='{"args":[1,2],"custom":{"note":"\\"args\\":"}}')
    assert [*Job.objects.with_args(1, 2)] == [plain]
    assert [*Job.objects.with_args({"args": [1, 2]})] == [nested]


def spell_as_go(failure):
    """Return JSON as a Faktory server writes it."""
    text = json.dumps(failure, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


MESSAGES = [
    'card "é" is declined', "CARD", "C:\\", "C:\\n", "a\nb", 'x","errtype":"y', '","backtrace":["', "%_.*(",
    "<class 'é'>", "\x1b[31m", "nul \x00", "\U0001f600", "\ud800 lone é", "", "\\u00e9",
]  # fmt: skip
BACKTRACES = [[], ["a, b]"], ['  File "x.py", line 1, in f\n    g[0]', "\\", '",', "raise <é>"]]
TEXTS = [
    "failed", "failed_at", "message", "errtype", "backtrace", "retry_count", "2026", "00Z", "Odd", "é", "É", "u00",
    "00e9", "e9", "n", "b", "u", "t", '"', '\\"', "\\", "\\n", "\n", "\n ", ",", '","', "[", "]", "}", ":", "<", "003c",
    "<class", "\x00", "0000", "\x1b", "\U0001f600", "d83d", "%_", ".*(", "%", "card", "CARD", "nul", "lone", "raise <é",
    "a, b", 'declined","errtype', 'errtype":"y', "File",
]  # fmt: skip


@pytest.mark.parametrize("encode", [jsontext.encode, json.dumps, spell_as_go])
def test_a_message_search_reads_only_the_values_of_message_and_backtrace(encode):
    failed = {"retry_count": 0, "remaining": 24, "failed_at": "2026-01-01T00:00:00Z"}
    failures = [
        failed | {"message": message, "errtype": 'Odd, [",n'} | ({"backtrace": lines} if lines else {})
        for message in MESSAGES
        for lines in BACKTRACES
        if message.isprintable() or encode is not spell_as_go  # Go replaces lone surrogates
    ]
    jobs = {JobFactory(failure=encode(failure)).jid: failure for failure in failures}
    JobFactory(failure="")
    for text in TEXTS:
        expected = [jid for jid, failure in jobs.items() if text in failure["message"]]
        expected += [jid for jid, failure in jobs.items() if any(text in line for line in failure.get("backtrace", []))]
        assert jids(Job.objects.with_message(text)) == sorted(set(expected)), text


def test_a_message_search_accepts_the_longest_texts():
    for text in ("x", "é", "\U0001f600"):
        found = JobFactory(failure=jsontext.encode({"message": text * 3000}))
        JobFactory(failure=jsontext.encode({"message": text * 2999}))
        assert jids(Job.objects.with_message(text * 3000)) == [found.jid]


def test_age_counts_from_push():
    now = timezone.now()
    old, new = JobFactory(created_at=now - timedelta(hours=3)), JobFactory(created_at=now - timedelta(minutes=1))
    hour = timedelta(hours=1)
    assert jids(Job.objects.older_than(hour)) == jids(Job.objects.matching("older:1h")) == [old.jid]
    assert jids(Job.objects.newer_than(hour)) == jids(Job.objects.matching("newer:1h")) == [new.jid]


def test_several_conditions_are_combined_with_and():
    meant = job_in("dead", queue="mail", errtype="x.Timeout")
    job_in("dead", queue="mail", errtype="x.Other")
    job_in("retries", queue="mail", errtype="x.Timeout")
    assert jids(Job.objects.dead().queue("mail").failed_with("Timeout")) == [meant.jid]
    assert jids(Job.objects.matching("state:dead queue:mail error:Timeout")) == [meant.jid]


def test_a_bare_star_means_any_name():
    JobFactory()
    assert Job.objects.task("*").count() == 1


def test_a_text_search_reads_only_the_newest_jobs_unless_more_are_requested():
    made = [job_in("dead", payload='{"args":["needle"]}') for _ in range(3)]
    JobFactory(payload='{"args":["needle"]}')  # not dead, so it does not count
    assert jids(Job.objects.dead().containing("needle", among=2)) == sorted(job.jid for job in made[1:])
    assert Job.objects.matching("state:dead text:needle among:2").count() == 2
    assert Job.objects.matching("state:dead text:needle among:9").count() == 3


def test_recent_selects_from_the_last_rows_before_other_filters():
    job_in("dead")
    last = [JobFactory() for _ in range(3)]
    assert jids(Job.objects.recent(2)) == sorted(job.jid for job in last[1:])
    assert Job.objects.dead().recent(2).count() == 0
    assert Job.objects.dead().recent().count() == 1


@pytest.mark.parametrize(
    ("query", "is_bounded"),
    [
        ("", False),
        ("queue:mail", True),
        ("task:x older:1s", True),
        ("text:x", False),
        ("queue:mail text:x", True),
        ("succeeded queue:mail", True),
        ("state:dead,succeeded task:x", True),
        ("succeeded", False),
        ("dead queue:mail", False),
        ("about:a.b/1 queue:mail", False),
        ("batch:b-1", False),
        ("jid-00000", False),
    ],
)
def test_a_page_without_a_matching_index_reads_only_the_latest_rows(query, is_bounded):
    sql = str(Job.objects.shown(query).query)
    assert (f"- {RECENT})" in sql) == is_bounded


def test_a_count_stops_at_its_maximum():
    for _ in range(4):
        JobFactory()
    assert (Job.objects.count_up_to(3), Job.objects.count_up_to(9)) == (3, 4)


def test_an_invalid_query_text_is_rejected():
    with pytest.raises(InvalidQuery, match="no such key"):
        Job.objects.matching("colour:red")


# --- verbs

BECOMES = {
    "retry": {"retries": "enqueued", "dead": "enqueued"},
    "requeue": {"scheduled": "enqueued", "retries": "enqueued", "dead": "enqueued"},
    "restart": {"scheduled": "enqueued", "retries": "enqueued", "dead": "enqueued"},
    "cancel": {**dict.fromkeys(["scheduled", "enqueued", "blocked", "retries"]), "working": "working"},
    "kill": dict.fromkeys(["scheduled", "enqueued", "blocked", "retries", "dead"], "dead"),
    "discard": dict.fromkeys(["scheduled", "enqueued", "blocked", "retries", "dead"]),
    "prune": dict.fromkeys(["dead", "succeeded", "discarded", "expired"]),
}


@pytest.mark.parametrize("verb", BECOMES)
def test_a_bulk_verb_changes_and_counts_only_eligible_jobs(verb):
    made = {str(state): job_in(str(state), queue="mail") for state in State}
    other = [job_in(str(state)) for state in State]
    becomes = BECOMES[verb]
    kept = {"result_ttl": None}
    Job.objects.exclude(queue="default").update(**kept)
    assert getattr(Job.objects.queue("mail"), verb)() == len(becomes)
    found = dict(Job.objects.values_list("jid", "state"))
    assert {s: found.get(job.jid) for s, job in made.items()} == {s: becomes.get(s, s) for s in made}
    assert [found[job.jid] for job in other] == [str(state) for state in State]


@pytest.mark.parametrize("verb", BECOMES)
def test_bulk_verbs_are_not_available_on_the_manager(verb):
    assert not hasattr(Job.objects, verb)


def test_a_bulk_verb_on_a_slice_changes_only_that_slice():
    for _ in range(5):
        job_in("dead")
    newest = Job.objects.dead().order_by("-pk")[:2]
    expected = sorted(job.jid for job in newest)
    assert newest.retry() == 2
    assert jids(Job.objects.enqueued()) == expected


def test_a_bulk_verb_on_a_search_changes_only_the_found_jobs():
    meant = job_in("dead", payload='{"args":["needle"]}')
    job_in("dead")
    assert Job.objects.dead().containing("needle").kill() == 1
    assert Job.objects.matching("dead text:needle").retry() == 1
    assert jids(Job.objects.enqueued()) == [meant.jid]


def test_a_killed_job_is_kept_for_the_dead_ttl_setting(settings):
    settings.FAKTORY = {"DEAD_TTL": 60}
    job_in("retries")
    assert Job.objects.retries().kill() == 1
    job = Job.objects.get()
    assert job.purge_at - job.finished_at == timedelta(seconds=60)


@pytest.mark.parametrize("verb", ["discard", "prune"])
def test_batches_are_updated_by_bulk_verbs_on_their_members(verb):
    callback = payload(jobtype="after")
    bid = batches.new(Store(), NewBatch(complete=callback))
    pushes.push(Store(), [payload(custom={"bid": bid}) for _ in range(2)])
    batches.commit(Store(), bid)
    assert Job.objects.batch(bid).kill() == 2
    assert getattr(Job.objects.batch(bid), verb)() == 2
    batch = Batch.objects.get(bid=bid)
    assert (batch.complete_st, batch.pending) == ("1", 0)
    assert Job.objects.enqueued().task("after").count() == 1


@pytest.mark.parametrize("verb", ["retry", "requeue"])
@pytest.mark.django_db(transaction=True)
def test_workers_are_notified_of_retried_and_requeued_jobs(verb, monkeypatch):
    notified = []
    monkeypatch.setattr(notifier, "announce", lambda alias, names: notified.append(alias))
    job_in("dead")
    assert getattr(Job.objects.dead(), verb)() == 1
    assert notified == ["default"]


def test_queues_are_paused_and_resumed_and_counted():
    for name in ("mail", "low", "high"):
        QueueFactory(name=name)
    assert Queue.objects.filter(name__in=["mail", "low"]).pause() == 2
    assert Queue.objects.all().pause() == 1
    assert Queue.objects.paused().count() == 3
    assert Queue.objects.filter(name="mail").resume() == 1
    assert Queue.objects.filter(name="mail").resume() == 0


# --- times of failures


@pytest.fixture
def failed():
    """Jobs that failed in another order than they were pushed: `b` at noon, `a` at 13:00, `c` at 14:00."""
    hours = {"a": 13, "b": 12, "c": 14}
    states = {"a": "dead", "b": "retries", "c": "dead"}
    for name in "abc":
        job_in(states[name], jid=name, failed_at=datetime(2026, 5, 1, hours[name], tzinfo=UTC))
    job_in("enqueued", jid="never")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("failed_after:2026-05-01T13:00Z", ["a", "c"]),
        ("failed_after:2026-05-01T12:30Z failed_before:2026-05-01T13:30Z", ["a"]),
        ("failed_before:2026-05-01T14:00:00+01:00", ["b"]),
        ("dead failed_after:2026-05-01", ["a", "c"]),
        ("failed_before:1s", ["a", "b", "c"]),
        ("failed_after:1h", []),
        ("enqueued failed_after:2026-05-01", []),
    ],
)
@pytest.mark.usefixtures("failed")
def test_jobs_are_found_by_the_time_of_their_latest_failure(text, found):
    assert jids(Job.objects.matching(text)) == found


def test_a_time_without_an_offset_is_in_the_time_zone_of_the_project(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    job_in("dead", jid="a", failed_at=datetime(2026, 5, 1, 3, 30, tzinfo=UTC))
    assert jids(Job.objects.matching("failed_after:2026-05-01T12:00 failed_before:2026-05-01T13:00")) == ["a"]


@pytest.mark.usefixtures("failed")
def test_filters_by_time_of_failure_accept_durations_and_times():
    noon = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
    assert jids(Job.objects.failed_after(noon)) == ["a", "c"]
    assert jids(Job.objects.failed_before(noon)) == ["b"]
    assert jids(Job.objects.failed_after(timedelta(hours=1))) == []


@pytest.mark.parametrize("text", ["dead", "retries", "dead,retries", "failed_after:1d", "enqueued,dead", ""])
def test_only_lists_of_failed_jobs_are_in_the_order_of_failure(text):
    by_failure = text in ("dead", "retries", "dead,retries", "failed_after:1d")
    query = parse_query(f"state:{text}" if "," in text else text)
    assert query.order == (("-failed_at", "-id") if by_failure else ("-id",))


# --- indexes


@pytest.mark.each_database
@pytest.mark.parametrize(
    ("find", "index"),
    [
        (lambda q: q.dead(), "faktory_failed"),
        (lambda q: q.matching("state:dead error:x.Timeout"), "faktory_failed"),
        (lambda q: q.discarded(), "faktory_dropped"),
        (lambda q: q.about("shop.order/50").order_by("-pk"), "faktory_about"),
        (lambda q: q.batch("b-1"), "faktory_members"),
        (lambda q: q.enqueued().queue("rare"), "faktory_ready"),
        (lambda q: q.in_state(State.SCHEDULED, State.RETRIES), "faktory_due"),
        (lambda q: q.retries().order_by("-pk"), "faktory_failed_latest"),
        (lambda q: q.dead().order_by(*LATEST_FAILURE)[:50], "faktory_failed_at"),
        (lambda q: q.matching("state:retries error:x.Timeout"), "faktory_failed"),
        (lambda q: q.working(), "faktory_reserved"),
    ],
)
@pytest.mark.django_db(transaction=True)  # MariaDB commits when it analyzes
def test_common_queries_use_an_index(find, index):
    """On MariaDB the state leads every index: failed jobs are found by faktory_purge, and a state alone by any."""
    rows = JobFactory.many(1000, blocked=True)
    rows[3].bid = "b-1"
    for n in range(0, 1000, 50):
        rows[n].about = f"shop.order/{n}"
    Job.objects.bulk_create([*rows, *JobFactory.many(1000, succeeded=True)])
    job_in("dead", errtype="x.Timeout")
    with connection.cursor() as cursor:
        tables = "django_faktory_job, django_faktory_history"
        texts = {"sqlite": "ANALYZE", "mysql": f"ANALYZE TABLE {tables}", "postgresql": f"ANALYZE {tables}"}
        cursor.execute(texts[connection.vendor])
    plan = find(Job.objects).explain()
    led_by_state = ["faktory_ready", "faktory_due", "faktory_reserved", "faktory_purge", "faktory_history_purge"]
    of_partition = ["_state_errtype_id_idx", "_state_id_idx"] if index == "faktory_dropped" else []
    others = {"mysql": led_by_state, "postgresql": of_partition}.get(connection.vendor, [])
    assert any(name in plan for name in [index, *others])
