"""Answers that other graders take for right, as their users reported: a false "correct" is learned."""

import pytest

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.math_equality.equal import equal
from spmd_rl.rewards.rules.math_answer import is_correct, math_answer


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        # Exact numbers that agree in their first twenty digits.
        (r"\frac{3^{900}+2}{5 \cdot 3^{901}}", r"\frac{3^{900}}{5 \cdot 3^{901}}", False),
        (r"\frac{3^{900}+2}{5 \cdot 3^{901}}", r"\frac{2+3^{900}}{5 \cdot 3^{901}}", True),
        ("2^{200}+1", "2^{200}", False),
        (r"\frac{7}{3^{90}}", r"\frac{7}{3^{91}}", False),
        # White space between two numbers says that there are two.
        ("2 3/4", "23/4", False),
        ("2 3/4", r"2\frac{3}{4}", True),
        ("5 7", "57", False),
        ("x = 2 y = 5", "x = 2 y = 5", True),
        (r"2 \pi  r", r"2\pi r", True),
        # A list with dots is no number out of it.
        (r"2, 4, \ldots, 2n", r"1, 4, \ldots, n^2", False),
        (r"2, 4, \ldots, 2n", r"2,4,\dots,2n", True),
        ("3, 6, 9, ...", "3, 9, 27, ...", False),
        (r"1, 2, \cdots, 9", r"2, \cdots, 9", False),
        # The same number of another unit.
        (r"12 \text{ kg}", r"12 \text{ g}", False),
        (r"2\text{ hours}", r"2\text{ minutes}", False),
        ("2 hours", "120 min", True),
        (r"3\,\text{km}", "3000 m", True),
        (r"3\text{ km}", "3", True),
        ("4 feet", "4 ft.", True),
        ("4 apples", "4 pears", True),
        # One-digit numerators over a letter, and e in roman.
        (r"2 + \frac{3}{\mathrm{e}}", r"2+\frac3e", True),
        (r"2 + \frac{3}{\mathrm{e}}", r"2-\frac3e", False),
    ],
)
def test_what_is_another_number_is_another_answer(gold, answer, same):
    assert equal(gold, answer) is same
    assert equal(answer, gold) is same


@pytest.mark.parametrize(
    ("gold", "response", "cause"),
    [
        (r"9", r"So \boxed{9}. But no: it must be \boxed{11", "unparsed"),
        (r"11", r"So \boxed{9}. But no: it must be \boxed{11", "unparsed"),
        (r"9", r"So \fbox{9}, and \boxed{\frac{1}{2} more", "unparsed"),
        (r"9", r"So \boxed{9}, in \boxed{} as asked.", "correct"),
        (r"\frac{1}{2}", r"\boxed{\boxed{\frac{1}{2}}", "correct"),
        ("9", "The answer is not 9.", "unparsed"),
        ("9", "The answer is not 8 but 9.", "correct"),
        ("9", "It can't be 9", "unparsed"),
        ("9", r"x \neq 9", "unparsed"),
        ("9", "Nothing else fits, so 9", "correct"),
        ("9", "<think>3 * 3 = 9", "unparsed"),
        ("9", r"<think>so \boxed{9}", "correct"),
        ("9", "<think>3 * 3 = 9</think>\nIt is 9", "correct"),
        ("(1, 5)", "Hence the point is (1, 5).", "correct"),
        ("(1,5)", "Hence we get (1, 5)", "correct"),
        ("(1, 5)", "Hence the point is (5, 1).", "wrong"),
        (r"2\sqrt{3}", r"The side is 2\sqrt{3}", "correct"),
    ],
)
def test_what_is_not_said_to_be_the_answer_is_none(gold, response, cause):
    assert is_correct(gold, response).cause == cause


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_thought_that_was_cut_off_states_no_answer_wherever_it_was_opened(opened):
    def graded(response):
        given = response if opened else f"<think>\n{response}"
        return math_answer(
            RewardSample("3 * 3?", given, "9", "length", rendered=f"<|user|>3 * 3?<|bot|>{opened}")
        ).cause

    assert graded("3 * 3 = 9") == "truncated"
    assert graded("3 * 3 = 9\n</think>\nIt is 9") == "correct"
    assert graded(r"\boxed{9} and then") == "correct"
