"""The reward rules by name; a user's own stand beside them by import path."""

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from spmd_rl.config.functions import FunctionTable
from spmd_rl.rewards.adapters import ADAPTERS
from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.rules.exact import exact
from spmd_rl.rewards.rules.format import format_tags, step, strict_format, think_boxed
from spmd_rl.rewards.rules.length import length, overlong, repetition
from spmd_rl.rewards.rules.math_answer import math_answer
from spmd_rl.rewards.rules.mindspeed import acc, acc_for_dapo, acc_for_ppo, base_acc, math_17k_acc, math_verify_reward

Rule = (
    Callable[[RewardSample], Grade | float]
    | Callable[[RewardSample], Awaitable[Grade | float]]
    | Callable[[list[RewardSample]], list[Grade | float]]
    | Callable[[list[RewardSample]], Awaitable[list[Grade | float]]]
)
"""A rule takes a sample, or a list of them where its parameter is called `samples`; it may be asynchronous."""

RULES: dict[str, Rule] = {
    "math_answer": math_answer,
    "format": format_tags,
    "exact": exact,
    "acc": acc,
    "base_acc": base_acc,
    "math_17k_acc": math_17k_acc,
    "acc_for_dapo": acc_for_dapo,
    "acc_for_ppo": acc_for_ppo,
    "math_verify_reward": math_verify_reward,
    "strict_format": strict_format,
    "step": step,
    "think_boxed": think_boxed,
    "overlong": overlong,
    "length": length,
    "repetition": repetition,
}

TABLE = FunctionTable("reward.rules", "rule", RULES, arguments=1, adapters=ADAPTERS)
resolve = TABLE.find


SIGNATURE = (
    "a rule is called with one RewardSample, def judge(sample) -> float: sample.response, sample.answer, sample.prompt "
    "and sample.row; or with a list of them, where its parameter is called `samples`, and then returns a list"
)


def foreign(rule: Rule) -> str:
    """Explain a rule that is written for another framework, by the names of its parameters; "" for any other."""
    try:
        names = set(inspect.signature(rule.func if isinstance(rule, partial) else rule).parameters)
    except (ValueError, TypeError):
        return ""
    if "completions" in names:
        return (
            "\nIts signature is TRL's (prompts, completions, and the columns by name): write trl: before its name, "
            "as in trl:my_rules.py:judge"
        )
    if {"solution_str", "data_source"} & names:
        return (
            "\nIts signature is verl's (data_source, solution_str, ground_truth, extra_info): write verl: before its "
            "name, as in verl:my_rules.py:compute_score"
        )
    return ""


def preparations(rules: Iterable[Rule]) -> list[Callable[[], object]]:
    """Return what rules have done once before anything is graded, each function once.

    That is a rule's own `prepare` (judge.prepare = load), else the function `prepare` of a user's module, where it can
    be called without arguments.
    """
    found: list[Callable[[], object]] = []
    for rule in rules:
        function = rule.func if isinstance(rule, partial) else rule
        prepare = getattr(rule, "prepare", None)
        if prepare is None and not str(function.__module__).startswith("spmd_rl."):
            prepare = getattr(sys.modules.get(function.__module__), "prepare", None)
            prepare = prepare if callable(prepare) and _needs_nothing(prepare) else None
        if prepare is not None and prepare not in found:
            found.append(prepare)
    return found


def _needs_nothing(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except (ValueError, TypeError):
        return False
    return True


def is_async(rule: Rule) -> bool:
    """Return whether it returns an awaitable."""
    function = rule.func if isinstance(rule, partial) else rule
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_batched(rule: Rule) -> bool:
    """Return whether it takes a list of samples: its parameter is called `samples`, or annotated as a list."""
    function = rule.func if isinstance(rule, partial) else rule
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (ValueError, TypeError, StopIteration):
        return False
    return first.name == "samples" or str(first.annotation).startswith(("list[", "typing.List["))
