"""Generated arithmetic problems: a task to learn that needs no file."""

import operator
import random
from collections.abc import Iterator
from typing import Any

from spmd_rl.config.data_config import ArithmeticConfig
from spmd_rl.data.seeds import derived_seed

Problem = tuple[str, int, int]

_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_LIST_AT_MOST = 200_000


def make_problems(spec: ArithmeticConfig, count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """`count` problems {prompt, answer} of "train" or "eval", the same for the same seed.

    A hash of the problem decides its split (a quarter is held out), whatever the seed and the wording: no problem is
    in both. A split with fewer distinct problems than `count`: "train" repeats them in another order each time
    round, "eval" gives them all once and so returns fewer.
    """
    assert split in ("train", "eval"), split
    rng = random.Random(derived_seed(f"arithmetic {split}", seed))
    space = len(set(spec.operations)) * (spec.max_operand - spec.min_operand + 1) ** 2
    # Drawing until there are enough distinct ones is quick only while they are a small part of all.
    chosen = (_listed if space <= max(_LIST_AT_MOST, 8 * count) else _drawn)(spec, count, split, rng)
    return [{"prompt": spec.wording.format(a=a, op=op, b=b), "answer": str(_COMPUTE[op](a, b))} for op, a, b in chosen]


def _all(spec: ArithmeticConfig, split: str) -> Iterator[Problem]:
    operands = range(spec.min_operand, spec.max_operand + 1)
    for op in dict.fromkeys(spec.operations):
        for a in operands:
            for b in operands:
                if _split_of(op, a, b) == split:
                    yield op, a, b


def _split_of(op: str, a: int, b: int) -> str:
    # 7 + 3 asks what 3 + 7 asks: both are on the same side.
    if op != "-":
        a, b = min(a, b), max(a, b)
    return "eval" if derived_seed(f"held out {op}", a, b) % 4 == 0 else "train"


def _listed(spec: ArithmeticConfig, count: int, split: str, rng: random.Random) -> list[Problem]:
    problems = list(_all(spec, split))
    chosen: list[Problem] = []
    while problems and len(chosen) < count:
        rng.shuffle(problems)
        chosen += problems[: count - len(chosen)]
        if split == "eval":
            break
    return chosen


def _drawn(spec: ArithmeticConfig, count: int, split: str, rng: random.Random) -> list[Problem]:
    operations = list(dict.fromkeys(spec.operations))
    chosen: dict[Problem, None] = {}
    while len(chosen) < count:
        op = rng.choice(operations)
        a, b = (rng.randint(spec.min_operand, spec.max_operand) for _ in range(2))
        if _split_of(op, a, b) == split:
            chosen[op, a, b] = None
    return list(chosen)
