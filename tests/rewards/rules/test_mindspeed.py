"""Every rule that MindSpeed-RL users know, with its values."""

import pytest

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.rule_table import resolve

WHOLE = r"<think>7 + 5</think> <answer>So \boxed{12}</answer>"


def judge(rule, response, answer="12", **fields):
    value = resolve(rule)(RewardSample("q", response, answer, **fields))
    return (value.score, value.cause) if hasattr(value, "score") else value


@pytest.mark.parametrize(
    "rule, response, score, cause",
    [
        ("acc", r"\boxed{12}", 1.0, "correct"),
        ("acc", r"\boxed{13}", -0.5, "wrong"),
        ("acc", "It is 12", -1.0, "unparsed"),
        ("acc", r"\boxed{12}<|im_end|>\boxed{13}", 1.0, "correct"),
        ("math_17k_acc", r"\boxed{13} no: \boxed{12.0}", 1.0, "correct"),
        ("math_17k_acc", r"\boxed{13}", 0.0, "wrong"),
        ("math_17k_acc", "Answer: 12", 0.0, "unparsed"),
        ("acc_for_ppo", r"\boxed{12}", 1.0, "correct"),
        ("acc_for_ppo", r"\boxed{}", 0.0, "unparsed"),
        ("acc_for_dapo", "Answer: 12", 1.0, "correct"),
        ("acc_for_dapo", "Answer: 41 is a guess.\nAnswer: $12$", 1.0, "correct"),
        ("acc_for_dapo", "Answer: 13", -1.0, "wrong"),
        ("acc_for_dapo", r"\boxed{12}", -1.0, "unparsed"),
        ("acc_for_dapo", "Answer: 12" + " filler" * 60, -1.0, "unparsed"),
        ("base_acc", WHOLE, 1.0, "correct"),
        ("base_acc", WHOLE.replace("12", "13"), 0.0, "wrong"),
        ("base_acc", r"\boxed{12}", 0.0, "unparsed"),
        ("base_acc", WHOLE + " or so", 0.0, "unparsed"),
        ("math_verify_reward", WHOLE.replace("12", r"\frac{24}{2}"), 1.0, "correct"),
        ("math_verify_reward", "<think></think>" + r"\boxed{12}", 0.0, "unparsed"),
    ],
)
def test_an_answer_rule_gives_its_own_values_by_the_one_grader(rule, response, score, cause):
    assert judge(rule, response) == (score, cause)


@pytest.mark.parametrize(
    "rule, score", [("acc", -1.0), ("acc_for_dapo", -1.0), ("math_17k_acc", 0.0), ("base_acc", 0.0)]
)
def test_a_cut_off_response_without_an_answer_is_truncated_and_scores_as_none(rule, score):
    assert judge(rule, "<think>Let me", finish_reason="length") == (score, "truncated")


@pytest.mark.parametrize(
    "response, score",
    [
        (WHOLE, 1.0),
        (WHOLE + "\n", -0.5),
        (" " + WHOLE, -0.5),
        (WHOLE.replace(r"\boxed{12}", r"\boxed{12} or \boxed{13}"), -0.5),
        (WHOLE.replace("7 + 5", "<think>7 + 5"), -0.5),
        (r"<think>\boxed{12}</think><answer>12</answer>", -0.5),
        (r"<answer>\boxed{12}</answer><think>7</think>", -0.5),
        ("12", -0.5),
        ("", -0.5),
    ],
)
def test_strict_format_wants_each_tag_and_one_box_once_and_in_order(response, score):
    assert judge("strict_format", response) == score


@pytest.mark.parametrize(
    "response, score",
    [
        ("", 0.0),
        ("Step 1: add", pytest.approx(1 / 3)),
        ("1. add\n2. check", pytest.approx(1 / 3)),
        ("First, add. Next, check.", pytest.approx(2 / 3)),
        ("\n- a\n* b\n- c\n- d", 1.0),
        ("Step 1: Step 2: Second, Finally, done", 1.0),
    ],
)
def test_step_gives_a_third_for_each_sign_of_a_step(response, score):
    assert judge("step", response) == score
