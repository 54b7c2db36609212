"""List the pictures of a run: their panels, and the metrics in them."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.analysis.curves import CORRECTED, TRAINING_ACCURACY, Run
from spmd_rl.config.names import REWARDS


@dataclass(frozen=True)
class Panel:
    """One set of axes: the first of `names` that a run measured."""

    title: str
    unit: str
    names: tuple[str, ...]
    fraction: bool = False
    """From 0 to 1, shown in percent."""
    from_zero: bool = False
    spread: tuple[str, ...] = ()
    """Minimum and maximum, shaded where only one run is shown."""


_LOSS = (
    Panel("Policy-gradient loss", "loss", ("actor/pg_loss",)),
    Panel("Value loss", "loss", ("critic/vf_loss",)),
    Panel("Gradient norm before clipping", "norm", ("grad_norm",), from_zero=True),
)
_REWARD = Panel("Reward, mean of a step's samples", "reward", REWARDS)
_CORRECT = Panel("Correct samples while training", "samples", (TRAINING_ACCURACY,), fraction=True)
_SPREAD = ("response_length/min", "response_length/max")
_LENGTH = (
    Panel("Response length", "tokens", ("response_length/mean",), from_zero=True, spread=_SPREAD),
    Panel("Cut off at the limit", "samples", ("rollout/truncated_fraction",), fraction=True),
)
_GAP = "Difference of vLLM's and Megatron's log-probabilities"
_KL = (
    Panel("KL to the reference model", "nats per token", ("actor/kl_loss",), from_zero=True),
    Panel("KL to the policy before the update", "nats per token", ("actor/ppo_kl",)),
    Panel(_GAP, "nats", ("correction/logprob_gap_mean",), from_zero=True),
)
_CRITIC = (
    Panel("Values", "reward", ("critic/values/mean",), spread=("critic/values/min", "critic/values/max")),
    Panel("Returns", "reward", ("critic/returns/mean",), spread=("critic/returns/min", "critic/returns/max")),
    Panel("Variance of the returns that the values explain", "fraction", ("critic/explained_variance",)),
    Panel("Weight of the KL penalty", "weight", ("kl/beta",), from_zero=True),
)
_ENTROPY = Panel("Entropy of the policy", "nats per token", ("actor/entropy",), from_zero=True)
_MARKED = Panel("Written samples with a marker of self-correction", "samples", (CORRECTED,), fraction=True)


def topics(runs: Sequence[Run]) -> list[tuple[str, str, Sequence[Panel]]]:
    """Return (file, caption, panels) of each picture of lines that any of the runs may have."""

    def union(prefix: str, suffix: str = "") -> list[str]:
        return list(dict.fromkeys(name for run in runs for name in run.measured(prefix, suffix)))

    rules: dict[str, list[str]] = {}  # an algorithm's own name of it may stand before
    for name in union("", "_rewards/mean"):
        rules.setdefault(name.split("/")[-2].removesuffix("_rewards"), []).append(name)
    by_rule = [Panel(f"Rule {rule}", "score", tuple(names)) for rule, names in rules.items()]
    evaluations = [n for n in union("eval/") if n.endswith("/accuracy") or "pass_at" in n or "pass@" in n]
    held_out = [
        Panel(f"Held-out {' '.join(name.split('/')[1:])}".replace("_", " "), "problems", (name,), fraction=True)
        for name in evaluations
    ]
    return [
        ("loss.png", "Loss", _LOSS),
        ("reward.png", "Reward", (_REWARD, *(by_rule if len(by_rule) > 1 else ()), _CORRECT)),
        ("response_length.png", "Response length", _LENGTH),
        ("kl.png", "KL divergence", _KL),
        ("entropy.png", "Entropy", (_ENTROPY,)),
        ("critic.png", "Critic", _CRITIC),
        ("evaluation.png", "Evaluation", held_out),
        ("self_correction.png", "Samples that correct themselves", (_MARKED,)),
    ]
