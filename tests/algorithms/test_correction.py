import math

import pytest
import torch

from spmd_rl.algorithms.table import CORRECTIONS, find_correction
from spmd_rl.config.config import AlgorithmConfig

LENGTHS = [2, 0, 3, 1]
# Log-ratios of tokens: samples with products e^0.3, e^1.5 and e^-1.
GAPS = torch.tensor([0.5, -0.2, 0.8, 0.9, -0.2, -1.0], dtype=torch.float64)


def corrected(name, gaps=GAPS, lengths=LENGTHS):
    rollout = torch.full_like(gaps, -2.0)
    weights, bounded = find_correction(AlgorithmConfig(correction=name))(rollout + gaps, rollout, lengths)
    return weights, bounded.tolist()


@pytest.mark.parametrize("name", CORRECTIONS.functions)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_the_two_agree_every_weight_is_exactly_one(name, dtype):
    weights, bounded = corrected(name, torch.zeros(6, dtype=dtype))
    assert weights.dtype == dtype and torch.equal(weights, torch.ones(6, dtype=dtype)) and not any(bounded)


def products(*log_ratios):
    return [math.exp(log_ratio) for log_ratio in log_ratios]


@pytest.mark.parametrize(
    "name, expected, bounded",
    [
        ("off", [1.0] * 6, [False] * 6),
        ("token_truncate", [*products(0.5, -0.2), 2.0, 2.0, *products(-0.2, -1.0)], [0, 0, 1, 1, 0, 0]),
        ("token_truncate(bound=1)", [1.0, *products(-0.2), 1.0, 1.0, *products(-0.2, -1.0)], [1, 0, 1, 1, 0, 0]),
        ("sequence_truncate", [*products(0.3, 0.3), 2.0, 2.0, 2.0, *products(-1.0)], [0, 0, 1, 1, 1, 0]),
        ("token_mask", [*products(0.5, -0.2, 0.8, 0.9, -0.2), 0.0], [0, 0, 0, 0, 0, 1]),
        ("token_mask(low=0.1, high=2.3)", [*products(0.5, -0.2, 0.8), 0.0, *products(-0.2, -1.0)], [0, 0, 0, 1, 0, 0]),
        ("sequence_mask", [*products(0.3, 0.3), 0.0, 0.0, 0.0, *products(-1.0)], [0, 0, 1, 1, 1, 0]),
        ("geometric_mask(low=0.5, high=1.5)", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_weights_by_hand(name, expected, bounded):
    weights, found = corrected(name)
    assert weights.tolist() == pytest.approx(expected) and found == [bool(one) for one in bounded]


@pytest.mark.parametrize("name", CORRECTIONS.functions)
def test_a_sample_has_the_same_weights_whatever_it_is_packed_with(name):
    whole, _ = corrected(name)
    for gaps, weights, length in zip(GAPS.split(LENGTHS), whole.split(LENGTHS), LENGTHS, strict=True):
        assert torch.equal(corrected(name, gaps, [length])[0], weights)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS.functions if name not in ("off", "geometric_mask")])
def test_a_gap_that_is_no_number_is_seen_in_the_weights(name):
    gaps = GAPS.clone()
    gaps[0] = math.nan
    assert corrected(name, gaps)[0][0].isnan()


@pytest.mark.parametrize("name", CORRECTIONS.functions)
def test_no_weight_is_infinite_however_wide_the_gap(name):
    assert corrected(name, 1000 * GAPS)[0].isfinite().all()


@pytest.mark.parametrize(
    "name, reason",
    [
        ("token_truncate(bound=0.5)", "bound = 0.5 should be 1 or more"),
        ("token_mask(low=2.0)", "should lie around 1"),
        ("geometric_mask(high=0.5)", "should lie around 1"),
        ("token_mask(bound=3.0)", "it has no option 'bound'"),
        ("icepop", "there are off, token_truncate"),
    ],
)
def test_bounds_that_could_not_keep_equal_probabilities_are_refused(name, reason):
    with pytest.raises(ValueError, match="algorithm.correction: ") as error:
        find_correction(AlgorithmConfig(correction=name))
    assert reason in str(error.value)
