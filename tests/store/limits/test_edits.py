"""A limit that is set, edited, paused or removed applies at once, also to jobs that already run or wait."""

import pytest

from django_faktory.core.limits import Allowance
from django_faktory.models import Job, Limit, Limiter
from django_faktory.store.limits import definitions as limit_definitions
from django_faktory.store.limits.definitions import LimitDefinition
from django_faktory.tasks import limits as task_limits
from tests.store.limits import tasks
from tests.store.limits.conftest import counts_are_true, in_use, limit, states


def sync(*definitions):
    limit_definitions.sync(
        [LimitDefinition(scope, name, Allowance.of(value)) for scope, name, value in definitions], using="default"
    )


def test_a_new_limit_counts_jobs_that_already_run(node):
    node.push("a", "b", "c", "d")
    assert node.fetch(2) == ["a", "b"]
    limit("task", "noop", 3)
    assert in_use("noop") == 2
    assert node.fetch(5) == ["c"]
    node.ack("a", "b", "c")
    assert in_use("noop") == 0
    assert node.fetch(5) == ["d"]


@pytest.mark.parametrize("scope", ["task", "queue"])
def test_a_lowered_limit_applies_at_once_without_stopping_running_jobs(node, scope):
    name = "noop" if scope == "task" else "default"
    limit(scope, name, 4)
    node.push(*"abcdef")
    assert len(node.fetch(4)) == 4
    limit(scope, name, 2)
    node.ack("a", "b")
    assert node.fetch(5) == []
    node.ack("c")
    assert node.fetch(5) == ["e"]


def test_a_raised_limit_unblocks_waiting_jobs(node):
    limit("task", "noop", 1)
    node.push(*"abcdef")
    assert node.fetch(5) == ["a"]
    limit("task", "noop", 3)
    assert node.fetch(5) == ["b", "c"]


def test_removing_a_limit_unblocks_all_waiting_jobs(node):
    one = limit("task", "noop", 1)
    node.push(*"abc")
    node.fetch(5)
    limit_definitions.remove(one, using="default")
    assert node.fetch(5) == ["b", "c"]
    assert node.ack("a", "b", "c") == [True] * 3
    assert not Limiter.objects.exists()


def test_a_limit_on_a_key_prefix_applies_to_all_keys_in_use(node):
    limit("key", "customer", 1)
    node.push("a", "b", "c", custom={"limit": "customer:1"})
    node.push("x", "y", custom={"limit": "customer:2"})
    assert node.fetch(9) == ["a", "x"]
    limit("key", "customer", 2)
    assert node.fetch(9) == ["b", "y"]


def test_a_key_uses_its_prefix_limit_after_its_own_is_removed(node):
    limit("key", "customer", 2)
    own = limit("key", "customer:1", 1)
    node.push(*"abcd", custom={"limit": "customer:1"})
    assert node.fetch(9) == ["a"]
    limit_definitions.remove(own, using="default")
    assert in_use("customer:1") == 1
    assert node.fetch(9) == ["b"]
    assert node.fetch(9) == []
    counts_are_true()


def test_a_paused_task_starts_no_jobs_while_other_tasks_continue(node):
    node.push("a", "b")
    node.push("x", jobtype="other")
    assert node.fetch() == ["a"]
    assert limit_definitions.pause(["noop"], using="default") == ["noop"]
    assert limit_definitions.pause(["noop"], using="default") == []
    assert limit_definitions.paused_tasks(using="default") == ["noop"]
    assert node.fetch(5) == ["x"]
    assert node.ack("a") == [True], "a running job continues"
    assert node.fetch(5) == []
    assert limit_definitions.resume(["noop"], using="default") == ["noop"]
    assert limit_definitions.resume(["noop"], using="default") == []
    assert node.fetch(5) == ["b"]
    assert not Limit.objects.exists(), "there is nothing left to limit"


def test_pausing_and_resuming_a_task_keeps_its_limit(node):
    limit("task", "noop", 1)
    limit_definitions.pause(["noop"], using="default")
    node.push("a", "b")
    assert node.fetch(5) == []
    limit_definitions.resume(["noop"], using="default")
    assert node.fetch(5) == ["a"]


def test_sync_creates_updates_and_deletes_limits_defined_in_code(transactional_db):
    sync(("task", "noop", 5), ("queue", "mail", "10/s"))
    assert {limit.name: limit.allowance_text for limit in Limit.objects.all()} == {
        "noop": "5 at a time",
        "mail": "10/s",
    }
    sync(("task", "noop", 6))
    assert [(limit.name, limit.concurrency) for limit in Limit.objects.all()] == [("noop", 6)]
    sync()
    assert not Limit.objects.exists()


def test_an_edited_limit_overrides_code_until_the_edit_is_reverted(transactional_db):
    sync(("task", "noop", 5))
    edited = limit("task", "noop", 2)
    assert edited.origin == "edited"
    sync(("task", "noop", 7))
    assert Limit.objects.get().concurrency == 2
    limit_definitions.revert_edit(edited, using="default")
    sync(("task", "noop", 7))
    assert (Limit.objects.get().concurrency, Limit.objects.get().origin) == (7, "code")


def test_reverting_an_edit_restores_the_limit_defined_in_code(transactional_db):
    task_limits.sync(using="default")
    edited = limit("task", tasks.at_most_two.jobtype, 9)
    assert task_limits.revert_to_code(edited, using="default") is True
    edited.refresh_from_db()
    assert (edited.allowance_text, edited.origin) == ("2 at a time", "code")
    assert task_limits.revert_to_code(edited, using="default") is False


def test_manual_limits_and_pauses_survive_removal_from_code(transactional_db):
    sync(("task", "edited", 5), ("task", "paused", 5))
    limit("task", "edited", 2)
    limit("task", "theirs", 2)
    limit_definitions.pause(["paused"], using="default")
    sync()
    assert {one.name: (one.origin, one.allowance_text) for one in Limit.objects.all()} == {
        "edited": ("admin", "2 at a time"),
        "theirs": ("admin", "2 at a time"),
        "paused": ("admin", "paused"),
    }


def test_a_paused_task_stays_paused_when_code_adds_a_limit(node):
    limit_definitions.pause(["noop"], using="default")
    sync(("task", "noop", 5))
    sync(("task", "noop", 5))
    assert (Limit.objects.get().allowance_text, Limit.objects.get().origin) == ("paused, else 5 at a time", "code")


def test_a_rate_limit_can_become_a_concurrency_limit_while_jobs_run(node):
    limit("task", "noop", {"rate": "1/s", "burst": 5})
    node.push(*"abcdef")
    assert len(node.fetch(3)) == 3
    limit("task", "noop", 3)
    assert in_use("noop") == 3
    assert node.fetch(3) == []
    assert states("f") == ["blocked"]
    node.ack("a")
    assert len(node.fetch(3)) == 1
    counts_are_true()


def test_usage_and_waiting_jobs_of_a_limit_are_reported(node):
    one = limit("task", "noop", 1)
    node.push(*"abc")
    node.fetch(2)
    assert limit_definitions.read_usage([one.pk], using="default") == {one.pk: (1, None)}
    assert limit_definitions.count_blocked_jobs(one, using="default") == 2
    assert Job.objects.filter(limiter__isnull=False).count() == 2
