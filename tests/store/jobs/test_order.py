"""The order of claims, compared with a short model, over any pushes, pauses, fetches and releases. Rule: W13."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_faktory.core.payloads import FetchRequest
from django_faktory.models import Job, Queue
from django_faktory.store import queues
from django_faktory.store.jobs import claims, releases
from django_faktory.store.jobs.pushes import push
from django_faktory.store.store import Store
from tests.examples import examples
from tests.factories import T0, payload

pytestmark = pytest.mark.django_db

USING = "default"
NAMES = "abcd"

orders = st.permutations(NAMES).flatmap(lambda names: st.integers(1, 4).map(lambda count: tuple(names[:count])))
pushes = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 9)), min_size=1, max_size=6)
requests = st.lists(st.tuples(orders, st.sampled_from(["w1", "w2", ""]), st.integers(1, 3)), min_size=1, max_size=4)
steps = st.one_of(
    st.tuples(st.just("push"), pushes),
    st.tuples(st.just("fetch"), requests),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("pause"), st.sampled_from(NAMES)),
    st.tuples(st.just("resume"), st.sampled_from(NAMES)),
)


class Model:
    """Jobs in push order; a request gets the best job of its first queue that has one."""

    def __init__(self):
        self.waiting, self.paused, self.age = [], set(), 0

    def push(self, job):
        self.age += 1
        self.waiting.append((-job.priority, self.age, job.queue, job.jid))

    def fetch(self, order, count):
        got = []
        for queue in order:
            ready = sorted(job for job in self.waiting if job[2] == queue and queue not in self.paused)
            got += ready[: count - len(got)]
        self.waiting = [job for job in self.waiting if job not in got]
        return got


class Real:
    """The store and the model: both take the same steps, and their results are compared."""

    def __init__(self):
        Job.objects.all().delete()
        Queue.objects.all().delete()
        self.model, self.now, self.held = Model(), T0, []

    def push(self, wanted):
        self.now += timedelta(seconds=1)
        made = [payload(queue=queue, priority=priority) for queue, priority in wanted]
        push(Store(USING, now=self.now), made)
        for job in made:
            self.model.push(job)

    def fetch(self, wanted):
        asked = [FetchRequest(queues=order, wid=wid, count=count) for order, wid, count in wanted]
        found = claims.fetch(Store(USING, now=self.now), asked)
        expected = [self.model.fetch(order, count) for order, _, count in wanted]
        assert [[job.queue for job in got] for got in found] == [[job[2] for job in got] for got in expected]
        if len({wid for _, wid, _ in wanted}) == 1:
            assert [[job.jid for job in got] for got in found] == [[job[3] for job in got] for got in expected]
        # Workers that ask in one call share the right jobs; which worker gets which job of a queue is undefined.
        places = {job[3]: job for got in expected for job in got}
        assert {job.jid for got in found for job in got} == places.keys()
        self.held += [(job, places[job.jid]) for got in found for job in got]

    def release(self, count):
        given_back, self.held = self.held[:count], self.held[count:]
        releases.release(Store(USING), [job for job, _ in given_back])
        self.model.waiting += [place for _, place in given_back]

    def pause(self, queue):
        queues.pause(Store(USING), [queue])
        self.model.paused.add(queue)

    def resume(self, queue):
        queues.resume(Store(USING), [queue])
        self.model.paused.discard(queue)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plan=st.lists(steps, max_size=12))
def test_claim_order_matches_a_reference_model(plan):
    """Strict order of queues, then priority, then age; a paused queue is skipped, a released job keeps its place."""
    real = Real()
    for step, value in plan:
        getattr(real, step)(value)
    real.model.paused.clear()
    queues.resume(Store(USING), None)
    real.fetch([(tuple(NAMES), "last", 100)])


def test_a_request_claims_from_its_first_nonempty_queue_before_later_queues():
    real = Real()
    real.push([("a", 1), ("b", 1)])
    real.fetch([(("c", "b", "a"), "w", 1), (("a",), "w", 1)])


def test_the_reference_model_detects_a_wrong_order():
    real = Real()
    real.push([("a", 5), ("a", 9)])
    real.model.waiting = [(-priority, age, *rest) for (priority, age, *rest) in real.model.waiting]
    with pytest.raises(AssertionError):
        real.fetch([(("a",), "", 1)])
