"""List the pictures of a run: their panels, and the metrics in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmd_rl.analysis.curves import CORRECTED, TRAINING_ACCURACY, Curve, Run
from spmd_rl.config.names import REWARDS

GIB = 1 / 2**30


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
    exact: bool = False
    """Set or counted rather than sampled: there is nothing to smooth."""
    scale: float = 1.0
    """Times this the metric is in `unit`."""
    noise: float = 0.0
    """Values up to this count as zero."""
    zero: str = ""
    """Why it may be zero in every step."""

    def curve(self, run: Run) -> Curve | None:
        """Return what a run measured of it, in its unit."""
        found = run.curve(*self.names)
        if found is None or self.scale == 1.0:
            return found
        return Curve(found.title, found.steps, tuple(self.scale * value for value in found.values))

    def drawn(self, runs: Sequence[Run]) -> bool:
        """Return whether any of the runs measured something that is not zero in every step."""
        return any(abs(value) > self.noise for run in runs if (curve := self.curve(run)) for value in curve.values)


Topic = tuple[str, str, Sequence[Panel]]
"""File without its ending, caption, panels."""

_GRADIENT = Panel("Gradient norm before clipping", "norm", ("grad_norm",), from_zero=True)
_LOSS = (
    Panel("Policy-gradient loss", "loss", ("actor/pg_loss",), noise=1e-6),
    Panel("Value loss", "loss", ("critic/vf_loss",)),
    _GRADIENT,
    Panel("Critic's gradient norm before clipping", "norm", ("critic/grad_norm",), from_zero=True),
)
_RATE = Panel("Learning rate", "rate", ("actor/lr", "grpo/lr"), from_zero=True, exact=True)
_ONCE = "with one update a batch the policy is the one that wrote the samples"
_UPDATE = (
    _RATE,
    Panel("Critic's learning rate", "rate", ("critic/lr",), from_zero=True, exact=True),
    Panel("Clipped by the policy loss", "tokens", ("actor/pg_clipfrac",), fraction=True, zero=_ONCE),
    Panel("Clipped by the value loss", "tokens", ("critic/vf_clipfrac",), fraction=True),
    Panel("Clipped importance weights (vLLM to Megatron)", "tokens", ("correction/clipped_fraction",), fraction=True),
)
_REWARD = Panel("Reward, mean of a step's samples", "reward", REWARDS)
_CORRECT = Panel("Correct samples while training", "samples", (TRAINING_ACCURACY,), fraction=True)
_LENGTHS = ("response_length/min", "response_length/max")
_LENGTH = (
    Panel("Response length", "tokens", ("response_length/mean",), from_zero=True, spread=_LENGTHS),
    Panel("Truncated at the limit", "samples", ("rollout/truncated_fraction",), fraction=True),
    Panel("Responses with a <think> block", "samples", ("response/think_fraction",), fraction=True),
)
_GAP = "Difference of vLLM's and Megatron's log-probabilities"
_KL = (
    Panel("KL to the reference model", "nats per token", ("actor/kl_loss",), from_zero=True),
    Panel("KL to the policy before the update", "nats per token", ("actor/ppo_kl",), noise=1e-7, zero=_ONCE),
    Panel(_GAP, "nats", ("correction/logprob_gap_mean",), from_zero=True),
)
_CRITIC = (
    Panel("Values", "reward", ("critic/values/mean",), spread=("critic/values/min", "critic/values/max")),
    Panel("Returns", "reward", ("critic/returns/mean",), spread=("critic/returns/min", "critic/returns/max")),
    Panel("Variance of the returns that the values explain", "fraction", ("critic/explained_variance",)),
    Panel("KL coefficient (beta)", "coefficient", ("kl/beta",), from_zero=True, exact=True),
)
_ENTROPY = Panel("Entropy of the policy", "nats per token", ("actor/entropy",), from_zero=True)
_TOKENS = Panel("Tokens/s of a rank, whole step", "tokens/s", ("e2e_tps",), from_zero=True)
_SPEED = (
    _TOKENS,
    Panel("Tokens/s of a rank, rollout", "tokens/s", ("vllm_tps",), from_zero=True),
    Panel("Tokens/s of a rank, update", "tokens/s", ("update_tps",), from_zero=True),
)
_STEP = Panel("Time of a step", "seconds", ("timing/all",), from_zero=True)
_MEMORY = Panel("Peak memory of a rank", "GiB", ("memory/peak_bytes",), from_zero=True, exact=True, scale=GIB)
_MARKED = Panel("Written samples with a marker of self-correction", "samples", (CORRECTED,), fraction=True)


def topics(runs: Sequence[Run]) -> list[Topic]:
    """Return each picture of lines that any of the runs may have."""
    rules: dict[str, list[str]] = {}  # an algorithm's own name of it may stand before
    for name in measured(runs, "", "_rewards/mean"):
        rules.setdefault(name.split("/")[-2].removesuffix("_rewards"), []).append(name)
    by_rule = [Panel(f"Rule {rule}", "score", tuple(names)) for rule, names in rules.items()]
    return [
        ("reward", "Reward", (_REWARD, *(by_rule if len(by_rule) > 1 else ()), _CORRECT)),
        ("evaluation", "Evaluation", _held_out(runs)),
        ("response_length", "Response length", _LENGTH),
        ("loss", "Loss", _LOSS),
        ("update", "Learning rate and clipping", _UPDATE),
        ("kl", "KL divergence", _KL),
        ("entropy", "Entropy", (_ENTROPY,)),
        ("critic", "Critic", _CRITIC),
        ("speed", "Speed", _SPEED),
        ("memory", "Memory", (_MEMORY,)),
        ("self_correction", "Samples that correct themselves", (_MARKED,)),
    ]


def overview(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of the one picture that says how a run went."""
    wanted = [_REWARD, *_held_out(runs)[:1], _CORRECT, *_LENGTH, _ENTROPY, *_KL[:2], _GRADIENT, _RATE]
    return [panel for panel in (*wanted, _STEP, _TOKENS, _MEMORY) if panel.drawn(runs)]


def measured(runs: Sequence[Run], prefix: str, suffix: str = "") -> list[str]:
    """Return the names of metrics that any of the runs measured."""
    return list(dict.fromkeys(name for run in runs for name in run.measured(prefix, suffix)))


def _held_out(runs: Sequence[Run]) -> list[Panel]:
    names = [name for name in measured(runs, "eval/") if name.endswith("/accuracy") or "pass_at" in name]
    return [
        Panel(f"Held-out {' '.join(name.split('/')[1:])}".replace("_", " "), "problems", (name,), fraction=True)
        for name in names
    ]


def remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Say which panels are left out because all of it is zero, and what some of several runs did not measure."""
    missing: dict[tuple[str, ...], list[str]] = {}
    zero = []
    for panel in (panel for _, _, panels in topics(runs) for panel in panels):
        without = tuple(run.name for run in runs if panel.curve(run) is None)
        if len(without) == len(runs):
            continue
        if not panel.drawn(runs):
            zero.append(panel.title + (f" ({panel.zero})" if panel.zero else ""))
        elif without:
            missing.setdefault(without, []).append(panel.title)
    if zero:
        yield f"0 in every step, so not drawn: {'; '.join(zero)}"
    for names, titles in missing.items():
        yield f"not measured in {', '.join(names)}: {'; '.join(titles)}"
