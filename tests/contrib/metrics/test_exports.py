"""Metrics as monitoring systems read them: Prometheus, statsd, probes, spans."""

import json
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from django.test import RequestFactory, override_settings
from django.utils import timezone
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from django_faktory.contrib.metrics import views
from django_faktory.core.histograms import OTHER, JobTiming, Recorder, Series
from django_faktory.errors import BrokerUnavailable
from django_faktory.models import Batch, Job, Queue, WorkerProcess
from django_faktory.operations import alarms
from django_faktory.operations.statistics import MAX_EXPORTED, read
from django_faktory.runtime import statsd
from django_faktory.store.statistics import histograms
from tests.factories import JobFactory

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]
USING = "default"
DOCS = Path(__file__).resolve().parents[3] / "docs"


def get(view, **headers):
    return view(RequestFactory().get("/", headers=headers))


def scraped():
    """Return {(name, labels): value} of every sample."""
    text = get(views.metrics).content.decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def passed(*jobs, succeeded=True):
    recorder = Recorder()
    recorder.started(jobs)
    recorder.ended(jobs, succeeded=succeeded)
    histograms.add(recorder.take(), using=USING)


class TestPrometheus:
    def test_exports_sizes_latencies_and_pause_states_of_queues(self):
        JobFactory.create_batch(2, queue="mail", enqueued_at=timezone.now() - timedelta(seconds=90))
        Queue.objects.create(name="quiet", paused_at=timezone.now())
        samples = scraped()
        assert samples["django_faktory_queue_size", "mail"] == 2
        assert 89 < samples["django_faktory_queue_latency_seconds", "mail"] < 150
        assert (samples["django_faktory_queue_paused", "mail"], samples["django_faktory_queue_paused", "quiet"]) == (
            0,
            1,
        )

    def test_exports_jobs_workers_and_batches_by_state(self):
        JobFactory(dead=True)
        JobFactory(working=True)
        WorkerProcess.objects.create(wid="w1", hostname="h", pid=1)
        Batch.objects.create(bid="b-1", committed_at=timezone.now())
        samples = scraped()
        assert (samples["django_faktory_jobs", "dead"], samples["django_faktory_jobs", "working"]) == (1, 1)
        assert (samples["django_faktory_workers", "running"], samples["django_faktory_workers", "quiet"]) == (1, 0)
        assert (samples["django_faktory_batches", "committed"], samples["django_faktory_batches", "open"]) == (1, 0)

    def test_exports_counts_and_run_times_by_queue_and_task(self):
        passed(JobTiming("mail", "send", 0.05), JobTiming("mail", "send", 3.0))
        passed(JobTiming("mail", "send", 9000.0), succeeded=False)
        samples = scraped()
        assert samples["django_faktory_started_total", "mail", "send"] == 3
        assert samples["django_faktory_ended_total", "mail", "send", "succeeded"] == 2
        assert samples["django_faktory_ended_total", "failed", "mail", "send"] == 1
        ends = ("0.025", "0.1", "5", "7200", "+Inf")
        buckets = {end: samples["django_faktory_run_seconds_bucket", *sorted([end, "mail", "send"])] for end in ends}
        assert buckets == {"0.025": 0, "0.1": 1, "5": 2, "7200": 2, "+Inf": 3}
        assert samples["django_faktory_run_seconds_sum", "mail", "send"] == pytest.approx(9003.05)
        assert samples["django_faktory_run_seconds_count", "mail", "send"] == 3

    def test_hostile_queue_names_are_escaped(self):
        hostile = 'x"} 1\ndjango_faktory_up 1 \\ {'
        passed(JobTiming(hostile, "send", 0.1))
        assert scraped()["django_faktory_started_total", *sorted([hostile, "send"])] == 1

    def test_the_number_of_queries_does_not_grow_with_tasks(self, django_assert_max_num_queries):
        passed(*(JobTiming("mail", f"task{number}", 0.1) for number in range(50)))
        with django_assert_max_num_queries(18):  # 2 for the numbers, the others for the alarms
            get(views.metrics)

    def test_exports_the_largest_and_slowest_queues_and_sums_the_others(self):
        now = timezone.now()
        for number in range(9):
            JobFactory.create_batch(number + 1, queue=f"q{number}", enqueued_at=now - timedelta(seconds=10 * number))
        JobFactory(queue="slow", enqueued_at=now - timedelta(hours=1))
        Queue.objects.create(name="empty", paused_at=now)
        found = read(using=USING, limit=4)
        assert found.queues == {"q8": 9, "q7": 8, "q6": 7, "slow": 1, OTHER: 21}
        assert {name: round(age, -1) for name, age in found.latencies.items()} == {
            "q8": 80, "q7": 70, "q6": 60, "slow": 3600, OTHER: 50,
        }  # fmt: skip
        assert found.paused == {"q8": 0, "q7": 0, "q6": 0, "slow": 0, OTHER: 1}

    def test_exports_the_number_of_alarms_of_each_kind(self):
        JobFactory(queue="mail", enqueued_at=timezone.now() - timedelta(minutes=5))
        found = scraped()
        assert found["django_faktory_alarms", "no-workers"] == 1
        assert found["django_faktory_alarms", "failing-task"] == 0

    def test_exports_the_most_used_tasks_and_sums_the_others(self):
        for number in range(5):
            passed(*[JobTiming("mail", f"task{number}", 1.0)] * (number + 1))
        found = read(using=USING, limit=2).series
        assert {names: (one.started, one.ran_s, sum(one.runs)) for names, one in found.items()} == {
            ("mail", "task4"): (5, 5.0, 5),
            ("mail", "task3"): (4, 4.0, 4),
            (OTHER, OTHER): (6, 6.0, 6),
        }

    @pytest.mark.slow
    def test_exports_a_bounded_number_of_lines_for_20_000_queues(self):
        Queue.objects.bulk_create([Queue(name=f"q{number}") for number in range(20_000)], batch_size=1000)
        assert get(views.metrics).content.count(b"django_faktory_queue_size{") == MAX_EXPORTED + 1


class TestDeepProbe:
    def test_healthz_fails_for_a_critical_alarm_only_if_asked_for_it(self):
        JobFactory(queue="mail", enqueued_at=timezone.now() - timedelta(minutes=5))
        assert views.healthz(RequestFactory().get("/")).status_code == 200
        answer = views.healthz(RequestFactory().get("/?deep"))
        assert answer.status_code == 503
        assert json.loads(answer.content)["checks"]["no-workers"] == "No running worker; jobs waiting: 1"

    def test_healthz_succeeds_with_a_warning(self):
        WorkerProcess.objects.create(wid="w", seen_at=timezone.now(), beat_at=timezone.now())
        Queue.objects.create(name="mail", paused_at=timezone.now())
        JobFactory(queue="mail", enqueued_at=timezone.now())
        assert views.healthz(RequestFactory().get("/?deep")).status_code == 200


class TestAccess:
    @pytest.mark.parametrize("view", [views.metrics, views.healthz, views.readyz])
    def test_views_require_the_token_if_one_is_configured(self, view):
        with override_settings(FAKTORY={"METRICS_TOKEN": "s3cret"}):
            assert get(view).status_code == 401
            assert get(view, authorization="Bearer wrong").status_code == 401
            assert get(view, authorization="Bearer sécret").status_code == 401
            assert get(view, authorization="Bearer s3cret").status_code in (200, 503)

    @pytest.mark.parametrize("view", [views.metrics, views.healthz, views.readyz])
    @pytest.mark.parametrize("method", ["post", "put", "delete"])
    def test_views_reject_methods_that_write(self, view, method):
        assert getattr(RequestFactory(), method)("/") is not None
        assert view(getattr(RequestFactory(), method)("/")).status_code == 405

    @pytest.mark.parametrize("view", [views.metrics, views.healthz, views.readyz])
    def test_views_run_outside_atomic_requests_on_every_database(self, view, settings):
        assert view._non_atomic_requests == set(settings.DATABASES)

    def test_responses_have_a_no_store_header(self):
        assert "no-store" in get(views.healthz)["Cache-Control"]


class TestProbes:
    def probe(self, view):
        response = get(view)
        return response.status_code, json.loads(response.content)["checks"]

    def test_the_liveness_probe_checks_the_database(self):
        assert self.probe(views.healthz) == (200, {"database": "ok"})

    def test_an_outage_is_named_once(self, monkeypatch):
        def fail(**_):
            raise BrokerUnavailable("database unavailable: no such table: x")

        monkeypatch.setattr(alarms, "read", fail)
        answer = views.healthz(RequestFactory().get("/?deep"))
        assert json.loads(answer.content)["checks"]["alarms"] == "database unavailable: no such table: x"

    def test_the_readiness_probe_requires_a_running_worker(self):
        code, checks = self.probe(views.readyz)
        assert code == 503
        assert checks["workers"] == "no live worker process takes jobs: start manage.py runfaktory"
        WorkerProcess.objects.create(wid="w1", hostname="h", pid=1, state="quiet")
        assert self.probe(views.readyz)[0] == 503
        WorkerProcess.objects.create(wid="w2", hostname="h", pid=2)
        assert self.probe(views.readyz) == (
            200,
            dict.fromkeys(("database", "migrations", "workers", "maintenance"), "ok"),
        )

    def test_the_readiness_probe_fails_if_due_jobs_are_not_enqueued(self):
        WorkerProcess.objects.create(wid="w1", hostname="h", pid=1)
        JobFactory(scheduled=True, run_at=timezone.now() - timedelta(minutes=2))
        code, checks = self.probe(views.readyz)
        assert code == 503
        assert re.match(r"no node has enqueued a job due 12\d s ago", checks["maintenance"])
        Job.objects.update(run_at=timezone.now() + timedelta(minutes=2))
        assert self.probe(views.readyz)[0] == 200


class TestStatsd:
    @pytest.fixture
    def client(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("127.0.0.1", 0))
            server.settimeout(60)
            self.server = server
            client = statsd.Statsd(f"127.0.0.1:{server.getsockname()[1]}")
            yield client
            client.close()

    def lines(self):
        return self.server.recv(65536).decode().split("\n")

    def test_metrics_use_the_names_of_faktory_with_tags(self, client):
        client.send(statsd.format_job_counts({("mail", "send"): Series(succeeded=3, failed=1, ran_s=0.5)}))
        tags = "|#queue:mail,jobtype:send"
        assert self.lines() == [
            f"faktory.jobs.count:4|c{tags}", f"faktory.jobs.perform:125.000|ms{tags}", f"faktory.jobs.failed:1|c{tags}",
        ]  # fmt: skip

    def test_sizes_of_queues_and_sets_are_sent(self, client):
        JobFactory.create_batch(2, queue="mail", enqueued_at=timezone.now())
        JobFactory(dead=True)
        client.send(statsd.format_sizes(read(using=USING)))
        lines = self.lines()
        assert {"faktory.dead:1|g", "faktory.queue.size:2|g|#queue:mail", "faktory.workers:0|g"} <= set(lines)

    def test_hostile_queue_names_cannot_add_lines(self, client):
        client.send(statsd.format_job_counts({("a\nfaktory.x:1|g", "b|#c:d"): Series(succeeded=1)}))
        assert self.lines()[0] == "faktory.jobs.count:1|c|#queue:a_faktory.x_1_g,jobtype:b__c_d"

    def test_many_lines_are_split_into_several_packets(self, client):
        client.send(f"faktory.line{number}:1|c" for number in range(200))
        found = []
        while len(found) < 200:
            packet = self.server.recv(65536)
            assert len(packet) <= statsd.MAX_PACKET_BYTES
            found += packet.decode().split("\n")
        assert found == [f"faktory.line{number}:1|c" for number in range(200)]

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "empty..label", "x" * 64])
    def test_an_unreachable_address_is_logged_once_and_raises_no_error(self, caplog, host):
        client = statsd.Statsd(f"{host}:8125")
        client.send(["a:1|c"])
        client.send(["a:1|c"])
        assert caplog.text.count("statsd cannot be reached") == 1


@pytest.fixture(scope="module")
def exporter():
    provider, found = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


class TestSpans:
    @pytest.fixture
    def spans(self, exporter, settings):
        settings.FAKTORY = {"MIDDLEWARE": ["django_faktory.contrib.metrics.opentelemetry.Spans"]}
        exporter.clear()
        return lambda: {span.name: span for span in exporter.get_finished_spans()}

    def test_the_request_the_enqueue_and_the_run_share_one_trace(self, spans):
        from django_faktory.testing import drain
        from tests.project.tasks import add

        with trace.get_tracer("web").start_as_current_span("POST /orders"):
            result = add.enqueue(1, 2)
        drain()
        found = spans()
        request, sent, ran = found["POST /orders"], found[f"send {add.name}"], found[f"process {add.name}"]
        assert sent.parent.span_id == request.context.span_id
        assert ran.parent.span_id == sent.context.span_id
        assert {request.context.trace_id} == {sent.context.trace_id, ran.context.trace_id}
        assert ran.attributes["messaging.message.id"] == result.id
        assert ran.attributes["messaging.message.delivery_attempt"] == 1

    def test_a_failed_run_marks_its_span_as_an_error(self, spans):
        from django_faktory.testing import drain
        from tests.project.tasks import fails

        fails.enqueue()
        drain()
        [span] = [span for name, span in spans().items() if name.startswith("process")]
        assert not span.status.is_ok
        assert span.events[0].name == "exception"


@pytest.mark.core
def test_the_docs_list_every_metric_and_the_dashboard_uses_only_these():
    from django_faktory.contrib.metrics.prometheus import exposition
    from django_faktory.operations.statistics import ExportedStatistics

    sums = {("q", "t"): Series()}
    numbers = ExportedStatistics(
        queues={}, latencies={}, paused={}, sets={}, workers={}, batches={}, processed=0, failed=0, late=0, series=sums
    )
    exported = set(re.findall(r"# TYPE (\S+)", exposition(numbers).decode()))
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(django_faktory_\w+)`", page, re.MULTILINE)) == exported
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    used = {re.sub("_bucket$", "", name) for name in re.findall(r"django_faktory_\w+", asked)}
    assert used <= exported
