import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.rewards import math_answer as rule
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.equal import delimited, parse, verified
from spmd_rl.rewards.extract import last_boxed
from spmd_rl.rewards.math_answer import is_correct
from spmd_rl.rewards.numbers import plain_number, same_number

REPOSITORY = Path(__file__).resolve().parents[2]


def data(name: str) -> Path:
    path = Path(os.environ.get("SPMD_RL_TEST_DATA", REPOSITORY.parent / "shared" / "data")) / name
    if not path.exists():
        pytest.skip(f"{name} is not in SPMD_RL_TEST_DATA or ../shared/data")
    return path


@pytest.mark.parametrize(
    "gold, response",
    [
        ("18", "The answer is 18."),
        ("18", "The answer is 10 + 8 = 18."),
        ("18", "**Answer:** $18$"),
        ("18", "Answer: **18**"),
        ("18", "#### 18"),
        ("18", "First \\boxed{17}, no: \\boxed{18}. That is 2 more than 16."),
        ("18", "So she makes $18 every day, 7 days a week.\nThe answer is $18 a day, or 126 a week."),
        ("3.5", "One costs $5, the other $3.50."),
        ("#### 1,234", "1234"),
        ("Steps <<1+1=2>>2\n#### 2", "It is 2"),
        ("1000", "1,000.0"),
        ("70000", "$70{,}000$"),
        ("-5", "x = \u22125"),
        ("3", "x = 10 - 3"),
        ("3", "10-3"),
        ("0.333333", "1/3"),
        ("\\frac{1}{2}", "The answer is 0.5"),
        ("1/2", "The answer is \\frac{1}{2}."),
        ("$37$", "37"),
        ("36", "\\[ 36^{\\circ} \\]"),
        ("50", "50%"),
        ("x+1", "<think>\\boxed{x}</think> <answer>1 + x</answer>"),
        ("x=5", "The answer is 5"),
        ("(1,2)", "So the answer is (1, 2)."),
        ("42", "<answer>That makes 42 apples.</answer>"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\boxed{\n\\begin{pmatrix} 1 \\\\ 2\n\\end{pmatrix}}"),
    ],
)
def test_the_final_answer_is_found_and_equal(gold, response):
    grade = is_correct(gold, response)
    assert (grade.score, grade.cause) == (1.0, "correct"), grade


@pytest.mark.parametrize(
    "gold, response, cause",
    [
        ("5", "The answer is 10 + 8 = 18.", "wrong"),
        ("17", "First \\boxed{17}, no: \\boxed{18}.", "wrong"),
        ("3", "<think>It is \\boxed{3}</think> <answer>4</answer>", "wrong"),
        ("-3", "10-3", "wrong"),
        ("18", "", "unparsed"),
        ("18", "I do not know.", "unparsed"),
        ("2", "x2 and y_2", "unparsed"),
        ("x+1", "No idea.", "unparsed"),
        ("x+1", "\\boxed{x+2}", "wrong"),
    ],
)
def test_another_answer_is_wrong_and_none_is_unparsed(gold, response, cause):
    grade = is_correct(gold, response)
    assert (grade.score, grade.cause) == (0.0, cause), grade


@pytest.mark.parametrize(
    "response, cause",
    [
        ("Let me think about", "truncated"),
        ("First 3 and then", "truncated"),
        ("First 3 and then 7", "correct"),
        ("\\boxed{3}. Let me check", "wrong"),
        ("The answer is 7. Let me check that 2 + 5 =", "correct"),
    ],
)
def test_a_cut_off_response_is_truncated_unless_it_stated_an_answer_or_stopped_at_it(response, cause):
    assert rule.math_answer(RewardSample("q", response, "7", "length")).cause == cause


def test_an_empty_gold_answer_is_refused():
    with pytest.raises(ValueError, match="gold answer is empty"):
        is_correct(" ", "7")


@pytest.mark.parametrize(
    "text, content",
    [
        ("\\boxed{1} and \\fbox{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{never closes", "1"),
        ("\\boxed{1} then \\boxed{}", "1"),
        ("\\boxed{ \\boxed{2} }", "2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("stray } and { before \\boxed{3}", "3"),
        ("none", None),
        ("\\boxed{" * 5000, None),
    ],
)
def test_the_last_closed_box_is_read(text, content):
    assert last_boxed(text) == content


numbers = st.builds(
    lambda sign, whole, rest: sign + whole + rest,
    st.sampled_from(["", "-"]),
    st.one_of(st.integers(0, 3000).map(str), st.integers(0, 10**7).map("{:,}".format)),
    st.one_of(st.just(""), st.text("0123456789", min_size=1, max_size=8).map(".{}".format)),
)


@settings(max_examples=150, deadline=None)
@given(numbers, numbers, st.booleans())
def test_the_quick_comparison_of_numbers_says_what_math_verify_says(a, b, same):
    if same:
        b = a.replace(",", "")
    quick = same_number(plain_number(a), plain_number(b))
    assert quick == verified(parse(delimited(a)), parse(delimited(b)))


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1,00", "1,0000", "x", "1e3", "12:47", "1/0", "50%", "1 000", "9" * 101]
)
def test_what_is_no_plain_number_is_left_to_math_verify(text):
    assert plain_number(text) is None


def test_numbers_are_compared_without_importing_sympy():
    program = (
        "import sys; from spmd_rl.rewards.math_answer import is_correct\n"
        "assert is_correct('#### 1,234', 'The answer is $1234.00.').score == 1.0\n"
        "assert is_correct('7', 'so \\\\boxed{8}').score == 0.0\n"
        "print([m for m in ('sympy', 'math_verify', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_solution_is_right_by_itself_and_wrong_with_another_number(split):
    golds = [json.loads(line)["answer"] for line in data(f"gsm8k/{split}.jsonl").open()]
    for gold in golds:
        number = gold.rpartition("####")[2].strip()
        assert is_correct(gold, gold).score == 1.0
        assert is_correct(gold, f"So it is \\boxed{{{number}}}").score == 1.0
        assert is_correct(gold, f"The answer is {number}.").score == 1.0
        assert is_correct(gold, f"The answer is {int(number.replace(',', '')) + 1}.").score == 0.0


def test_the_verdicts_on_public_graders_own_cases_agree_at_least_as_often_as_measured():
    cases = json.loads(data("graders/equivalence_cases.json").read_text())
    agreed = 0
    for case in cases:
        pred = str(case["pred"])
        response = pred if case["level"] == "response" else f"\\boxed{{{pred}}}"
        agreed += (is_correct(str(case["gold"]), response).score == 1.0) is case["expected"]
    assert len(cases) == 204 and agreed >= 184
