import pytest

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.rules.exact import exact
from spmd_rl.rewards.rules.format import format_tags, think_boxed


@pytest.mark.parametrize(
    "response, score",
    [
        ("<think>a\nb</think>\n<answer>7</answer>", 1.0),
        ("\n<think></think><answer></answer>\n", 1.0),
        ("<answer>7</answer><think>why</think>", 0.0),
        ("Well, <think>why</think><answer>7</answer>", 0.0),
        ("<think>why</think><answer>7</answer> or so", 0.0),
        ("<think>why</think> so <answer>7</answer>", 0.0),
        ("<think>why</think><answer>7</answer><answer>8</answer>", 0.0),
        ("<think>why<think></think><answer>7</answer>", 0.0),
        ("<think>why</think><answer>7", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_one_thought_then_one_answer_and_nothing_else(response, score):
    assert format_tags(RewardSample("Why?", response, "7")) == score


def test_a_think_tag_that_the_prompt_has_opened_counts():
    assert format_tags(RewardSample("Why?\n<think>\n", "because</think><answer>7</answer>", "7")) == 1.0
    assert format_tags(RewardSample("Why?\n<think>\n", "<think>because</think><answer>7</answer>", "7")) == 0.0


@pytest.mark.parametrize(
    "response, finish_reason, score, cause",
    [
        ("12", "stop", 1.0, "correct"),
        (" 12\n", "length", 1.0, "correct"),
        ("12.0", "stop", 0.0, "wrong"),
        ("It is 12", "length", 0.0, "truncated"),
        ("", "stop", 0.0, "unparsed"),
    ],
)
def test_exact_wants_the_answer_alone(response, finish_reason, score, cause):
    grade = exact(RewardSample("q", response, "12", finish_reason))
    assert (grade.score, grade.cause) == (score, cause)


@pytest.mark.parametrize(
    "response, score",
    [
        (r"<think>a</think> so \boxed{7}.", 1.0),
        ("<think>a\nb</think>\n\\boxed{\\frac{1}{2}}", 1.0),
        (r"<think>\boxed{7}</think> 7", 0.0),
        (r"\boxed{7}", 0.0),
        (r"so <think>a</think>\boxed{7}", 0.0),
        (r"<think>a \boxed{7}", 0.0),
    ],
)
def test_think_boxed_wants_a_think_block_and_then_a_box(response, score):
    assert think_boxed(RewardSample("", response, "7")) == score
