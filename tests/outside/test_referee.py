"""Test that each rule of the referee reports its violation in a handwritten history, and accepts its exceptions."""

import json
from collections import Counter

import pytest

from tests.faults.history import History
from tests.outside import referee
from tests.outside.evidence import Evidence
from tests.outside.match import Left, Row

pytestmark = pytest.mark.core
PLAIN = {"task": "wire", "queue": "wire", "fails": 0, "kind": "plain"}
GOOD = Row("succeeded", 0, 0, 0, "", [])


class HistoryWriter:
    """Write a history in the format of its writers: `at`, a word, and further words."""

    def __init__(self, folder):
        self.folder = folder
        self._lines = []

    def note(self, at, *words):
        self._lines.append(f"{at} {' '.join(words)}\n")

    def job(self, jid, at=1.0, **spec):
        self.note(at, "sent", jid, json.dumps(PLAIN | spec, separators=(",", ":")))
        self.note(at, "ok", jid)

    def attempt(self, jid, begin, end, outcome="ok", *, pid="7", executor="7", number="0"):
        run = (jid, executor, pid, number + jid)
        self.note(begin, "begin", *run)
        if outcome:
            self.note(end, "end", *run, outcome)

    def found(self, rule, rows=None, **left):
        (self.folder / "all.history").write_text("".join(self._lines))
        nothing = {"callbacks": set(), "effects": Counter(), "descriptions": set(), "processed": 0, "failed": 0,
                   "sizes": {}, "held_locks": [], "used_limits": [], "wrong_batches": []}  # fmt: skip
        return list(rule(Evidence(History(self.folder)), Left(jobs=rows or {}, **nothing | left)))


@pytest.fixture
def history(tmp_path):
    return HistoryWriter(tmp_path)


def test_an_accepted_job_without_a_row_or_an_attempt_is_lost(history):
    history.job("a")
    assert history.found(referee.lost)
    history.attempt("a", 2, 3)
    assert history.found(referee.lost, {"a": GOOD}) == []


def test_a_job_that_is_unexpectedly_dead_is_lost(history):
    history.job("a")
    history.attempt("a", 2, 3)
    assert history.found(referee.lost, {"a": GOOD._replace(state="dead", errtype="ReservationExpired")})


def test_a_job_of_a_rolled_back_transaction_that_runs_is_reported(history):
    history.note(1, "sent", "a", json.dumps(PLAIN, separators=(",", ":")))
    history.note(1, "undone", "a")
    assert history.found(referee.made_up) == []
    history.attempt("a", 2, 3)
    assert history.found(referee.made_up)


def test_overlapping_attempts_are_reported_unless_the_first_was_suspended(history):
    history.job("a")
    history.attempt("a", 2, 9)
    history.attempt("a", 5, 6, pid="8", executor="8")
    assert history.found(referee.run_twice)
    history.note(9, "frozen", "7", "2.5", "6")
    assert history.found(referee.run_twice) == []


def test_a_second_attempt_needs_a_failure_or_a_killed_process(history):
    history.job("a")
    history.attempt("a", 2, 3)
    history.attempt("a", 5, 6, pid="8", executor="8")
    assert history.found(referee.run_twice)
    history.note(3.5, "kill", "7")
    assert history.found(referee.run_twice) == []


def test_an_attempt_may_begin_between_a_kill_record_and_its_signal(history):
    history.job("a")
    history.note(1.999, "kill", "7")
    history.attempt("a", 2, 3)
    history.attempt("a", 5, 6, pid="8", executor="8")
    assert history.found(referee.run_twice) == []


def test_a_second_attempt_is_accepted_if_the_process_was_suspended(history):
    history.job("a")
    history.attempt("a", 2, 3)
    history.attempt("a", 9, 10, pid="8", executor="8")
    assert history.found(referee.run_twice, {"a": GOOD})
    history.note(3.1, "frozen", "7", "3.1", "4.0")
    assert history.found(referee.run_twice, {"a": GOOD}) == []


def test_a_second_attempt_after_an_acknowledgement_is_reported(history):
    history.job("a")
    history.attempt("a", 2, 3, executor="t.1")
    history.attempt("a", 5, 6, pid="8", executor="t.2")
    history.note(3.5, "kill", "7")
    assert history.found(referee.run_twice) == []
    history.note(3.2, "acked", "a", "t.1")
    assert history.found(referee.run_twice)


def test_a_rolled_back_atomic_task_may_run_again(history):
    history.job("a", effect=1)
    history.attempt("a", 2, 3)
    history.attempt("a", 3.1, 4, number="1")
    assert history.found(referee.run_twice, {"a": GOOD})
    assert history.found(referee.run_twice, {"a": GOOD._replace(interruptions=1)}) == []


def test_a_second_attempt_is_accepted_if_the_client_got_no_replies(history):
    history.job("a")
    history.attempt("a", 2, 3, executor="t.1")
    history.attempt("a", 9, 9.5, pid="8", executor="t.2")
    history.note(10, "acked", "a", "t.1")
    assert history.found(referee.run_twice)
    history.note(10, "mute", "t.1", "3.1")
    assert history.found(referee.run_twice) == []


def test_a_reservation_may_expire_while_the_database_is_slow(history):
    history.job("a")
    history.attempt("a", 2, 3, "cut")
    expired = {"a": GOOD._replace(state="dead", errtype="ReservationExpired")}
    assert history.found(referee.lost, expired)
    history.note(9, "stall", "2.5", "4.0")
    assert history.found(referee.lost, expired) == []


def test_a_third_loss_without_a_begin_record_needs_a_kill(history):
    history.job("a")
    history.attempt("a", 2, 3, "", pid="7")
    history.attempt("a", 5, 6, "", pid="8")
    history.note(3, "kill", "7")
    history.note(6, "kill", "8")
    dead = {"a": GOOD._replace(state="dead", errtype="WorkerLost", losses=3)}
    assert history.found(referee.lost, dead)
    history.note(4, "kill", "9")
    assert history.found(referee.lost, dead) == []


def test_an_unexpected_failure_is_reported(history):
    history.job("a")
    history.attempt("a", 2, 3)
    assert history.found(referee.failures, {"a": GOOD._replace(failures=1, errors=["WorkerShutdown"])})


def test_a_duplicate_effect_of_an_atomic_task_is_reported(history):
    history.job("a", effect=1)
    assert history.found(referee.effects, {"a": GOOD}, effects=Counter(a=2))
    assert history.found(referee.effects, {"a": GOOD}, effects=Counter(a=1)) == []


def test_a_job_with_steps_has_the_effect_of_each_step_once(history):
    history.job("a", effect=1, parts=2)
    once = Counter({"a.0": 1, "a.1": 1})
    assert history.found(referee.effects, {"a": GOOD}, effects=once) == []
    assert len(history.found(referee.effects, {"a": GOOD}, effects=once + Counter({"a.1": 1}))) == 1
    assert len(history.found(referee.effects, {"a": GOOD}, effects=Counter({"a.0": 1}))) == 1
    dead = GOOD._replace(state="dead")
    assert history.found(referee.effects, {"a": dead}, effects=Counter({"a.0": 1})) == []
    assert len(history.found(referee.effects, {"a": dead}, effects=Counter({"a.0": 2}))) == 1


def test_two_concurrent_jobs_of_one_lock_key_are_reported(history):
    for jid, begin in (("a", 2), ("b", 2.5)):
        history.job(jid, lock="k")
        history.attempt(jid, begin, begin + 1)
    assert history.found(referee.locks)


def test_a_limit_applies_to_jobs_claimed_after_its_acknowledgement(history):
    history.note(3, "limit", "key", "k", "1")
    history.note(4, "limited", "key", "k", "1")
    for jid, begin in (("a", 5), ("b", 5.5)):
        history.job(jid, limit="k")
        history.attempt(jid, begin, 30)
    assert history.found(referee.limits) == [], "both may have been claimed before"
    history.job("c", limit="k")
    history.attempt("c", 20, 21)
    assert history.found(referee.limits)


def test_two_unfinished_jobs_of_one_unique_key_are_reported(history):
    history.job("a", at=1, unique=3)
    history.job("b", at=5, unique=3)
    history.attempt("a", 2, 3)
    history.attempt("b", 6, 7)
    assert history.found(referee.unique) == []
    history.job("c", at=6.5, unique=3)
    history.attempt("c", 8, 9)
    assert history.found(referee.unique)


def test_a_scheduled_job_that_runs_early_is_reported(history):
    history.note(1, "sent", "b", json.dumps(PLAIN | {"at": 5.0}, separators=(",", ":")))
    history.attempt("b", 4, 4.5)
    assert history.found(referee.early)


def batch(history, *, member_ends):
    history.note(1, "new", "t", '{"parent":"","kinds":["complete","success"]}')
    history.note(1.1, "new-ok", "t", "b-1")
    history.job("m", tag="t")
    history.note(2, "commit", "t")
    history.note(2.1, "committed", "t")
    history.attempt("m", 1.5, member_ends)


def test_a_missing_or_repeated_callback_is_reported(history):
    batch(history, member_ends=3)
    assert len(history.found(referee.callbacks, {"m": GOOD})) == 2, "neither came"
    history.note(4, "called", "c", "t", "complete")
    history.note(5, "called", "s", "t", "success")
    assert history.found(referee.callbacks, {"m": GOOD}) == []
    history.note(6, "called", "s2", "t", "success")
    assert history.found(referee.callbacks, {"m": GOOD})


def test_a_callback_before_a_member_ends_or_after_a_reopen_is_reported(history):
    batch(history, member_ends=9)
    history.note(4, "called", "c", "t", "complete")
    history.note(10, "called", "s", "t", "success")
    assert len(history.found(referee.callbacks, {"m": GOOD})) == 1
    history.note(9.5, "reopened", "t")
    history.note(11, "recommit", "t")
    assert len(history.found(referee.callbacks, {"m": GOOD})) == 2


def test_a_member_that_failed_with_its_database_session_counts_as_run(history):
    batch(history, member_ends=9)
    history.note(4, "called", "c", "t", "complete")
    history.note(10, "called", "s", "t", "success")
    history.note(3, "dbfault")
    assert history.found(referee.callbacks, {"m": GOOD})
    failed = GOOD._replace(failures=1, errors=["django.db.utils.OperationalError"])
    assert history.found(referee.callbacks, {"m": failed}) == []


def test_a_refusal_without_a_database_fault_is_reported(history):
    history.note(1, "sent", "a", json.dumps(PLAIN, separators=(",", ":")))
    history.note(4, "refused", "a", "-ERR_database_unavailable")
    assert history.found(referee.answers)
    history.note(3, "dbfault")
    assert history.found(referee.answers) == []


def test_a_command_that_waits_while_others_are_answered_is_reported(history):
    history.note(1, "sent", "u", json.dumps(PLAIN | {"kind": "may_block"}, separators=(",", ":")))
    history.note(6, "ok", "u")
    assert history.found(referee.neighbours) == []
    for number in range(3):
        history.job(f"p{number}", at=2 + number)
    assert history.found(referee.neighbours)


def test_counters_that_differ_from_the_stored_jobs_are_reported(history):
    rows = {"a": GOOD, "b": GOOD._replace(failures=2)}
    assert history.found(referee.counters, rows, processed=4, failed=2) == []
    assert history.found(referee.counters, rows, processed=5, failed=2)
    assert history.found(referee.counters, rows, processed=4, failed=2, used_limits=["key k 1"])
