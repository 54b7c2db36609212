"""The rules that MindSpeed-RL's verifiers have, under their names and with their values, by this house's one grader.

Theirs are in https://gitcode.com/Ascend/MindSpeed-RL, mindspeed_rl/models/rule_verifier.py. There, acc and base_acc use
Qwen's grader, math_17k_acc and acc_for_ppo mathruler's, acc_for_dapo a comparison of strings; here all answers are
compared by math_answer, so a right answer in another spelling is right by every rule.
"""

import re

from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.math_equality.algebra import prepare
from spmd_rl.rewards.rules.math_answer import graded

_END = re.compile(r"</s>|<\|im_end\|>|<\|endoftext\|>")
_THOUGHT_AND_BOX = re.compile(r"<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>", re.DOTALL)
DAPO_CHARACTERS = 300
"""acc_for_dapo reads no more than so many last characters of a response."""


def acc(sample: RewardSample) -> Grade:
    """1.0 for a right answer in the last \\boxed{}, -0.5 for a wrong one, -1.0 when there is no box."""
    grade = graded(sample, ("boxed",), _END.split(sample.response)[0])
    return _scored(grade, right=1.0, wrong=-0.5, none=-1.0)


def math_17k_acc(sample: RewardSample) -> Grade:
    """1.0 for a right answer in the last \\boxed{}, else 0.0."""
    return graded(sample, ("boxed",))


def acc_for_ppo(sample: RewardSample) -> Grade:
    """1.0 for a right answer in the last \\boxed{}, else 0.0."""
    return graded(sample, ("boxed",))


def acc_for_dapo(sample: RewardSample) -> Grade:
    """1.0 for a right answer after the last "Answer:" of the last 300 characters, else -1.0."""
    grade = graded(sample, ("answer:",), sample.response[-DAPO_CHARACTERS:])
    return _scored(grade, right=1.0, wrong=-1.0, none=-1.0)


def base_acc(sample: RewardSample) -> Grade:
    """1.0 for a right answer in the last \\boxed{}, when the whole response is `<think>...</think>...<answer>...
    \\boxed{...}...</answer>`; else 0.0."""
    grade = graded(sample, ("boxed",))
    if _THOUGHT_AND_BOX.fullmatch(sample.opened_response):
        return grade
    cause = "truncated" if sample.finish_reason == "length" else "unparsed"
    return Grade(0.0, cause, grade.extracted)


def math_verify_reward(sample: RewardSample) -> Grade:
    """The same rule as base_acc: the two differ in MindSpeed-RL by the grader they use, and here there is one."""
    return base_acc(sample)


def _scored(grade: Grade, right: float, wrong: float, none: float) -> Grade:
    score = right if grade.correct else none if grade.extracted is None else wrong
    return Grade(score, grade.cause, grade.extracted)


for _rule in (acc, math_17k_acc, acc_for_ppo, acc_for_dapo, base_acc, math_verify_reward):
    _rule.prepare = prepare
