import pytest

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.rule_table import resolve


def judge(rule, tokens, limit=2048, response="text", ids=()):
    return resolve(rule)(
        RewardSample("q", response, "a", response_ids=list(ids), response_tokens=tokens, response_limit=limit)
    )


@pytest.mark.parametrize(
    "tokens, score", [(1, 0.0), (1536, 0.0), (1537, -1 / 512), (1792, -0.5), (2048, -1.0), (4000, -1.0)]
)
def test_overlong_falls_evenly_over_the_buffer_before_the_limit(tokens, score):
    assert judge("overlong(buffer_tokens=512)", tokens) == score
    assert judge("overlong", tokens) == score, "a quarter of the limit is the buffer where none is given"
    assert judge("overlong(buffer_tokens=512, factor=0.5)", tokens) == score / 2
    assert judge("overlong(buffer_tokens=512, limit_tokens=2048)", tokens, limit=0) == score


def test_length_is_the_used_part_of_the_limit():
    assert [judge("length", tokens, limit=100) for tokens in (25, 100, 200)] == [-0.25, -1.0, -1.0]


@pytest.mark.parametrize("rule", ["overlong", "length"])
def test_a_sample_without_a_length_or_a_limit_is_refused(rule):
    with pytest.raises(ValueError, match="does not say how many tokens"):
        judge(rule, 0)
    with pytest.raises(ValueError, match="give limit_tokens"):
        judge(rule, 5, limit=0)


def test_repetition_is_the_part_of_ngrams_that_occurred_before():
    assert judge("repetition(ngram=2)", 0, ids=[1, 2, 3, 4]) == 0.0
    assert judge("repetition(ngram=2)", 0, ids=[1, 2, 1, 2, 1]) == -0.5
    assert judge("repetition(ngram=1)", 0, response="a b a b") == -0.5
    assert judge("repetition", 0, ids=[7] * 1000) == pytest.approx(-1.0, abs=2e-3)
    assert judge("repetition", 0, response="") == 0.0
