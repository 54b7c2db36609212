"""Problems generated."""

import re

import pytest

from spmd_rl.config.data_config import ArithmeticConfig
from spmd_rl.data.sources.arithmetic import make_problems

SMALL = ArithmeticConfig()
LARGE = ArithmeticConfig(operations=("+", "-", "*"), max_operand=99_999)


def asked(problems):
    return [problem["prompt"] for problem in problems]


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["listed", "drawn"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_are_right(spec, split):
    for problem in make_problems(spec, 60, 1, split):
        a, op, b = re.fullmatch(
            r"What is (\d+) ([-+*]) (\d+)\? Answer with the number only\.", problem["prompt"]
        ).groups()
        expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        assert problem["answer"] == str(expected)
        assert max(int(a), int(b)) <= spec.max_operand


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["listed", "drawn"])
def test_the_seed_decides(spec):
    assert make_problems(spec, 50, 1, "train") == make_problems(spec, 50, 1, "train")
    assert make_problems(spec, 50, 1, "train") != make_problems(spec, 50, 2, "train")


def test_problems_are_distinct_where_the_operands_allow_it():
    assert len(set(asked(make_problems(LARGE, 3000, 1, "train")))) == 3000
    train = asked(make_problems(SMALL, 1000, 1, "train"))
    distinct = len(set(train))
    assert len(set(train[:distinct])) == len(set(train[distinct : 2 * distinct])) == distinct
    assert train[:distinct] != train[distinct : 2 * distinct]


def test_held_out_problems_are_disjoint_from_training_whatever_the_seeds():
    train = {prompt for seed in range(5) for prompt in asked(make_problems(SMALL, 1000, seed, "train"))}
    held_out = {prompt for seed in range(5) for prompt in asked(make_problems(SMALL, 1000, seed, "eval"))}
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 100
    assert 15 <= len(held_out) <= 35


def test_held_out_problems_are_given_once_each():
    held_out = asked(make_problems(SMALL, 1000, 1, "eval"))
    assert len(held_out) == len(set(held_out))
    assert make_problems(SMALL, 5, 1, "eval") == make_problems(SMALL, 1000, 1, "eval")[:5]


def test_swapping_the_operands_of_a_sum_does_not_move_it_to_the_other_split():
    wording = ArithmeticConfig(operations=("+", "*"), wording="{a} {op} {b}")
    held_out = set(asked(make_problems(wording, 1000, 1, "eval")))
    assert {" ".join(reversed(prompt.split(" "))) for prompt in held_out} == held_out


def test_every_operation_is_asked_about_as_often():
    problems = asked(make_problems(LARGE, 3000, 1, "train"))
    assert all(900 < sum(f" {op} " in prompt for prompt in problems) < 1100 for op in "+-*")
