import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.schedule import learning_rate


def rate(step, **changes):
    return learning_rate(step, **dict(peak=1.0, floor=0.1, schedule="constant", warmup_steps=0, steps=10) | changes)


def test_warm_up_rises_linearly_and_ends_on_the_peak():
    rates = [rate(s, warmup_steps=4) for s in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_goes_in_equal_steps_towards_the_minimum():
    rates = [rate(s, schedule="linear", floor=0.0) for s in range(12)]
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_cosine_decay_is_halfway_down_in_the_middle():
    assert rate(0, schedule="cosine") == 1.0
    assert rate(5, schedule="cosine") == pytest.approx(0.55)
    assert rate(10, schedule="cosine") == pytest.approx(0.1)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 30), st.integers(1, 30), st.floats(0.0, 1.0))
def test_the_rate_rises_then_falls_and_stays_between_its_bounds(schedule, warmup_steps, steps, floor):
    config = dict(schedule=schedule, warmup_steps=warmup_steps, steps=steps, floor=floor)
    rates = [rate(s, **config) for s in range(warmup_steps + steps + 2)]
    warm, rest = rates[:warmup_steps], rates[warmup_steps:]
    assert warm == sorted(warm) and all(0.0 < r <= 1.0 for r in warm)
    assert all(a >= b - 1e-12 for a, b in zip(rest, rest[1:], strict=False))
    assert all(floor - 1e-12 <= r <= 1.0 + 1e-12 for r in rest)


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="train.schedule = 'step'"):
        rate(0, schedule="step")
