"""Test every subcommand of `manage.py faktory` with jobs in this database."""

import io
import json
import re
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from django_faktory.core.payloads import NewBatch
from django_faktory.core.steps import FOREVER
from django_faktory.management.cli.screen import Screen
from django_faktory.management.commands.faktory import Command
from django_faktory.models import Job, JobSignal, Limit, Queue, WorkerProcess
from django_faktory.operations.job_actions import Verb
from django_faktory.store.batches import batches
from django_faktory.store.jobs import pushes
from django_faktory.store.jobs.bulk import CHUNK
from django_faktory.store.store import Store
from tests.factories import T0, JobFactory, QueueFactory, WorkerFactory, payload
from tests.management.cli.conftest import Terminal
from tests.project.tasks import add

pytestmark = [pytest.mark.once, pytest.mark.django_db]


def dead(**fields):
    return JobFactory(dead=True, **fields)


def many_dead(count):
    """Store dead jobs, enough for several steps if `count` is above `CHUNK`; return them, oldest first."""
    Job.objects.bulk_create(JobFactory.many(count, dead=True))
    return list(Job.objects.order_by("pk"))


def states():
    return dict(Job.objects.values_list("jid", "state"))


# --- reading


def test_info_shows_the_numbers_of_the_broker(asked, faktory):
    JobFactory(queue="mail")
    dead()
    output = asked("info")
    assert (output["queues"], output["sets"]["dead"]) == ({"mail": 1}, 1)
    answer = faktory("info").out
    assert "mail   1" in answer
    assert re.search(rf"^admin +{reverse('admin:index')}$", answer, re.MULTILINE)


def test_queues_shows_size_latency_and_pause(asked, faktory):
    JobFactory(queue="mail", enqueued_at=timezone.now() - timedelta(seconds=60))
    QueueFactory(name="idle", paused_at=T0)
    idle, mail = asked("queues")["queues"]
    assert idle == {"name": "idle", "size": 0, "latency_s": 0.0, "is_paused": True}
    assert (mail["name"], mail["size"], mail["is_paused"]) == ("mail", 1, False)
    assert 59 < mail["latency_s"] < 600
    assert "paused" in faktory("queues").out


def test_jobs_lists_jobs_that_match_the_query_newest_first(asked, faktory):
    made = [dead(queue="mail", errtype="x.Timeout") for _ in range(3)]
    dead()
    output = asked("jobs", "dead", "queue:mail", "--limit", 2)
    assert [job["jid"] for job in output["jobs"]] == [made[2].jid, made[1].jid]
    assert (output["query"], output["is_more"]) == ("state:dead queue:mail", True)
    assert asked("jobs", "dead", "queue:mail", "--count") == {
        "query": "state:dead queue:mail",
        "count": 3,
        "is_more": False,
        "searched": None,
    }
    lines = faktory("jobs", "dead", "queue:mail").out.splitlines()
    assert lines[0].split() == ["JID", "TASK", "STATE", "QUEUE", "WHEN", "FAILURES", "ERROR", "ABOUT"]
    assert len(lines) == 4


def test_long_shows_arguments_and_the_message_of_the_latest_failure(asked, faktory):
    failure = '{"errtype":"x.Timeout","message":"took 30 s","backtrace":[]}'
    text = '{"jid":"1","jobtype":"noop","args":[42,"é"],"custom":{"kwargs":{"a":1}}}'
    dead(payload=text, failure=failure)
    [job] = asked("jobs", "dead", "--long")["jobs"]
    assert (job["args"], job["kwargs"], job["message"]) == ([42, "é"], {"a": 1}, "took 30 s")
    out = faktory("jobs", "dead", "--long").out
    assert '[42, "é"] {"a": 1}  took 30 s' in out
    assert "args" not in asked("jobs", "dead")["jobs"][0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"args":["' + "x" * 20_000 + '"]}', '["xxx'),
        ("{broken", "(not a JSON object)"),
        ("5", "(not a JSON object)"),
        ('{"args":["' + "y" * 200 + '"]}', '["yyy'),
        ('{"jid":"' + "x" * 20_000 + '"}', "(too long)"),
    ],
)
def test_long_shows_no_long_or_invalid_arguments(asked, faktory, text, shown):
    dead(payload=text)
    [job] = asked("jobs", "--long")["jobs"]
    assert (job["args"] is None) == ("y" not in text)
    out = faktory("jobs", "--long").out
    assert shown in out
    assert max(map(len, out.splitlines())) < 400


def test_errors_groups_failed_jobs_by_their_cause(asked, faktory):
    for number in range(3):
        dead(errtype="x.Declined", failure=f'{{"message":"card {number} declined","backtrace":[]}}', finished_at=T0)
    JobFactory(retries=True, errtype="x.Declined", failure='{"message":"card 9 declined","backtrace":[]}')
    dead(errtype="y.Other")
    first, second = asked("errors")["groups"]
    assert (first["errtype"], first["dead"], first["retrying"], first["message"]) == (
        "x.Declined", 3, 1, "card 2 declined",
    )  # fmt: skip
    assert (first["first_at"], second["dead"]) == (first["latest_at"], 1)
    assert len(asked("errors", "--limit", 1)["groups"]) == 1
    shown = faktory("errors").out
    assert "card 2 declined" in shown
    assert "card N declined" not in shown, "the pattern is a key only"


def test_errors_without_failed_jobs_says_so(faktory):
    assert "no failed jobs" in faktory("errors").err


def test_top_begins_with_the_alarms(faktory, asked):
    JobFactory(queue="mail")
    lines = faktory("top", "--once").out.splitlines()
    assert lines[0].startswith("CRITICAL  No running worker")
    titles = [line for line in lines if line in ("queues", "running now (longest first)", "workers")]
    assert titles == ["queues", "running now (longest first)", "workers"]
    assert [alarm["kind"] for alarm in asked("top", "--once")["alarms"]] == ["no-workers"]


def test_job_shows_the_payload_and_all_attempts(asked, faktory):
    attempt = {"wid": "w1", "errtype": "x.Timeout", "message": "too late", "backtrace": ["line 1", "line 2"],
               "log": ["logged"], "release": "2.4"}  # fmt: skip
    job = dead(payload='{"jid":"1","args":[42,1.50]}', history=json.dumps([attempt]), errtype="x.Timeout")
    output = asked("job", job.jid)
    assert (output["jid"], output["job"]["args"]) == (job.jid, [42, 1.5])
    assert output["attempts"][0] == {
        "worker": "w1",
        "errtype": "x.Timeout",
        "message": "too late",
        "started_at": None,
        "failed_at": None,
        "backtrace": ["line 1", "line 2"],
        "log": ["logged"],
        "release": "2.4",
    }
    out = faktory("job", job.jid).out
    assert "x.Timeout: too late (release 2.4)" in out
    assert "  line 2\n  logged" in out


def test_job_shows_the_log_of_the_run_that_succeeded(asked, faktory):
    run = {"kind": "log", "wid": "w1", "attempt": 1, "log": ["first", "second"]}
    job = JobFactory(succeeded=True, history=json.dumps([run]))
    assert (asked("job", job.jid)["log"], asked("job", job.jid)["attempts"]) == (["first", "second"], [])
    assert "log of the run that succeeded:\n  first\n  second\n" in faktory("job", job.jid).out


STOPPED = {
    "kind": "interrupted",
    "message": "interrupted by shutdown",
    "wid": "w7",
    "started_at": "2026-05-01T13:00:00Z",
    "failed_at": "2026-05-01T13:00:05Z",
}


def test_job_shows_when_and_where_it_was_interrupted(asked, faktory):
    job = JobFactory(interruptions=1, history=json.dumps([STOPPED]))
    output = asked("job", job.jid)
    assert (output["attempt"], output["attempts"], output["interruptions"]) == (0, [], 1)
    assert output["interrupted"] == [
        {
            "worker": "w7",
            "message": "interrupted by shutdown",
            "started_at": "2026-05-01T13:00:00Z",
            "interrupted_at": "2026-05-01T13:00:05Z",
        }
    ]
    assert "interrupted by shutdown: 2026-05-01T13:00:05Z worker w7" in faktory("job", job.jid).out


def test_workers_shows_the_number_of_held_jobs(asked, faktory):
    WorkerFactory(wid="w1", rss_kb=2048, queues=["mail", "default"], threads=5)
    WorkerFactory(wid="gone", seen_at=T0)
    JobFactory(working=True, wid="w1")
    output = asked("workers")
    assert "1 of 5" in faktory("workers").out
    assert "mail, default" in faktory("workers").out
    assert [(worker["wid"], worker["jobs"], worker["state"]) for worker in output["workers"]] == [("w1", 1, "running")]
    assert "2 MB" in faktory("workers").out


def test_batches_shows_the_progress_of_each_batch(asked, faktory):
    bid = batches.new(Store(), NewBatch(description="import", success=payload()))
    child = batches.new(Store(), NewBatch(parent_bid=bid))
    pushes.push(Store(), [payload(custom={"bid": bid}) for _ in range(2)])
    output = asked("batches")
    assert [batch["bid"] for batch in output["batches"]] == [child, bid]
    assert output["batches"][1]["total"] == 2
    assert [batch["bid"] for batch in asked("batches", bid)["batches"]] == [bid, child]
    assert "0 of 2" in faktory("batches").out


@pytest.mark.parametrize("words", [("job", "nosuchjob"), ("batches", "b-nosuch"), ("job", "a\x1b[31m\x00")])
def test_an_unknown_id_exits_with_2(faktory, words):
    answer = faktory(*words)
    assert (answer.code, answer.out) == (2, "")
    assert "has the ID" in answer.err


def test_top_refreshes_once_or_count_times(faktory, asked):
    JobFactory(working=True, jobtype="shop.slow")
    QueueFactory(name="mail")
    WorkerFactory(wid="w1")
    output = asked("top", "--once")
    assert (output["processed_per_s"], output["working"][0]["jobtype"]) == (None, "shop.slow")
    out = faktory("top", "--once").out
    assert all(word in out for word in ("processed 0", "mail", "w1", "shop.slow"))
    looks = faktory("top", "--count", 2, "--interval", 0.01, "--json").out.splitlines()
    assert [json.loads(look)["processed_per_s"] for look in looks] == [None, 0.0]


def test_top_without_a_terminal_requires_once_or_count(faktory):
    answer = faktory("top")
    assert (answer.code, answer.out) == (1, "")
    assert "--once" in answer.err


# --- push


def test_push_enqueues_a_task_with_its_options(faktory, asked):
    jid = faktory("push", add.jobtype, "1", "2", "--queue", "mail", "--about", "shop.order/7").out.strip()
    job = Job.objects.get(jid=jid)
    assert (job.jobtype, job.queue, job.about, job.result_ttl) == (add.jobtype, "mail", "shop.order/7", 86_400)
    assert '"args":[1,2]' in job.payload
    later = asked("push", add.jobtype, "text", "--kwargs", '{"b": [1]}', "--in", "1h")["jid"]
    job = Job.objects.get(jid=later)
    assert job.state == "scheduled"
    assert '"args":["text"]' in job.payload
    assert '"kwargs":{"b":[1]}' in job.payload


def test_push_of_an_unregistered_task_requires_unregistered(faktory):
    refused = faktory("push", "GoJob", "1")
    assert refused.code == 1
    assert "--unregistered" in refused.err
    jid = faktory(
        "push", "GoJob", "1", "--unregistered", "--queue", "go", "--new", "--in", "10m", "--about", "a.b/1"
    ).out.strip()
    job = Job.objects.get(jid=jid)
    assert (job.jobtype, job.queue, job.state, job.about) == ("GoJob", "go", "scheduled", "a.b/1")


@pytest.mark.parametrize(
    "words",
    [
        ("push", add.jobtype, "--kwargs", "[1]"),
        ("push", add.jobtype, "1"),
        ("push", add.jobtype, "--in", "soon"),
        ("push", add.jobtype, "--about", "order"),
        ("push", add.jobtype, "--queue", "no such queue"),
        ("push", add.jobtype, "\x1b"),
        ("push", add.jobtype, "1", "NaN"),
        ("push", "GoJob", "--unregistered", "NaN"),
        ("push", "GoJob", "--unregistered", "[1e999]"),
        ("push", "GoJob", "--unregistered", "--kwargs", '{"a":-Infinity}'),
        ("push", "GoJob", "--unregistered", "--queue", "no such queue"),
    ],
)
def test_an_invalid_push_is_rejected_with_a_one_line_message(faktory, words):
    answer = faktory(*words)
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (1, "", 1)
    assert not Job.objects.exists()


# --- signals


def test_a_signal_is_sent_with_json_text_or_nothing(asked, faktory):
    job = JobFactory()
    for words in [("approved", '{"by": "ann"}'), ("approved", "yes"), ("approved",)]:
        assert asked("signal", job.jid, *words) == {"jid": job.jid, "signal": "approved"}
    assert [signal.payload for signal in JobSignal.objects.order_by("pk")] == ['{"by":"ann"}', '"yes"', "null"]
    assert faktory("signal", "no such job", "approved").code == 2


def test_a_signal_to_an_ended_job_is_one_line_of_error(faktory):
    answer = faktory("signal", JobFactory(succeeded=True).jid, "approved")
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (1, "", 1)
    assert "a job that is succeeded cannot take a signal" in answer.err


def test_a_job_says_for_which_signal_it_waits(faktory):
    job = JobFactory(state="scheduled", run_at=FOREVER, enqueued_at=None, waits_for="approved")
    assert faktory("job", job.jid).out.startswith("Waits for signal approved\n")
    assert faktory("jobs", "scheduled").code == 0


# --- changing jobs

BECOMES = {
    "retry": "enqueued",
    "requeue": "enqueued",
    "restart": "enqueued",
    "kill": "dead",
    "discard": None,
    "prune": None,
}


@pytest.mark.parametrize("verb", BECOMES)
def test_a_verb_changes_only_jobs_that_match_the_query(asked, verb):
    meant, other = dead(queue="mail"), dead()
    sure = [] if verb in ("retry", "requeue") else ["--yes"]
    output = asked(verb, "dead", "queue:mail", *sure)
    assert output == {"query": "state:dead queue:mail", "found": 1, "changed": 1, "dry_run": False}
    assert (states().get(meant.jid), states()[other.jid]) == (BECOMES[verb], "dead")


@pytest.mark.parametrize("verb", Verb)
def test_a_dry_run_changes_nothing_and_needs_no_confirmation(faktory, verb):
    job = JobFactory() if verb is Verb.CANCEL else dead()
    answer = faktory(verb, job.state, "--dry-run")
    assert (answer.code, answer.out) == (0, f"{verb}: 1 job would be changed\n")
    assert states() == {job.jid: job.state}


@pytest.mark.parametrize("verb", BECOMES)
def test_a_verb_with_no_job_to_change_exits_with_2(faktory, verb):
    JobFactory(working=True)
    assert faktory(verb, "working").code == 2
    assert set(states().values()) == {"working"}


@pytest.mark.parametrize("verb", ["kill", "discard", "prune"])
def test_destructive_verbs_require_yes_without_a_terminal(faktory, verb, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    job = dead()
    answer = faktory(verb, "dead")
    assert answer.code == 1
    assert "add --yes" in answer.err
    assert states() == {job.jid: "dead"}


def test_cancel_drops_waiting_jobs_and_marks_running_ones(asked, faktory, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    running, waiting, other = JobFactory(working=True, queue="mail"), JobFactory(queue="mail"), dead(queue="mail")
    assert faktory("cancel", "queue:mail").code == 1
    assert asked("cancel", "queue:mail", "--yes")["changed"] == 2
    assert states() == {running.jid: "working", other.jid: "dead"}
    assert Job.objects.get(jid=running.jid).is_cancelled
    assert waiting.jid not in states()


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_the_answer_to_the_confirmation_prompt_decides(faktory, monkeypatch, typed, left):
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    dead()
    answer = faktory("discard", "dead")
    assert "discard 1 job (state:dead)? [y/N]" in answer.err
    assert Job.objects.count() == left


def test_a_limit_selects_the_newest_jobs_that_can_be_changed(faktory):
    old, new = dead(), dead()
    JobFactory(queue="default")
    assert faktory("retry", "queue:default", "--limit", 1).out == "retry: 1 job\n"
    assert (states()[old.jid], states()[new.jid]) == ("dead", "enqueued")


def test_an_empty_query_does_not_match_all_jobs(faktory):
    dead()
    assert faktory("retry", " ").code == 1
    assert set(states().values()) == {"dead"}


def test_prune_without_a_query_deletes_jobs_past_purge_at(asked):
    old = JobFactory(succeeded=True)
    kept = JobFactory(succeeded=True, purge_at=timezone.now() + timedelta(hours=1))
    assert asked("prune")["changed"] == 1
    assert list(states()) == [kept.jid] != [old.jid]
    assert asked("prune", code=2)["changed"] == 0


def test_a_retry_at_a_pace_spreads_the_oldest_jobs_first(asked, faktory):
    made = [dead() for _ in range(5)]
    other = JobFactory()
    began = timezone.now()
    assert asked("retry", "dead", "--per-minute", 30)["changed"] == 5
    rows = {job.jid: job for job in Job.objects.exclude(pk=other.pk)}
    assert {job.state for job in rows.values()} == {"retries"}
    first, *later = [rows[job.jid].run_at for job in made]
    assert abs(first - began) < timedelta(seconds=30)
    assert [time - first for time in later] == [timedelta(seconds=2 * number) for number in range(1, 5)]
    assert "the last one runs in 8.0 s" in faktory("retry", "retries", "--per-minute", 30).err


@pytest.fixture
def stop_after_one_step():
    """Press Ctrl-C after the first step of `CHUNK` jobs, once."""

    @contextmanager
    def progress(screen, title, total):
        def stop(_):
            patch.undo()
            raise KeyboardInterrupt

        yield stop

    patch = pytest.MonkeyPatch()
    patch.setattr(Screen, "progress", progress)
    yield
    patch.undo()


@pytest.mark.parametrize("words", [("retry", "state:dead,retries"), ("kill", "state:dead", "--yes")])
@pytest.mark.usefixtures("stop_after_one_step")
def test_a_stopped_command_with_a_limit_names_the_limit_that_continues(faktory, words):
    oldest, *made = many_dead(CHUNK + 4)
    before = oldest.purge_at
    paced = ("--per-minute", 30 * CHUNK) if words[0] == "retry" else ()
    answer = faktory(*words, *paced, "--limit", CHUNK + 3)
    assert (answer.code, answer.out) == (130, f"{words[0]}: {CHUNK} jobs\n")
    end = "in 2.0 s to continue at this pace" if paced else "to continue"
    assert answer.err.strip() == f"stopped; run the same command with --limit 3 {end}"
    assert faktory(*words, *paced, "--limit", 3).out == f"{words[0]}: 3 jobs\n"
    changed = Job.objects.exclude(state="dead", purge_at=before)
    assert {job.jid for job in changed} == {job.jid for job in made}


@pytest.mark.usefixtures("stop_after_one_step")
def test_a_stopped_retry_at_a_pace_continues_when_its_last_job_has_run(faktory):
    many_dead(CHUNK + 3)
    answer = faktory("retry", "dead", "--per-minute", 15 * CHUNK)
    assert answer.err.strip() == "stopped; run the same command again in 4.0 s to continue at this pace"
    deferred = Job.objects.in_state("retries")
    assert max(job.run_at for job in deferred) < timezone.now() + timedelta(seconds=4)
    assert faktory("retry", "dead", "--per-minute", 15 * CHUNK).out == "retry: 3 jobs\n"


# --- queues and workers


def test_clear_removes_waiting_jobs_of_the_named_queues(asked, faktory, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for name in ("mail", "low"):
        QueueFactory(name=name)
        JobFactory(queue=name)
    later = JobFactory(queue="mail", scheduled=True)
    assert "add --yes" in faktory("clear", "mail").err
    assert Job.objects.count() == 3
    assert asked("clear", "mail", "--yes") == {"queues": ["mail"]}
    assert set(Job.objects.values_list("queue", "state")) == {("low", "enqueued"), ("mail", "scheduled")}
    assert later.jid in states()


def test_the_question_of_clear_names_the_pause_that_it_removes(faktory, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    QueueFactory(name="mail", paused_at=T0)
    JobFactory(queue="mail")
    assert "remove 1 waiting job and any pause of mail? This cannot be undone. [y/N]" in faktory("clear", "mail").err
    assert not Queue.objects.paused().exists()


def test_queues_are_paused_and_resumed(asked, faktory):
    assert asked("pause", "mail", "new", "--new") == {"queues": ["mail", "new"]}
    assert asked("pause", "mail", code=2) == {"queues": []}
    assert set(Queue.objects.paused().values_list("name", flat=True)) == {"mail", "new"}
    assert faktory("resume", "--all").out == "resume: mail, new\n"
    assert not Queue.objects.paused().exists()


@pytest.mark.parametrize("words", [("pause",), ("resume", "a", "--all"), ("pause", "a\x00")])
def test_pause_and_resume_require_valid_queue_names(faktory, words):
    assert faktory(*words).code == 1


@pytest.mark.parametrize("verb", ["quiet", "terminate"])
def test_quiet_and_terminate_set_the_state_of_named_workers(asked, faktory, verb, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    WorkerFactory(wid="w1")
    WorkerFactory(wid="w2")
    assert faktory(verb, "w1").code == 1
    assert faktory(verb, "--yes").code == 1
    assert asked(verb, "w1", "--yes") == {"changed": 1}
    assert dict(WorkerProcess.objects.values_list("wid", "state")) == {"w1": verb, "w2": "running"}
    assert asked(verb, "--all", "--yes") == {"changed": 1}
    assert asked(verb, "unknown", "--yes", code=2) == {"changed": 0}


# --- usage


@pytest.mark.parametrize(
    "words", [(), ("nosuch",), ("kill",), ("jobs", "--limit", "0"), ("jobs", "--nosuch"), ("top", "--interval", "soon")]
)
def test_a_usage_error_exits_with_1(words, capsys):
    with pytest.raises(SystemExit) as stop:
        Command().run_from_argv(["manage.py", "faktory", *words])
    assert stop.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" --help")


def test_djangos_options_are_accepted_after_the_subcommand(faktory):
    parser = Command().create_parser("manage.py", "faktory")
    before = parser.parse_args(["--settings", "a.b", "--traceback", "info"])
    after = parser.parse_args(["info", "--settings", "a.b", "--traceback"])
    assert vars(before) == vars(after)
    assert (after.settings, after.traceback) == ("a.b", True)
    assert parser.parse_args(["info"]).settings is None


# --- limits


def test_removing_a_limit_of_code_says_that_it_returns(faktory):
    for name, origin in (("ring", "admin"), ("code", "code")):
        faktory("limits", "set", "task", name, "5", "--new")
        Limit.objects.filter(name=name).update(origin=origin)
    assert "returns when a node starts" in faktory("limits", "remove", "task", "code").err
    assert faktory("limits", "remove", "task", "ring").err == ""
    assert not Limit.objects.exists()
