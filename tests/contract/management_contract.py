"""The contract of brokers for management verbs, a mixin for the contract's test classes. Rules: W22 to W25."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_faktory.core.mutation import Mutation
from django_faktory.core.payloads import FetchRequest
from django_faktory.models import Job, Queue, WorkerProcess
from tests.factories import JobFactory, QueueFactory, WorkerFactory, payload


def states():
    """Return the state of each stored job by jid."""
    return dict(Job.objects.values_list("jid", "state"))


@pytest.mark.django_db(transaction=True)
class ManagementContract:
    """Mixin: the subclass provides the `broker` fixture, as for BrokerContract."""

    @staticmethod
    def mutate(broker, command, target="dead", **filters):
        broker.mutate(Mutation(command=command, target=target, **filters))

    @pytest.fixture(autouse=True)
    def _flush_is_allowed(self, settings):
        settings.FAKTORY = {"ALLOW_FLUSH": True}

    @pytest.mark.parametrize("target", ["scheduled", "retries", "dead"])
    @pytest.mark.parametrize(
        ("command", "becomes"), [("clear", None), ("discard", None), ("kill", "dead"), ("requeue", "enqueued")]
    )
    def test_a_mutation_without_a_filter_changes_the_whole_set_and_no_other(self, broker, target, command, becomes):
        """W23: a command changes one set."""
        others = [JobFactory(**trait) for trait in ({}, {"working": True}, {"succeeded": True}, {"discarded": True})]
        others += [JobFactory(**{other: True}) for other in {"scheduled", "retries", "dead"} - {target}]
        meant = [JobFactory(**{target: True}) for _ in range(2)]
        self.mutate(broker, command, target)
        found = states()
        assert {job.jid: found.get(job.jid) for job in meant} == {job.jid: becomes for job in meant}
        assert {job.jid: found.get(job.jid) for job in others} == {job.jid: job.state for job in others}

    def test_a_requeued_job_is_fetched_with_its_failure(self, broker):
        """W23: the job keeps its failure."""
        before = timezone.now() - timedelta(minutes=1)
        job = JobFactory(dead=True, failure='{"retry_count":26}', errtype="KeyError")
        self.mutate(broker, "requeue", "dead")
        row = Job.objects.get()
        assert (row.run_at, row.finished_at, row.purge_at) == (None, None, None)
        assert row.enqueued_at > before
        [[got]] = broker.fetch([FetchRequest(queues=("default",))])
        assert got.jid == job.jid
        assert '"retry_count":26' in (got.failure or got.text)

    def test_a_killed_job_is_kept_for_180_days_and_counts_as_no_failure(self, broker):
        """W23: killing changes no totals."""
        JobFactory(retries=True)
        JobFactory(dead=True)
        self.mutate(broker, "kill", "retries")
        self.mutate(broker, "kill", "dead")
        for job in Job.objects.all():
            assert (job.state, job.run_at) == ("dead", None)
            assert abs(job.purge_at - timezone.now() - timedelta(days=180)) < timedelta(minutes=1)
        info = broker.info()
        assert (info["total_processed"], info["total_failures"]) == (0, 0)

    @pytest.mark.parametrize("command", ["clear", "discard"])
    def test_a_dropped_job_with_a_result_ttl_is_kept_as_discarded(self, broker, command):
        """W23: a job with a `result_ttl` is kept."""
        job = JobFactory(scheduled=True, result_ttl=60)
        JobFactory(scheduled=True)
        self.mutate(broker, command, "scheduled")
        assert states() == {job.jid: "discarded"}

    def test_a_jids_filter_selects_the_listed_jobs_and_an_empty_list_none(self, broker):
        """W23: jids outside the target are ignored."""
        one, two, elsewhere = JobFactory(dead=True), JobFactory(dead=True), JobFactory(retries=True)
        self.mutate(broker, "discard", jids=())
        assert len(states()) == 3
        self.mutate(broker, "discard", jids=(one.jid, elsewhere.jid, "unknown-job", "not\x00storable"))
        assert states() == {two.jid: "dead", elsewhere.jid: "retries"}

    def test_a_jids_filter_overrides_all_other_filters(self, broker):
        """Reference, §5: jids take precedence over other filters."""
        job = JobFactory(dead=True)
        JobFactory(dead=True)
        self.mutate(broker, "requeue", jids=(job.jid,), jobtype="another", regexp="nothing like it")
        assert states()[job.jid] == "enqueued"
        assert sorted(states().values()) == ["dead", "enqueued"]

    def test_a_jobtype_filter_is_exact_and_case_sensitive(self, broker):
        """W23: the comparison is exact, trailing spaces included."""
        for jobtype in ("report", "Report", "report2", "report "):
            JobFactory(dead=True, jobtype=jobtype)
        self.mutate(broker, "discard", jobtype="report")
        assert sorted(Job.objects.values_list("jobtype", flat=True)) == ["Report", "report ", "report2"]
        self.mutate(broker, "discard", jobtype="not\x00storable")
        assert len(states()) == 3

    @pytest.mark.parametrize(
        ("regexp", "is_match"),
        [
            ('*"args":[[]1,"50%_\\\\\\\\"*', True),
            ('*"args":[[]1,*', True),
            ('*"args": *', False),
            ('{"jid":"glob-job","jobtype":"report*', True),
            ("*report*", True),
            ("*REPORT*", False),
            ("report", False),
            ("*r?port*", True),
            ("*[p-r]eport*", True),
            ("*", True),
            ('*"retry_count":3*', True),
            ('*"errtype":"KeyError"*', True),
            ('*"created_at":"2026-05-01T12:00:00Z"*', True),
            ('*"enqueued_at"*', False),
            ("*2026-05*", True),
            ("*two  words*", True),
            ("*two words*", False),
            ("*not\x00storable*", False),
        ],
    )
    def test_a_regexp_filter_is_a_glob_on_the_compact_job_json(self, broker, regexp, is_match):
        """W23: the glob matches the stored text without white space, plus the members that the server adds."""
        text = (
            '{ "jid": "glob-job" , "jobtype": "report", "args": [1, "50%_\\\\", {"a": "two  words"}],\n'
            ' "queue": "default", "retry": 25 }'
        )
        JobFactory(
            retries=True,
            jid="glob-job",
            jobtype="report",
            payload=text,
            enqueued_at=None,
            failure='{"retry_count":3,"message":"no","errtype":"KeyError"}',
        )
        JobFactory(retries=True, payload='{"jid":"x"}', created_at=timezone.now() + timedelta(days=400))
        self.mutate(broker, "kill", "retries", regexp=regexp, jobtype="report")
        assert states()["glob-job"] == ("dead" if is_match else "retries")
        assert sorted(states().values()).count("retries") == (1 if is_match else 2)

    def test_jobtype_and_regexp_filters_must_both_match(self, broker):
        """W23: filters are combined with AND."""
        meant = JobFactory(dead=True, jobtype="a", payload='{"args":["x"]}')
        JobFactory(dead=True, jobtype="b", payload='{"args":["x"]}')
        JobFactory(dead=True, jobtype="a", payload='{"args":["y"]}')
        self.mutate(broker, "requeue", jobtype="a", regexp='*"x"*')
        assert [jid for jid, state in states().items() if state == "enqueued"] == [meant.jid]

    def test_a_paused_queue_gives_no_job_until_it_is_resumed(self, broker):
        """W24: the job stays enqueued meanwhile."""
        broker.push([payload(queue="q")])
        broker.pause(["q"])
        assert broker.fetch([FetchRequest(queues=("q",))]) == [[]]
        broker.resume(["q"])
        [[got]] = broker.fetch([FetchRequest(queues=("q",))])
        assert got.queue == "q"

    def test_pausing_an_unknown_name_creates_the_queue(self, broker):
        """W24: INFO lists the queue with size 0."""
        broker.pause(["new"])
        assert broker.info()["queues"] == {"new": 0}
        assert Queue.objects.get().paused_at is not None

    def test_a_second_pause_keeps_the_time_of_the_first(self, broker):
        broker.pause(["q"])
        since = Queue.objects.get().paused_at
        broker.pause(["q"])
        assert Queue.objects.get().paused_at == since

    def test_pause_and_resume_of_all_affect_every_known_queue(self, broker):
        """W24: including queues known only from their jobs."""
        QueueFactory(name="a")
        JobFactory(queue="b")
        JobFactory(queue="c", scheduled=True)
        broker.pause(None)
        assert {queue.name: queue.paused_at is not None for queue in Queue.objects.all()} == {"a": True, "b": True}
        broker.resume(None)
        assert not Queue.objects.filter(paused_at__isnull=False).exists()

    def test_resuming_unpaused_or_unknown_queues_changes_nothing(self, broker):
        QueueFactory(name="a")
        broker.resume(["a", "b"])
        assert [(queue.name, queue.paused_at) for queue in Queue.objects.all()] == [("a", None)]

    def test_remove_deletes_enqueued_jobs_the_queue_and_its_pause(self, broker):
        """W24: jobs in other states stay."""
        broker.pause(["q"])
        gone, kept = JobFactory(queue="q"), JobFactory(queue="q", result_ttl=60)
        others = [JobFactory(queue="q", working=True), JobFactory(queue="q", retries=True), JobFactory(queue="other")]
        broker.remove(["q", "unknown"])
        assert states() == {kept.jid: "discarded"} | {job.jid: job.state for job in others}
        assert gone.jid not in states()
        assert not Queue.objects.filter(name="q").exists()

    def test_a_removed_queue_that_is_used_again_is_listed_again(self, broker):
        broker.push([payload(queue="q")])
        broker.remove(["q"])
        assert "q" not in broker.info()["queues"]
        broker.push([payload(queue="q")])
        assert Queue.objects.filter(name="q").exists()

    def test_remove_of_all_leaves_no_queue(self, broker):
        """W24: INFO lists no queue afterwards."""
        JobFactory(queue="a")
        QueueFactory(name="b")
        broker.remove(None)
        assert broker.info()["queues"] == {}

    def test_latency_is_the_age_of_the_oldest_enqueued_job_of_any_priority(self, broker):
        """W24: other states and future times do not count."""
        now = timezone.now()
        for sort_priority, age in ((-100, 10), (0, 30), (0, 20), (100, 5)):
            JobFactory(queue="q", sort_priority=sort_priority, enqueued_at=now - timedelta(seconds=age))
        JobFactory(queue="q", retries=True, enqueued_at=now - timedelta(seconds=900))
        JobFactory(queue="ahead", enqueued_at=now + timedelta(minutes=5))
        latencies = broker.latency(["q", "unknown", "ahead"])
        assert latencies == {"q": pytest.approx(30, abs=10), "unknown": 0, "ahead": 0}
        assert all(isinstance(seconds, float) for seconds in latencies.values())

    def test_empty_queue_lists_change_nothing(self, broker):
        QueueFactory(name="a")
        broker.pause([])
        broker.resume([])
        broker.remove([])
        assert broker.latency([]) == {}
        assert [(queue.name, queue.paused_at) for queue in Queue.objects.all()] == [("a", None)]

    def test_flush_deletes_jobs_queues_and_totals_but_keeps_workers(self, broker):
        """W25: workers and their rows stay."""
        for trait in ("scheduled", "working", "retries", "dead", "succeeded", "discarded", "expired"):
            JobFactory(**{trait: True})
        JobFactory()
        broker.pause(["q"])
        WorkerFactory(wid="wid-stays")
        [[got]] = broker.fetch([FetchRequest(queues=("default",), wid="wid-stays")])
        assert got
        broker.flush()
        assert not Job.objects.exists()
        info = broker.info()
        assert (info["queues"], info["total_processed"], info["total_failures"]) == ({}, 0, 0)
        assert WorkerProcess.objects.filter(wid="wid-stays").exists()

    def test_info_counts_live_workers_of_the_whole_cluster(self, broker):
        """W22: a worker counts if it was seen lately or holds a job, on any node."""
        long_ago = timezone.now() - timedelta(hours=2)
        WorkerFactory(wid="wid-fresh")
        WorkerFactory(wid="wid-busy", seen_at=long_ago)
        WorkerFactory(wid="wid-gone", seen_at=long_ago)
        JobFactory(working=True, wid="wid-busy")
        JobFactory(dead=True, wid="wid-gone")
        assert broker.info()["workers"] == 2
