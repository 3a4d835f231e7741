"""The order in which a worker fetches from its queues."""

from collections import Counter
from random import Random

import pytest

from django_faktory.errors import InvalidPayload
from django_faktory.worker.queue_order import QueueOrder

pytestmark = pytest.mark.core


def test_plain_names_keep_their_order():
    order = QueueOrder(["critical", "default", "low"])
    assert {order.draw(Random(seed)) for seed in range(20)} == {("critical", "default", "low")}


def test_weights_make_it_a_draw_with_every_queue_in_it():
    order = QueueOrder(["critical:3", "default:1"])
    firsts = Counter(order.draw(Random(seed))[0] for seed in range(4000))
    assert 0.70 < firsts["critical"] / 4000 < 0.80
    assert sorted(order.draw(Random(1))) == ["critical", "default"]


def test_a_name_without_weight_beside_weights_weighs_one():
    firsts = Counter(QueueOrder(["a:9", "b"]).draw(Random(seed))[0] for seed in range(4000))
    assert 0.86 < firsts["a"] / 4000 < 0.94


def test_spaces_around_and_names_twice_do_no_harm():
    assert QueueOrder([" a ", "b", "a"]).draw(Random()) == ("a", "b")


@pytest.mark.parametrize("specs", [[""], ["a:0"], ["a:-1"], ["a:x"], ["a:"], [":3"], ["a b"], ["a:1:2"], []])
def test_anything_else_is_refused_in_one_line_that_says_what_was_expected(specs):
    with pytest.raises(InvalidPayload, match=r"expected|must match") as caught:
        QueueOrder(specs)
    assert "\n" not in str(caught.value)
