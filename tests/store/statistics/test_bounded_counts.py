"""Capped counts of several sets in one statement."""

import pytest

from django_faktory.models import Job
from django_faktory.store.statistics import bounded_counts
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


def test_counts_stop_at_the_cap_in_one_statement(django_assert_num_queries):
    JobFactory.create_batch(3, queue="a")
    JobFactory(queue="b")
    sets = [Job.objects.filter(queue=name) for name in "abc"] + [Job.objects.none()]
    with django_assert_num_queries(1):
        assert bounded_counts.counts(sets, max_count=2, using="default") == [2, 1, 0, 0]


def test_more_sets_than_fit_in_a_statement_are_counted_by_several(django_assert_num_queries):
    count = bounded_counts.AT_ONCE + 1
    with django_assert_num_queries(2):
        assert bounded_counts.counts([Job.objects.all()] * count, max_count=5, using="default") == [0] * count
