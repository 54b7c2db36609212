"""The order of prompts: every one once an epoch, the same after a stop, and shares as weighted."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.sources.order import PromptOrder

ONE = PromptOrder(sizes=(10,), seed=1, shuffle=True)


def test_an_epoch_takes_every_prompt_once_and_no_step_depends_on_another():
    taken = ONE.take(0, 30)
    epochs = [[number - 10 * epoch for number in taken[10 * epoch : 10 * epoch + 10]] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert ONE.take(9, 3) == taken[9:12]


def test_the_order_of_a_seed_is_the_same_on_every_machine():
    assert ONE.take(0, 10) == [2, 5, 1, 6, 7, 8, 3, 0, 4, 9]
    assert ONE.take(0, 10) != replace(ONE, seed=2).take(0, 10)
    unshuffled = PromptOrder((50,), 1, False)
    assert unshuffled.take(30, 30) == [*range(30, 50), *range(50, 60)]


def test_a_prompt_taken_again_within_a_step_has_another_number_and_so_other_seeds():
    step = ONE.take(5, 15)
    assert len({number % 10 for number in step}) == 10
    assert len(set(step)) == 15


orders = st.builds(
    PromptOrder,
    st.lists(st.integers(1, 40), min_size=3, max_size=3).map(tuple),
    st.integers(0, 5),
    st.booleans(),
    st.lists(st.floats(0.01, 9), min_size=3, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=60)
@given(order=orders, steps=st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_resuming_is_not_stopping_whatever_a_step_takes(order, steps):
    whole = order.take(0, sum(steps))
    cursor, pieces = 0, []
    for count in steps:
        pieces += replace(order).take(cursor, count)
        cursor += count
    assert pieces == whole
    assert len(set(whole)) == len(whole)


@settings(deadline=None, max_examples=40)
@given(order=orders)
def test_each_source_has_its_share_and_every_prompt_its_turn(order):
    count = 2000
    taken = order.take(0, count)
    total = sum(order.sizes)
    bounds = [0, order.sizes[0], order.sizes[0] + order.sizes[1], total]
    for source in range(3):
        numbers = [n for n in taken if bounds[source] <= n % total < bounds[source + 1]]
        block = max(64, sum(order.weights) / min(order.weights))
        assert abs(len(numbers) - count * order.weights[source] / sum(order.weights)) <= block + 2
        # Every prompt of a source comes before any of them comes again.
        turns = Counter(n % total for n in numbers)
        if len(numbers) >= order.sizes[source]:
            assert max(turns.values()) - min(turns.values()) <= 1 and len(turns) == order.sizes[source]


def test_shares_are_exact_over_a_block():
    order = PromptOrder((100, 100), 1, True, (3.0, 1.0))
    assert sum(number % 200 < 100 for number in order.take(0, 64)) == 48
    order = PromptOrder((1000, 1000), 1, False, (1.0, 1.0))
    assert [number // 1000 for number in order.take(0, 6)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mix_of_one_is_that_source(shuffle):
    assert PromptOrder((7,), 3, shuffle, (0.2,)).take(4, 20) == PromptOrder((7,), 3, shuffle).take(4, 20)
