from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.schedule import Course, learning_rate, learning_rates
from spmd_rl.config.fields import Schedule
from spmd_rl.config.loading import load_config


def rate(step, **changes):
    usual = dict(peak=1.0, floor=0.1, schedule="constant", warmup_steps=0, steps=10)
    return learning_rate(step, Course(**usual | changes))


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


def test_inverse_sqrt_falls_as_one_over_the_root_of_the_step_and_not_below_the_minimum():
    rates = [rate(s, schedule="inverse_sqrt", warmup_steps=4, floor=0.4) for s in (3, 4, 16, 25, 400)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.4, 0.4])
    assert rate(9, schedule="inverse_sqrt", steps=10) == rate(9, schedule="inverse_sqrt", steps=1000)


def test_wsd_stays_up_and_falls_in_a_line_at_the_end():
    rates = [rate(s, schedule="wsd", floor=0.0, warmup_steps=2, steps=20, decay_fraction=0.2) for s in range(22)]
    assert rates[:2] == [0.5, 1.0] and rates[2:17] == [1.0] * 15
    assert rates[16:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_a_warm_up_may_be_a_part_of_the_run_and_the_critics_is_its_own():
    words = (
        "--model.path m --train.steps 40 --train.learning_rate 1 --train.warmup_fraction 0.1 --critic.learning_rate 1"
    )
    config = load_config(f"{words} --algorithm.advantage gae --critic.learning_rate_warmup_fraction 0.05".split())
    rates = [learning_rates(config, step) for step in range(5)]
    assert [one["policy"] for one in rates] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [one["critic"] for one in rates] == [0.5, 1.0, 1.0, 1.0, 1.0]


@given(st.sampled_from(get_args(Schedule)), st.integers(0, 30), st.integers(1, 30), st.floats(0.0, 1.0))
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
