"""The order in which a worker fetches from its queues."""

from collections import Counter
from random import Random

import pytest

from django_faktory.errors import InvalidPayload
from django_faktory.worker.queue_order import QueueOrder

pytestmark = pytest.mark.core


def test_queues_without_weights_keep_their_order():
    order = QueueOrder(["critical", "default", "low"])
    assert {order.draw(Random(seed)) for seed in range(20)} == {("critical", "default", "low")}


def test_weighted_queues_are_drawn_at_random_and_each_is_included():
    order = QueueOrder(["critical:3", "default:1"])
    firsts = Counter(order.draw(Random(seed))[0] for seed in range(4000))
    assert 0.70 < firsts["critical"] / 4000 < 0.80
    assert sorted(order.draw(Random(1))) == ["critical", "default"]


def test_a_queue_without_a_weight_among_weighted_ones_has_weight_one():
    firsts = Counter(QueueOrder(["a:9", "b"]).draw(Random(seed))[0] for seed in range(4000))
    assert 0.86 < firsts["a"] / 4000 < 0.94


def test_surrounding_spaces_and_duplicate_queue_names_are_ignored():
    assert QueueOrder([" a ", "b", "a"]).draw(Random()) == ("a", "b")


@pytest.mark.parametrize(
    "specs", [[""], ["a:0"], ["a:-1"], ["a:x"], ["a:"], [":3"], ["a b"], ["a:1:2"], ["a:" + "9" * 5000], []]
)
def test_an_invalid_queue_spec_is_rejected_with_a_one_line_message(specs):
    with pytest.raises(InvalidPayload, match=r"expected|must match") as caught:
        QueueOrder(specs)
    assert "\n" not in str(caught.value)
