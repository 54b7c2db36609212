"""The algorithms by name; a user's own stand beside them by import path, with options: file.py:function(option=1).

Found and tried before a run starts. Torch comes in with a loss only, on the ranks that train.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spmd_rl.algorithms.advantage import group_advantages
from spmd_rl.algorithms.curation import all_samples, teaching_samples
from spmd_rl.algorithms.reduce import sequence_mean, token_mean
from spmd_rl.config.config import AlgorithmConfig
from spmd_rl.config.functions import FunctionTable
from spmd_rl.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Callable[[Sequence[int], Sequence[float]], list[float]]
"""(groups, rewards) of all samples -> the advantage of each sample's tokens; may take normalize_std, std_epsilon."""
Curation = Callable[[Sequence[int], Sequence[float]], list[bool]]
"""(groups, rewards) of all samples -> which to train on."""
Reduction = Callable[[Sequence[int]], list[float]]
"""Trained tokens of each sample of a mini-batch -> the weight of each of these tokens in its loss."""
Loss = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None", "Tensor | None"], tuple["Tensor", dict[str, "Tensor"]]]
"""(logprobs, old_logprobs, advantages, reference_logprobs, entropy), each [N] over response tokens -> the loss [N] and
its parts [N] for the log; may take LOSS_SETTINGS. See policy_loss.token_loss."""

ADVANTAGES: FunctionTable[Advantage] = FunctionTable(
    "algorithm.advantage", "advantage", {"grpo": group_advantages}, arguments=2
)
CURATIONS: FunctionTable[Curation] = FunctionTable(
    "algorithm.curation", "curation", {"all": all_samples, "teaching": teaching_samples}, arguments=2
)
REDUCTIONS: FunctionTable[Reduction] = FunctionTable(
    "algorithm.loss_reduction", "reduction", {"token_mean": token_mean, "sequence_mean": sequence_mean}, arguments=1
)
LOSSES: FunctionTable[Loss] = FunctionTable(
    "algorithm.loss", "loss", {"grpo": "spmd_rl.algorithms.policy_loss:token_loss"}, arguments=5
)
LOSS_SETTINGS = ("clip_low", "clip_high", "kl_coefficient", "kl_estimator", "entropy_coefficient")


def find_advantage(algorithm: AlgorithmConfig) -> Advantage:
    """Return what estimates advantages; like those below, it raises ValueError for other than a number a sample."""
    settings = {"normalize_std": algorithm.normalize_std, "std_epsilon": algorithm.std_epsilon}
    return _checked(ADVANTAGES, algorithm.advantage, **settings)


def find_curation(algorithm: AlgorithmConfig) -> Curation:
    """Return what chooses the samples to train on."""
    return _checked(CURATIONS, "teaching" if algorithm.drop_uniform_groups else algorithm.curation)


def find_reduction(algorithm: AlgorithmConfig) -> Reduction:
    """Return what weighs tokens in the loss."""
    return _checked(REDUCTIONS, algorithm.loss_reduction)


def find_loss(algorithm: AlgorithmConfig) -> Loss:
    """Return what computes the loss at each response token; this imports torch."""
    return LOSSES.find(algorithm.loss, **{name: getattr(algorithm, name) for name in LOSS_SETTINGS})


def unknown_algorithms(algorithm: AlgorithmConfig) -> list[Problem]:
    """Return what is wrong with names that nothing has; no function of the user's is imported."""
    chosen = (ADVANTAGES, algorithm.advantage), (CURATIONS, algorithm.curation)
    chosen += (REDUCTIONS, algorithm.loss_reduction), (LOSSES, algorithm.loss)
    problems = [problem for table, name in chosen for problem in table.unknown(name)]
    if algorithm.drop_uniform_groups and algorithm.curation not in ("all", "teaching"):
        met, way = "algorithm.drop_uniform_groups = true is the curation `teaching`", "leave one of the two out"
        problems.append(Problem("algorithm.curation", algorithm.curation, met, way))
    return problems


def try_algorithms(algorithm: AlgorithmConfig) -> None:
    """Find every function and try those that need no tensors, on two groups of which one teaches.

    Raises ValueError that says the setting, what was tried, and why it can't be used.
    """
    for find in (find_advantage, find_curation):
        find(algorithm)([0, 0, 1, 1], [0.0, 1.0, 0.5, 0.5])
    find_reduction(algorithm)([1, 2, 3, 4])
    find_loss(algorithm)


def _checked(table: FunctionTable[Any], name: str, **settings: Any) -> Callable[..., list[Any]]:
    """Return the function of that name; it raises ValueError when an answer is not a finite number for each sample."""
    function = table.find(name, **settings)

    def checked(*columns: Sequence[float]) -> list[float]:
        tried = f"gave it {len(columns[-1])} samples"
        try:
            found = function(*columns)
            numbers = [float(number) for number in found]
        except Exception as error:
            raise table.unusable(name, tried, f"{type(error).__name__}: {error}") from error
        if len(numbers) != len(columns[-1]):
            raise table.unusable(name, tried, f"it returned {len(numbers)} numbers; one for each sample is needed")
        broken = [place for place, number in enumerate(numbers) if not math.isfinite(number)]
        if broken:
            first = f"of sample {broken[0]}: {numbers[broken[0]]}"
            raise table.unusable(name, tried, f"{len(broken)} of its numbers are not finite ({first})")
        return list(found)

    return checked
