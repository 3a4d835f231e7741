"""The contract of brokers, as tests that do not depend on the implementation. A subclass provides the `broker` fixture.

The tests read rows only to check the effect of a verb, and change rows only to simulate the passing of time.
"""

from datetime import UTC, datetime, timedelta

import pytest

from django_faktory.core.payloads import Ack, Beat, FetchRequest, Tracked, TrackUpdate, WorkerIdentity, failure, rfc3339
from django_faktory.errors import JobNotFound, NotUnique, UnknownWorker
from django_faktory.models import Job, Tracking, WorkerProcess
from django_faktory.store.statistics import counts
from tests.factories import QueueFactory, payload

ME = WorkerIdentity(wid="wid-me", hostname="localhost", pid=1, labels=("python",))
LATER = timedelta(hours=1)


@pytest.mark.django_db(transaction=True)
class BrokerContract:
    """Mixin: a subclass provides the `broker` fixture, and is named Test…."""

    blocking = False

    @pytest.fixture
    def me(self, broker):
        broker.hello(ME)
        return ME.wid

    @staticmethod
    def fetch(broker, *queues, wid="wid-me", count=1):
        [found] = broker.fetch([FetchRequest(queues=queues or ("default",), wid=wid, count=count)])
        return found

    @classmethod
    def fetch_all(cls, broker, *queues, wid="wid-me", count):
        found = []
        while len(found) < count:
            found += cls.fetch(broker, *queues, wid=wid, count=count - len(found))
        return found

    def test_a_pushed_job_is_fetched_with_its_arguments(self, broker, me):
        job = payload(args=[1, "two", None])
        assert broker.push([job]) == [None]
        [got] = self.fetch(broker)
        assert (got.jid, got.queue, got.wid) == (job.jid, "default", me)
        assert '"args":[1,"two",null]' in got.text

    def test_empty_sets_return_empty_results(self, broker, me):
        assert broker.push([]) == []
        assert broker.fetch([]) == []
        assert broker.ack([]) == []
        assert broker.fail([]) == []

    def test_a_queue_is_first_in_first_out(self, broker, me):
        jobs = [payload() for _ in range(5)]
        broker.push(jobs[:3])
        broker.push(jobs[3:])
        assert [got.jid for got in self.fetch_all(broker, count=5)] == [job.jid for job in jobs]

    def test_jobs_with_higher_priority_are_fetched_first(self, broker, me):
        low, high, middle = payload(priority=-50), payload(priority=100), payload()
        broker.push([low, high, middle])
        assert [got.jid for got in self.fetch_all(broker, count=3)] == [high.jid, middle.jid, low.jid]

    def test_queues_are_tried_in_the_order_given(self, broker, me):
        """W13: the request's order, and not the priority, decides."""
        first, second, third = payload(queue="a"), payload(queue="b", priority=100), payload(queue="c")
        broker.push([first, second, third])
        assert [got.queue for got in self.fetch_all(broker, "c", "a", "b", count=3)] == ["c", "a", "b"]

    def test_jobs_of_queues_not_requested_are_not_fetched(self, broker, me):
        broker.push([payload(queue="other")])
        assert self.fetch(broker, "default") == []

    def test_several_requests_are_answered_in_order_each_from_its_own_queues(self, broker, me):
        a, b, c = payload(queue="a"), payload(queue="b"), payload(queue="c")
        broker.push([a, b, c])
        found = broker.fetch(
            [
                FetchRequest(queues=("b", "a"), wid=me),
                FetchRequest(queues=("c",), wid=me),
                FetchRequest(queues=("a", "c"), wid=me),
            ]
        )
        assert [[got.jid for got in one] for one in found] == [[b.jid], [c.jid], [a.jid]]

    def test_a_paused_queue_yields_no_job_and_does_not_block_others(self, broker, me):
        QueueFactory(name="paused", paused_at=datetime(2026, 1, 1, tzinfo=UTC))
        broker.push([payload(queue="paused"), payload(queue="open")])
        assert [got.queue for got in self.fetch(broker, "paused", "open", count=1)] == ["open"]
        assert self.fetch(broker, "paused") == []

    def test_a_scheduled_job_is_not_fetched_before_its_time(self, broker, me):
        job = payload(at=datetime.now(UTC) + LATER)
        broker.push([job])
        assert self.fetch(broker) == []
        assert Job.objects.get(jid=job.jid).state == "scheduled"

    def test_a_job_scheduled_in_the_past_is_fetched_at_once(self, broker, me):
        job = payload(at=datetime.now(UTC) - LATER)
        broker.push([job])
        assert [got.jid for got in self.fetch(broker)] == [job.jid]

    def test_pushing_an_existing_jid_again_changes_nothing(self, broker, me):
        """W10: PUSH of a known jid is answered OK."""
        job = payload("again", args=[1])
        broker.push([job])
        assert broker.push([payload("again", args=[2])]) == [None]
        [got] = self.fetch(broker)
        assert '"args":[1]' in got.text
        assert broker.push([payload("again", args=[3])]) == [None]
        assert Job.objects.count() == 1
        assert self.fetch(broker) == []

    def test_the_same_jid_twice_in_one_push_stores_one_job(self, broker, me):
        broker.push([payload("twin", args=[1]), payload("twin", args=[2])])
        assert '"args":[1]' in Job.objects.get().payload

    def test_an_exchange_runs_ack_push_and_fetch_in_this_order(self, broker, me):
        broker.push([payload(), payload()])
        done, running = self.fetch_all(broker, count=2)
        new = payload()
        exchanged = broker.exchange(
            [new],
            [Ack(jid=done.jid, wid=me, attempt=done.attempt), Ack(jid="unknown-job", wid=me)],
            [FetchRequest(queues=("default",), wid=me)],
        )
        assert exchanged.pushed == [None]
        assert exchanged.acked[0] is True
        [[got]] = exchanged.fetched
        assert got.jid == new.jid
        assert set(Job.objects.values_list("jid", "state")) == {(running.jid, "working"), (new.jid, "working")}

    def test_an_exchange_serves_requests_with_different_queues(self, broker, me):
        broker.push([payload(queue="a"), payload(queue="b")])
        requests = [
            FetchRequest(queues=("a", "b"), wid=me), FetchRequest(queues=("b", "c"), wid=me),
            FetchRequest(queues=("a", "c"), wid=me),
        ]  # fmt: skip
        exchanged = broker.exchange([payload(queue="c")], [], requests)
        assert [[got.queue for got in one] for one in exchanged.fetched] == [["a"], ["b"], ["c"]]

    def test_a_large_exchange_processes_all_its_jobs_and_acks(self, broker, me):
        broker.push([payload() for _ in range(600)])
        held = self.fetch_all(broker, count=600)
        exchanged = broker.exchange(
            [payload(queue="b") for _ in range(600)],
            [Ack(jid=job.jid, wid=me, attempt=job.attempt) for job in held] + [Ack(jid="no\x00such", wid=me)],
            [FetchRequest(queues=("b",), wid=me)],
        )
        assert exchanged.pushed == [None] * 600
        assert exchanged.acked[:600] == [True] * 600
        assert [len(one) for one in exchanged.fetched] == [1]
        assert Job.objects.count() == 600

    def test_an_acknowledged_job_is_deleted(self, broker, me):
        broker.push([payload()])
        [got] = self.fetch(broker)
        assert broker.ack([Ack(jid=got.jid, wid=me, attempt=got.attempt)]) == [True]
        assert not Job.objects.exists()

    def test_a_job_with_a_result_ttl_is_kept_as_succeeded(self, broker, me):
        broker.push([payload(result_ttl=60)])
        [got] = self.fetch(broker)
        broker.ack([Ack(jid=got.jid, wid=me, attempt=got.attempt, result='{"a":1}')])
        job = Job.objects.get()
        assert job.state == "succeeded"
        assert (job.purge_at - job.finished_at).total_seconds() == pytest.approx(60, abs=0.01)
        assert job.result == ('{"a":1}' if broker.keeps_results else None)

    def test_a_failed_job_is_scheduled_for_retry_with_its_failure_recorded(self, broker, me):
        broker.push([payload(retry=3)])
        [got] = self.fetch(broker)
        report = failure(jid=got.jid, wid=me, attempt=got.attempt, errtype="KeyError", message="no", backtrace=["l1"])
        assert broker.fail([report]) == [True]
        job = Job.objects.get()
        assert (job.state, job.errtype, job.failures) == ("retries", "KeyError", 1)
        assert 15 <= (job.run_at - datetime.now(UTC)).total_seconds() + 2 <= 48
        assert '"message":"no"' in job.failure

    def test_a_job_without_remaining_retries_becomes_dead(self, broker, me):
        broker.push([payload(retry=1)])
        for state in ("retries", "dead"):
            Job.objects.filter(state="retries").update(state="enqueued", enqueued_at=datetime.now(UTC), run_at=None)
            [got] = self.fetch(broker)
            broker.fail([failure(jid=got.jid, wid=me, attempt=got.attempt, errtype="E")])
            assert Job.objects.get().state == state

    @pytest.mark.parametrize(("retry", "ttl", "state"), [(0, None, None), (0, 60, "dead"), (-1, None, "dead")])
    def test_a_job_without_retries_ends_at_its_first_failure(self, broker, me, retry, ttl, state):
        """W18: a kept result keeps the job as dead."""
        broker.push([payload(retry=retry, result_ttl=ttl)])
        [got] = self.fetch(broker)
        broker.fail([failure(jid=got.jid, wid=me, attempt=got.attempt)])
        assert [job.state for job in Job.objects.all()] == ([state] if state else [])

    def test_failing_an_unknown_jid_returns_job_not_found(self, broker, me):
        """W17: the report is refused with JobNotFound."""
        [answer] = broker.fail([failure(jid="unknown-job", wid=me)])
        assert isinstance(answer, JobNotFound)
        assert str(answer) == "Job not found unknown-job"

    @pytest.mark.parametrize("ttl", [None, 60])
    def test_an_ended_job_is_unknown_to_reports_whether_its_row_is_kept_or_not(self, broker, me, ttl):
        """W16, W17: an acknowledgement is late, a failure is refused."""
        broker.push([payload(result_ttl=ttl)])
        [got] = self.fetch(broker)
        report = Ack(jid=got.jid, wid=me, attempt=got.attempt)
        broker.ack([report])
        late = counts.read(using="default").totals["late"]
        assert broker.ack([report]) == broker.ack([Ack(jid="unknown-job", wid=me)])
        assert counts.read(using="default").totals["late"] == late + 2
        [answer] = broker.fail([failure(jid=got.jid, wid=me, attempt=got.attempt)])
        assert str(answer) == f"Job not found {got.jid}"
        assert list(Job.objects.values_list("state", "failures")) == ([("succeeded", 0)] if ttl else [])

    def test_acknowledging_an_unknown_jid_changes_nothing(self, broker, me):
        broker.push([payload()])
        broker.ack([Ack(jid="unknown-job", wid=me)])
        assert Job.objects.count() == 1

    def test_a_late_report_does_not_affect_the_new_worker_of_the_job(self, broker, me):
        """W16, W17: another worker has received the job meanwhile."""
        broker.push([payload()])
        [got] = self.fetch(broker)
        Job.objects.update(wid="wid-other", attempt=2)
        broker.ack([Ack(jid=got.jid, wid=me, attempt=got.attempt)])
        broker.fail([failure(jid=got.jid, wid=me, attempt=got.attempt)])
        job = Job.objects.get()
        assert (job.state, job.wid, job.attempt, job.failures) == ("working", "wid-other", 2, 0)

    def test_a_quiet_worker_gets_no_job(self, broker, me):
        """W15: the jobs stay enqueued."""
        WorkerProcess.objects.filter(wid=me).update(state="quiet")
        broker.push([payload()])
        assert self.fetch(broker) == []
        assert Job.objects.get().state == "enqueued"

    def test_a_beat_returns_the_requested_worker_state(self, broker, me):
        """W21: the reply is the state that was set."""
        assert broker.beat([Beat(wid=me, rss_kb=1234)]) == [""]
        assert WorkerProcess.objects.get(wid=me).rss_kb == 1234
        WorkerProcess.objects.filter(wid=me).update(state="terminate")
        assert broker.beat([Beat(wid=me)]) == ["terminate"]

    def test_a_worker_state_only_advances_to_quiet_and_terminate(self, broker, me):
        """W21: a state only advances, to quiet and then terminate."""
        assert broker.beat([Beat(wid=me, current_state="quiet")]) == ["quiet"]
        assert broker.beat([Beat(wid=me, current_state="running")]) == ["quiet"]
        assert broker.beat([Beat(wid=me, current_state="terminate")]) == ["terminate"]
        assert broker.beat([Beat(wid=me, current_state="quiet")]) == ["terminate"]

    def test_a_beat_of_an_unknown_worker_returns_unknown_worker(self, broker, me):
        [answer] = broker.beat([Beat(wid="wid-unknown")])
        assert isinstance(answer, UnknownWorker)
        assert str(answer) == "unknown worker wid-unknown"

    def test_info_counts_queues_sets_and_totals(self, broker, me):
        """W22: queue sizes, sets and totals."""
        broker.push([payload(queue="a"), payload(queue="a"), payload(queue="b"), payload(retry=0)])
        broker.push([payload(at=datetime.now(UTC) + LATER)])
        [first] = self.fetch(broker)
        broker.fail([failure(jid=first.jid, wid=me, attempt=first.attempt)])
        [second] = self.fetch(broker, "b")
        broker.ack([Ack(jid=second.jid, wid=me, attempt=second.attempt)])
        [_] = self.fetch(broker, "a")
        info = broker.info()
        assert {name: info["queues"].get(name) for name in ("a", "b", "default")} == {"a": 1, "b": 0, "default": 0}
        assert info["sets"] == {"blocked": 0, "dead": 0, "retries": 0, "scheduled": 1, "working": 1}
        assert (info["total_processed"], info["total_failures"]) == (2, 1)
        assert info["total_enqueued"] == 1

    # --- job options: W27

    def test_a_second_unique_job_is_refused_while_the_first_exists(self, broker, me):
        first, second = (payload(args=[1], custom={"unique_for": 60}) for _ in range(2))
        assert broker.push([first]) == [None]
        [refusal] = broker.push([second])
        assert isinstance(refusal, NotUnique)
        assert (refusal.code, str(refusal)) == ("NOTUNIQUE", "Job not unique")
        assert [job.jid for job in Job.objects.all()] == [first.jid]

    def test_one_push_stores_only_the_first_of_two_equal_unique_jobs(self, broker, me):
        lock = {"unique_for": 60}
        jobs = [payload(args=[1], custom=lock), payload(args=[1], custom=lock), payload(args=[1]), payload(args=[1])]
        answers = broker.push(jobs)
        assert [type(answer) for answer in answers] == [type(None), NotUnique, type(None), type(None)]
        assert [got.jid for got in self.fetch_all(broker, count=3)] == [jobs[0].jid, jobs[2].jid, jobs[3].jid]

    def test_unique_jobs_of_one_push_keep_their_order(self, broker, me):
        jobs = [payload(args=[number], custom={"unique_for": 60}) for number in range(20)]
        assert broker.push(jobs) == [None] * 20
        assert [got.jid for got in self.fetch_all(broker, count=20)] == [job.jid for job in jobs]

    def test_a_unique_job_may_be_pushed_again_with_its_jid(self, broker, me):
        """W10 is checked before uniqueness."""
        job = payload(args=[1], custom={"unique_for": 60})
        assert broker.push([job]) == [None]
        assert broker.push([job]) == [None]
        assert Job.objects.count() == 1

    def test_the_unique_lock_is_released_only_when_the_job_succeeds(self, broker, me):
        def another():
            return payload(args=[1], custom={"unique_for": 60})

        broker.push([another()])
        [got] = self.fetch(broker)
        assert isinstance(broker.push([another()])[0], NotUnique)
        broker.fail([failure(jid=got.jid, wid=me, attempt=got.attempt)])
        assert isinstance(broker.push([another()])[0], NotUnique)
        Job.objects.update(state="enqueued", enqueued_at=datetime.now(UTC), run_at=None)
        [got] = self.fetch(broker)
        broker.ack([Ack(jid=got.jid, wid=me, attempt=got.attempt)])
        assert broker.push([another()]) == [None]

    def test_a_unique_lock_until_start_is_released_when_the_job_is_fetched(self, broker, me):
        def another():
            return payload(args=[1], custom={"unique_for": 60, "unique_until": "start"})

        broker.push([another()])
        assert isinstance(broker.push([another()])[0], NotUnique)
        assert len(self.fetch(broker)) == 1
        assert broker.push([another()]) == [None]

    def test_uniqueness_applies_to_pushes_of_an_exchange(self, broker, me):
        lock = {"unique_for": 60}
        exchanged = broker.exchange(
            [payload(args=[1], custom=lock), payload(args=[1], custom=lock)],
            [],
            [FetchRequest(queues=("default",), wid=me)],
        )
        assert [type(answer) for answer in exchanged.pushed] == [type(None), NotUnique]
        assert [len(got) for got in exchanged.fetched] == [1]

    def test_an_expired_job_is_not_fetched_and_does_not_block_later_jobs(self, broker, me):
        ago = datetime.now(UTC) - LATER
        late, good = payload(custom={"expires_at": rfc3339(ago)}), payload(custom={"expires_in": 3600})
        assert broker.push([late, good]) == [None, None]
        assert [got.jid for got in self.fetch(broker, count=1)] == [good.jid]
        assert self.fetch(broker) == []

    def test_requests_with_different_queues_get_no_expired_job(self, broker, me):
        ago = rfc3339(datetime.now(UTC) - LATER)
        jobs = [payload(queue=queue, custom={"expires_at": ago}) for queue in "ab"] + [payload(queue="b")]
        broker.push(jobs)
        requests = [FetchRequest(queues=("a", "b"), wid=me), FetchRequest(queues=("b", "a"), wid=me)]
        assert [got.jid for one in broker.fetch(requests) for got in one] == [jobs[2].jid]

    def test_a_tracked_job_reports_its_state_and_progress(self, broker, me):
        job = payload(custom={"track": 1})
        broker.push([job])
        assert self.state(broker, job) == ("enqueued", None, None)
        [got] = self.fetch(broker)
        broker.track_set([TrackUpdate(jid=job.jid, percent=40, desc="halfway, nearly")])
        assert self.state(broker, job) == ("working", 40, "halfway, nearly")
        broker.track_set([TrackUpdate(jid=job.jid, percent=50)])
        assert self.state(broker, job) == ("working", 50, "halfway, nearly")
        broker.ack([Ack(jid=job.jid, wid=me, attempt=got.attempt)])
        assert self.state(broker, job) == ("success", 50, "halfway, nearly")
        broker.track_set([TrackUpdate(jid=job.jid, percent=100)])
        assert self.state(broker, job) == ("success", 100, "halfway, nearly")

    def test_track_get_returns_the_state_of_an_untracked_job(self, broker, me):
        scheduled, failing, dying, done = payload(at=datetime.now(UTC) + LATER), payload(), payload(retry=-1), payload()
        broker.push([failing, dying, done, scheduled])
        for job in (failing, dying):
            [got] = self.fetch(broker)
            broker.fail([failure(jid=job.jid, wid=me, attempt=got.attempt)])
        [got] = self.fetch(broker)
        broker.ack([Ack(jid=done.jid, wid=me, attempt=got.attempt)])
        states = [one.state for one in broker.track_get([job.jid for job in (scheduled, failing, dying, done)])]
        assert states == ["enqueued", "failed", "dead", "unknown"]

    def test_tracking_an_unknown_job_stores_nothing(self, broker, me):
        broker.track_set([TrackUpdate(jid="unknown-job", percent=1)])
        assert broker.track_get(["unknown-job"]) == [Tracked(jid="unknown-job", state="unknown", updated_at=None)]
        assert not Tracking.objects.exists()

    @pytest.mark.parametrize("jid", ["", " ", "two words", "line\r\nFLUSH", "\x00", "\ud800", "é" * 300])
    def test_track_get_of_an_invalid_jid_returns_unknown(self, broker, me, jid):
        job = payload()
        broker.push([job])
        assert [one.state for one in broker.track_get([jid, job.jid, jid])] == ["unknown", "enqueued", "unknown"]

    def test_a_job_is_tracked_from_its_first_progress_report(self, broker, me):
        job = payload()
        broker.push([job])
        [got] = self.fetch(broker)
        broker.track_set([TrackUpdate(jid=job.jid, percent=10)])
        broker.ack([Ack(jid=job.jid, wid=me, attempt=got.attempt)])
        assert self.state(broker, job) == ("success", 10, None)

    def test_a_reservation_is_extended_but_never_shortened(self, broker, me):
        job = payload(reserve_for=600)
        broker.push([job])
        self.fetch(broker)
        start = Job.objects.get().reserved_until

        def reserved_until_after(**time):
            broker.track_set([TrackUpdate(jid=job.jid, wid=me, reserve_until=datetime.now(UTC) + timedelta(**time))])
            return Job.objects.get().reserved_until

        assert reserved_until_after(hours=-1) == reserved_until_after(seconds=10) == start
        longer = reserved_until_after(hours=2)
        assert timedelta(hours=1, minutes=59) < longer - datetime.now(UTC) <= timedelta(hours=2)
        assert reserved_until_after(hours=1) == longer
        assert timedelta(hours=23, minutes=59) < reserved_until_after(days=9) - datetime.now(UTC) <= timedelta(hours=24)

    @staticmethod
    def state(broker, job):
        [one] = broker.track_get([job.jid])
        assert one.jid == job.jid
        assert abs(one.updated_at - datetime.now(UTC)) < timedelta(seconds=30)
        return one.state, one.percent, one.desc

    @pytest.mark.parametrize(
        "value", [2**63, -(2**70), 1.0, 1e22, "\u0000", "é😀", {"b": 1, "a": [None, True]}, [[[]]], ""]
    )
    def test_arguments_are_returned_verbatim(self, broker, me, value):
        """W11: numbers, strings and objects keep their text."""
        job = payload(args=[value])
        broker.push([job])
        [got] = self.fetch(broker)
        assert got.text.startswith(job.text[:-1])

    def test_a_large_push_stores_all_jobs(self, broker, me):
        jobs = [payload() for _ in range(1234)]
        assert broker.push(jobs) == [None] * 1234
        assert Job.objects.count() == 1234
