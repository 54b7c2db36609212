"""The algorithms by name; a user's own stand beside them by import path, with options: file.py:function(option=1).

Found and tried before a run starts. Torch comes in with a loss only, on the ranks that train.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spmd_rl.algorithms.advantage import (
    clipped_advantages,
    dr_grpo_advantages,
    group_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from spmd_rl.algorithms.curation import all_samples, teaching_samples
from spmd_rl.algorithms.reduce import fixed_length, sequence_mean, sequence_sum, token_mean
from spmd_rl.config.config import AlgorithmConfig
from spmd_rl.config.functions import FunctionTable
from spmd_rl.errors import ConfigError, Problem, refuse

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Callable[..., list[float]]
"""(groups, rewards) of all samples -> the advantage of each sample's tokens; may take OF_SAMPLES by name, and the
settings normalize_std and std_epsilon."""
OF_SAMPLES = ("tokens", "baselines")
"""Further values of each sample that an advantage may take: its loss tokens, and the reward of a greedy response."""
Curation = Callable[[Sequence[int], Sequence[float]], list[bool]]
"""(groups, rewards) of all samples -> which to train on."""
Reduction = Callable[..., list[float]]
"""Trained tokens of each sample of a mini-batch -> the weight of each of these tokens in its loss; may take
max_response_length."""
Loss = Callable[..., tuple["Tensor", dict[str, "Tensor"]]]
"""(logprobs, old_logprobs, advantages, reference_logprobs, entropy), each [N] over response tokens -> the loss [N] and
its parts [N] for the log; may take `lengths`, the tokens of each sample, and LOSS_SETTINGS. See
policy_loss.token_loss."""
Correction = Callable[["Tensor", "Tensor", Sequence[int]], tuple["Tensor", "Tensor"]]
"""(policy_logprobs, rollout_logprobs, lengths) -> weights [N], and where they were bounded. See correction.py."""

ADVANTAGES: FunctionTable[Advantage] = FunctionTable(
    "algorithm.advantage",
    "advantage",
    {
        "grpo": group_advantages,
        "group_norm": group_advantages,
        "dr_grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
        "reinforce_plus_plus": reinforce_plus_plus_advantages,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_advantages,
        "remax": remax_advantages,
    },
    arguments=2,
)
CURATIONS: FunctionTable[Curation] = FunctionTable(
    "algorithm.curation", "curation", {"all": all_samples, "teaching": teaching_samples}, arguments=2
)
REDUCTIONS: FunctionTable[Reduction] = FunctionTable(
    "algorithm.loss_reduction",
    "reduction",
    {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "sequence_sum": sequence_sum,
        "fixed_length": fixed_length,
    },
    arguments=1,
)
_LOSS, _CORRECTION = "spmd_rl.algorithms.policy_loss", "spmd_rl.algorithms.correction"
LOSSES: FunctionTable[Loss] = FunctionTable(
    "algorithm.loss",
    "loss",
    {"grpo": f"{_LOSS}:token_loss"} | {n: f"{_LOSS}:{n}_loss" for n in ("dual_clip", "gspo", "rloo", "cispo")},
    arguments=5,
)
LOSS_SETTINGS = ("clip_low", "clip_high", "clip_dual", "kl_coefficient", "kl_estimator", "entropy_coefficient")
CORRECTIONS: FunctionTable[Correction] = FunctionTable(
    "algorithm.correction",
    "correction",
    {"off": f"{_CORRECTION}:no_correction"}
    | {
        name: f"{_CORRECTION}:{name}"
        for name in ("token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask")
    },
    arguments=3,
)
ValueLoss = Callable[["Tensor", "Tensor", "Tensor"], tuple["Tensor", "Tensor"]]
"""(values, values before the update, returns), each [N] over response tokens -> the loss [N], and where it was clipped
[N]; may take value_clip. See value_loss.clipped_value_loss."""
VALUE_LOSSES: FunctionTable[ValueLoss] = FunctionTable(
    "algorithm.value_loss", "loss", {"clipped": "spmd_rl.algorithms.value_loss:clipped_value_loss"}, arguments=3
)


def find_advantage(algorithm: AlgorithmConfig) -> Advantage:
    """Return what estimates advantages from groups and rewards, and OF_SAMPLES by name, of which it takes what it asks
    for; like those below, it raises ValueError for other than a number a sample."""
    settings = {"normalize_std": algorithm.normalize_std, "std_epsilon": algorithm.std_epsilon}
    estimate = _checked(ADVANTAGES, algorithm.advantage, **settings)
    asked = ADVANTAGES.parameters(algorithm.advantage)
    bound = algorithm.advantage_clip

    def advantages(groups: Sequence[int], rewards: Sequence[float], **of_samples: Sequence[float]) -> list[float]:
        given = {name: of_samples[name] for name in OF_SAMPLES if name in asked and name in of_samples}
        found = estimate(groups, rewards, **given)
        return found if bound is None else clipped_advantages(found, bound)

    return advantages


def compares_with_greedy(algorithm: AlgorithmConfig) -> bool:
    """Return whether the advantage compares samples with a greedy response to their prompt."""
    return "baselines" in ADVANTAGES.parameters(algorithm.advantage)


def find_curation(algorithm: AlgorithmConfig) -> Curation:
    """Return what chooses the samples to train on."""
    return _checked(CURATIONS, "teaching" if algorithm.drop_uniform_groups else algorithm.curation)


def find_reduction(algorithm: AlgorithmConfig, max_response_length: int) -> Reduction:
    """Return what weighs tokens in the loss."""
    return _checked(REDUCTIONS, algorithm.loss_reduction, max_response_length=max_response_length)


def find_loss(algorithm: AlgorithmConfig) -> Loss:
    """Return what computes the loss at each response token; this imports torch, as the next ones do."""
    settings = {name: getattr(algorithm, name) for name in LOSS_SETTINGS}
    if algorithm.kl_in_reward:  # there it is, and not here too
        settings["kl_coefficient"] = 0.0
    return LOSSES.find(algorithm.loss, **settings)


def find_value_loss(algorithm: AlgorithmConfig) -> ValueLoss:
    """Return what computes the critic's loss at each response token."""
    return VALUE_LOSSES.find(algorithm.value_loss, value_clip=algorithm.value_clip)


def find_correction(algorithm: AlgorithmConfig) -> Correction:
    """Return what weighs tokens for the gap between the policy that wrote them and the one that learns."""
    return CORRECTIONS.find(algorithm.correction)


def chosen_functions(algorithm: AlgorithmConfig) -> list[tuple[FunctionTable[Any], str]]:
    """Return each function that settings name, with the table of its kind."""
    # GAE is no function of rewards alone: it is computed where the values are.
    estimates: list[tuple[FunctionTable[Any], str]] = [(ADVANTAGES, algorithm.advantage)]
    if algorithm.uses_critic:
        estimates = [(VALUE_LOSSES, algorithm.value_loss)]
    chosen = [*estimates, (CURATIONS, algorithm.curation), (REDUCTIONS, algorithm.loss_reduction)]
    return chosen + [(LOSSES, algorithm.loss), (CORRECTIONS, algorithm.correction)]


def unknown_algorithms(algorithm: AlgorithmConfig) -> list[Problem]:
    """Return what is wrong with names that nothing has; no function of the user's is imported."""
    problems = [problem for table, name in chosen_functions(algorithm) for problem in table.unknown(name)]
    if algorithm.drop_uniform_groups and algorithm.curation not in ("all", "teaching"):
        met, way = "algorithm.drop_uniform_groups = true is the curation `teaching`", "leave one of the two out"
        problems.append(Problem("algorithm.curation", algorithm.curation, met, way))
    return problems


def try_algorithms(algorithm: AlgorithmConfig) -> None:
    """Find every function and try it: on two groups of which one teaches, or on a few tokens.

    Raises ConfigError that says of each that can't be used the setting, what was tried, and why.
    """
    from spmd_rl.algorithms import trial  # imports torch

    groups, rewards, tokens = [0, 0, 1, 1], [0.0, 1.0, 0.5, 0.5], [1, 2, 3, 4]
    tries: tuple[Callable[[], object], ...] = (
        lambda: (
            _tried(VALUE_LOSSES.unusable, algorithm.value_loss, trial.value_loss_fault(find_value_loss(algorithm)))
            if algorithm.uses_critic
            else find_advantage(algorithm)(groups, rewards, tokens=tokens, baselines=rewards)
        ),
        lambda: find_curation(algorithm)(groups, rewards),
        lambda: find_reduction(algorithm, max(tokens))(tokens),
        lambda: _tried(
            LOSSES.unusable, algorithm.loss, trial.loss_fault(find_loss(algorithm), algorithm.uses_reference)
        ),
        lambda: _tried(CORRECTIONS.unusable, algorithm.correction, trial.correction_fault(find_correction(algorithm))),
    )
    problems: list[Problem] = []
    for attempt in tries:
        try:
            attempt()
        except ConfigError as error:
            problems += error.problems
    refuse(problems)


def _tried(unusable: Callable[[str, str, str], ConfigError], name: str, fault: str) -> None:
    """Raise the error of a function that was tried on tokens, where there is a fault."""
    if fault:
        raise unusable(name, "gave it 5 tokens of 2 samples", fault)


def _checked(table: FunctionTable[Any], name: str, **settings: Any) -> Callable[..., list[Any]]:
    """Return the function of that name; it raises ValueError when an answer is not a finite number for each sample."""
    function = table.find(name, **settings)

    def checked(*columns: Sequence[float], **more: Sequence[float]) -> list[float]:
        tried = f"gave it {len(columns[-1])} samples"
        try:
            found = function(*columns, **more)
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
