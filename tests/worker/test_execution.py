"""Execute one job, from its JSON to its Ack or Failure, without a database."""

import asyncio
import re
import threading

import pytest

from django_faktory.brokers.remote import RemoteBroker
from django_faktory.core.json import jsontext
from django_faktory.core.payloads import Ack, Failure, Reservation, new_job
from django_faktory.tasks.compat import TaskResultStatus, task_backends, task_finished, task_started
from django_faktory.worker.execution import LONGEST_WAIT_S, prepare
from tests.project import tasks

pytestmark = pytest.mark.core
NO_BROKER = RemoteBroker("tcp://127.0.0.1:1")  # no server listens there, and none is contacted


def reserved(task, *args, attempt=1, failure="", history="", **job):
    made = new_job(jid="0123456789", jobtype=task.jobtype, args=args, result_ttl=60, **job)
    return given(made.text, attempt=attempt, failure=failure, history=history)


def given(text, attempt=1, **known):
    return Reservation(jid="0123456789", queue="default", text=text, wid="w1", attempt=attempt, result_ttl=60, **known)


def ran(task, *args, **job):
    execution = prepare(reserved(task, *args, **job))
    return asyncio.run(execution.arun(NO_BROKER)) if execution.is_async else execution.run(NO_BROKER)


def failed_before(times, wid="w0"):
    """Return the fields of a reservation for a job that failed `times` times."""
    one = {"wid": wid, "errtype": "builtins.OSError", "message": "gone", "backtrace": ["Traceback", "OSError: gone"]}
    return {"failure": jsontext.encode({"retry_count": times - 1}), "history": jsontext.encode([one] * times)}


@pytest.fixture
def seen():
    """Record each task_started and task_finished, with the status that the receiver could see at that time."""
    found = []

    def started(sender, task_result, **_):
        found.append(("started", sender, task_result.status))

    def finished(sender, task_result, **_):
        found.append(("finished", sender, task_result.status))

    task_started.connect(started)
    task_finished.connect(finished)
    yield found
    task_started.disconnect(started)
    task_finished.disconnect(finished)


BACKEND = type(task_backends["default"])
STARTED = ("started", BACKEND, TaskResultStatus.RUNNING)
SUCCESS = ("finished", BACKEND, TaskResultStatus.SUCCESSFUL)
FAILURE = ("finished", BACKEND, TaskResultStatus.FAILED)


# --- success


def test_a_successful_job_is_acknowledged_with_its_wid_and_attempt():
    assert ran(tasks.add, 1, 2, attempt=4) == Ack(jid="0123456789", wid="w1", attempt=4, result="3")


def test_a_result_of_none_is_stored_as_null():
    assert ran(tasks.noop).result == "null"


def test_keyword_arguments_are_read_from_custom():
    assert ran(tasks.add, 1, kwargs={"b": 2}).result == "3"


def test_a_result_is_converted_to_plain_json():
    report = ran(tasks.echo, 1, kwargs={"key": (2, 3)})
    assert jsontext.decode(report.result) == {"args": [1], "kwargs": {"key": [2, 3]}}


@pytest.mark.parametrize(
    "text", ["9007199254740993", "18446744073709551616", "-1" + "0" * 4000, "1e308", "0.1", '"\\u0000"', '"\\ud800"']
)
def test_arguments_arrive_exactly_as_sent(text):
    """Check W11: any JSON value arrives, lone surrogates and integers of any size included."""
    job = given(f'{{"jid":"0123456789","jobtype":"tests.project.tasks.returns","args":[{text}]}}')
    report = prepare(job).run(NO_BROKER)
    assert repr(jsontext.decode(report.result)) == repr(jsontext.decode(text))


def test_the_task_context_contains_the_attempt_and_the_job_id():
    report = ran(tasks.takes_context, "v", attempt=9, **failed_before(2))
    assert jsontext.decode(report.result) == {"attempt": 3, "id": "0123456789", "value": "v"}


def test_the_attempt_follows_retry_count_if_a_remote_server_sends_no_history():
    report = ran(tasks.takes_context, "v", failure='{"retry_count":4,"errtype":"E"}')
    assert jsontext.decode(report.result)["attempt"] == 6


def test_malformed_records_of_earlier_attempts_do_not_fail_a_job():
    assert jsontext.decode(ran(tasks.takes_context, "v", failure="{", history='[{"wid":5}]').result)["attempt"] == 1


def test_context_variables_set_by_a_job_are_discarded_when_it_ends():
    assert ran(tasks.sets_context_variable).result == ran(tasks.sets_context_variable).result == '"none"'


# --- async


def test_an_async_task_runs_on_the_callers_loop():
    execution = prepare(reserved(tasks.async_add, 1, 2))
    assert execution.is_async
    assert asyncio.run(execution.arun(NO_BROKER)) == Ack(jid="0123456789", wid="w1", attempt=1, result="3")
    assert not prepare(reserved(tasks.add, 1, 2)).is_async


def test_an_async_task_fails_like_any_other(seen):
    report = ran(tasks.async_fails, retry=0)
    assert (report.errtype, report.message) == ("builtins.ValueError", "no luck")
    assert seen == [STARTED, FAILURE]


def test_an_async_task_receives_its_context():
    assert jsontext.decode(ran(tasks.async_takes_context, "v").result)["attempt"] == 1


def test_an_async_job_cancelled_from_outside_raises_cancelled_error():
    async def cancelled():
        tasks.waiting.append(asyncio.Event())
        running = asyncio.create_task(prepare(reserved(tasks.never_ends_async)).arun(NO_BROKER))
        await tasks.waiting[-1].wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())


# --- failure


def test_a_failure_contains_the_error_the_worker_and_the_attempt():
    report = ran(tasks.fails, "out of paper", attempt=2)
    assert isinstance(report, Failure)
    assert (report.jid, report.wid, report.attempt) == ("0123456789", "w1", 2)
    assert (report.errtype, report.message) == ("builtins.ValueError", "out of paper")
    assert (report.verdict, report.retry_in_s) == ("", None)


def test_a_traceback_begins_at_the_task():
    lines = ran(tasks.fails).backtrace
    assert lines[0] == "Traceback (most recent call last):"
    assert "in fails" in lines[1]
    assert lines[-1] == "ValueError: no luck"
    assert not any("django_faktory/worker" in line for line in lines)


def test_a_long_traceback_is_shortened_to_its_end_within_the_backtrace_limit():
    lines = ran(tasks.fails_deep_down, 50).backtrace
    assert len(lines) == 30
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: bottom")
    assert "lines left out" in lines[1]
    assert len(ran(tasks.fails_deep_down, 50, backtrace=2).backtrace) == 2
    assert ran(tasks.fails_deep_down, 50, backtrace=-1).backtrace == ()


def test_wrong_arguments_fail_the_job_with_a_type_error():
    report = ran(tasks.add, 1)
    assert report.errtype == "builtins.TypeError"
    assert "missing 1 required positional argument" in report.message


@pytest.mark.parametrize("task", [tasks.exits, tasks.interrupts])
def test_a_task_cannot_end_the_worker(task):
    report = ran(task)
    assert report.errtype in ("builtins.SystemExit", "builtins.KeyboardInterrupt")


def test_an_exception_with_a_broken_str_is_still_reported_as_a_failure():
    report = ran(tasks.fails_unprintably)
    assert report.errtype == "tests.project.tasks.UnprintableError"
    assert report.message == "<its str() failed>"


def test_an_unserializable_result_kills_the_job_without_a_retry(seen):
    report = ran(tasks.returns_unserializable)
    assert (report.errtype, report.verdict) == ("builtins.TypeError", "kill")
    assert "Unsupported type: <class 'object'>" in report.message
    assert seen == [STARTED, FAILURE]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"jid":"0123456789","jobtype":"os.system","args":["ls"]}', "'os.system'; deploy the code"),
        ('{"jid":"0123456789","jobtype":"tests.project.tasks.nothing","args":[]}', "tests.project.tasks.nothing"),
    ],
)
def test_an_unknown_jobtype_fails_with_its_name_and_is_retried(text, name):
    report = prepare(given(text, attempt=3))
    assert (report.errtype, report.verdict, report.wid, report.attempt) == ("UnknownJobType", "", "w1", 3)
    assert name in report.message


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"args":[]}', '{"jobtype":"tests.project.tasks.noop"}', '{"jobtype":5,"args":[]}',
     '{"jobtype":"tests.project.tasks.noop","args":{}}',
     '{"jobtype":"tests.project.tasks.noop","args":[],"custom":{"kwargs":[1]}}',
     '{"jobtype":"tests.project.tasks.noop","args":[NaN]}',
     '{"jobtype":"tests.project.tasks.noop","args":[1' + "0" * 5000 + "]}"],
)  # fmt: skip
def test_an_unreadable_job_is_killed_as_invalid_payload(text):
    report = prepare(given(text))
    assert (report.errtype, report.verdict) == ("InvalidPayload", "kill")
    assert report.message.startswith("invalid J") or report.message.startswith("invalid job")


# --- consequences of a failure


def test_a_retry_request_sets_the_delay_of_the_next_attempt():
    assert ran(tasks.asks_for_retry, 90).retry_in_s == 90.0
    assert ran(tasks.asks_for_retry, 0).retry_in_s == 0.0
    assert ran(tasks.asks_for_retry).retry_in_s is None


@pytest.mark.parametrize(
    ("wish", "becomes"), [(1e300, LONGEST_WAIT_S), (float("nan"), None), (float("inf"), LONGEST_WAIT_S)]
)
def test_an_out_of_range_retry_delay_is_clamped_or_ignored(wish, becomes):
    tasks.wishes.append(wish)
    assert ran(tasks.asks_for_odd_retry).retry_in_s == becomes


@pytest.mark.parametrize(
    ("task", "verdict", "message"),
    [(tasks.asks_for_kill, "kill", "needs inspection"), (tasks.asks_for_discard, "discard", "no longer needed")],
)
def test_kill_and_discard_requests_end_the_job(task, verdict, message, seen):
    report = ran(task)
    assert (report.verdict, report.message) == (verdict, message)
    assert seen == [STARTED, FAILURE]


def test_retry_on_makes_other_failures_final():
    assert ran(tasks.retries_only_connection_errors, "connection").verdict == ""
    assert ran(tasks.retries_only_connection_errors, "value").verdict == "kill"


def test_discard_on_discards_the_job():
    assert ran(tasks.discards_lookup_errors).verdict == "discard"


def test_backoff_computes_the_retry_delay_from_exception_and_result():
    assert ran(tasks.fails_with_backoff, retry=2).retry_in_s == 7
    assert ran(tasks.fails_with_backoff, retry=2, **failed_before(1)).retry_in_s == 14


def test_backoff_is_not_called_when_no_attempt_is_left():
    report = ran(tasks.fails_with_backoff, retry=2, **failed_before(2))
    assert (report.retry_in_s, report.verdict) == (None, "")


def test_a_failing_backoff_is_logged_and_the_default_backoff_applies(caplog):
    assert ran(tasks.fails_with_broken_backoff).retry_in_s is None
    assert "backoff of a task failed" in caplog.text


def test_a_backoff_without_a_value_selects_the_default_backoff():
    assert ran(tasks.fails_with_modest_backoff).retry_in_s is None


# --- signals


def test_task_signals_have_the_backend_class_as_sender(seen):
    ran(tasks.noop)
    assert seen == [STARTED, SUCCESS]


def test_a_failure_that_is_retried_sends_no_task_finished(seen):
    ran(tasks.fails, retry=2, **failed_before(1))
    assert seen == [STARTED]


@pytest.mark.parametrize("job", [{"retry": 0}, {"retry": -1}, {"retry": 1, **failed_before(1)}])
def test_a_failure_with_no_attempt_left_sends_task_finished(seen, job):
    ran(tasks.fails, **job)
    assert seen == [STARTED, FAILURE]


@pytest.mark.parametrize(("signal", "report"), [(task_started, Failure), (task_finished, Ack)])
def test_a_job_is_reported_although_a_receiver_exits(signal, report, caplog):
    def leave(**_):
        raise SystemExit

    signal.connect(leave)
    try:
        assert isinstance(ran(tasks.noop), report)
    finally:
        signal.disconnect(leave)
    assert "a receiver of a signal exited" in caplog.text


def test_a_final_failure_is_logged_by_django_with_its_traceback(caplog):
    """Check that the signal is sent inside the except block: Django's own receiver reads sys.exc_info()."""
    ran(tasks.fails, retry=0)
    record = [record for record in caplog.records if record.name in ("django.tasks", "django_tasks")][-1]
    assert record.levelname == "ERROR"
    assert "no luck" in caplog.text


def test_a_failure_is_logged_with_a_traceback_and_a_requested_retry_without(caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        ran(tasks.fails)
        ran(tasks.asks_for_retry)
    mine = [record for record in caplog.records if record.name == "django_faktory.worker.execution"]
    assert [(record.levelname, record.exc_info is not None) for record in mine] == [("WARNING", True), ("INFO", False)]


def test_a_dead_job_is_logged_in_one_line_with_id_attempt_and_error(caplog):
    with caplog.at_level("INFO", logger="django_faktory"):
        ran(tasks.fails, retry=0)
        ran(tasks.asks_for_kill)
        ran(tasks.asks_for_discard)
    mine = [record for record in caplog.records if record.name == "django_faktory.worker.execution"]
    logged = [(record.levelname, record.getMessage().partition(" jid=")[0], bool(record.exc_info)) for record in mine]
    assert logged == [("ERROR", "job dead", True), ("ERROR", "job dead", False), ("INFO", "job discarded", False)]
    assert re.fullmatch(
        r"job dead jid=\S+ jobtype=tests\.project\.tasks\.fails attempt=1 error='no luck'", mine[0].getMessage()
    )


def test_a_logged_traceback_begins_with_the_task(caplog):
    ran(tasks.fails)
    [record] = [record for record in caplog.records if record.name == "django_faktory.worker.execution"]
    assert "no luck" in caplog.text
    assert record.exc_info[2].tb_frame.f_code.co_filename == tasks.__file__


def test_a_failing_signal_receiver_does_not_fail_the_job():
    def broken(**_):
        raise RuntimeError("not the job's fault")

    task_started.connect(broken)
    try:
        assert ran(tasks.add, 1, 2).result == "3"
    finally:
        task_started.disconnect(broken)


def test_the_finished_result_contains_value_errors_and_worker_ids():
    good = prepare(reserved(tasks.add, 1, 2, **failed_before(1)))
    good.run(NO_BROKER)
    assert (good.result.return_value, good.result.worker_ids) == (3, ["w0", "w1"])
    assert [error.exception_class for error in good.result.errors] == [OSError]
    bad = prepare(reserved(tasks.fails, retry=0))
    bad.run(NO_BROKER)
    assert bad.result.is_finished
    assert bad.result.errors[0].exception_class is ValueError
    assert bad.result.errors[0].traceback.endswith("ValueError: no luck\n")


def test_jobs_of_one_thread_share_its_cache(settings):
    """Django keeps a cache in the context that created it, and a job's own context ends with the job."""

    def two_jobs():
        found.extend(ran(tasks.returns_its_cache).result for _ in range(2))

    found = []
    thread = threading.Thread(target=two_jobs)
    thread.start()
    thread.join()
    assert found[0] == found[1]
