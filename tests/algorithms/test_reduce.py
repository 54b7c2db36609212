import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algorithms.reduce import fixed_length, sequence_mean, sequence_sum, token_mean

samples_of_losses = st.lists(st.lists(st.floats(-10, 10), max_size=12), min_size=1, max_size=12).filter(
    lambda samples: any(samples)
)


@given(samples_of_losses, st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_partition_of_the_samples_sums_to_the_mean_over_all_tokens(samples, ranks, random):
    weights = token_mean([len(s) for s in samples])
    tokens = [loss for sample in samples for loss in sample]
    assert _sum_over_ranks(samples, weights, ranks, random) == pytest.approx(sum(tokens) / len(tokens), abs=1e-9)


@given(samples_of_losses, st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_partition_of_the_samples_sums_to_the_mean_of_their_means(samples, ranks, random):
    weights = sequence_mean([len(s) for s in samples])
    means = [sum(s) / len(s) for s in samples if s]
    assert _sum_over_ranks(samples, weights, ranks, random) == pytest.approx(sum(means) / len(means), abs=1e-9)


@given(samples_of_losses, st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_partition_of_the_samples_sums_to_the_mean_of_their_sums(samples, ranks, random):
    lengths, sums = [len(s) for s in samples], [sum(s) for s in samples if s]
    mean = sum(sums) / len(sums)
    assert _sum_over_ranks(samples, sequence_sum(lengths), ranks, random) == pytest.approx(mean, abs=1e-9)
    fixed = fixed_length(lengths, 12)
    assert _sum_over_ranks(samples, fixed, ranks, random) == pytest.approx(mean / 12, abs=1e-9)


def _sum_over_ranks(samples, weights, ranks, random) -> float:
    parts = [0.0] * ranks
    for sample, weight in zip(samples, weights, strict=True):
        parts[random.randrange(ranks)] += sum(weight * loss for loss in sample)
    return sum(parts)


def test_with_equal_lengths_the_two_reductions_agree():
    assert token_mean([4, 4]) == sequence_mean([4, 4]) == [0.125, 0.125]


def test_a_sample_without_tokens_weighs_nothing():
    assert token_mean([0, 2]) == sequence_mean([0, 2]) == [0.0, 0.5]
    assert token_mean([0]) == sequence_mean([0]) == [0.0]
    assert sequence_sum([0, 2]) == [0.0, 1.0] and fixed_length([0, 2], 4) == [0.0, 0.25]
    assert token_mean([]) == sequence_sum([]) == []
