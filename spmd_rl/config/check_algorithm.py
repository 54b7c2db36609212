"""Say which methods cannot go together."""

from spmd_rl.config.config import GAE, AlgorithmConfig, Config
from spmd_rl.errors import Problem

COMPARING = ("grpo", "group_norm", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantages that compare the samples of one prompt."""
OF_RESPONSES = ("gspo", "rloo")
"""Losses with one ratio for all of a response."""
LOSSES_WITHOUT_DUAL = ("grpo", "cispo", *OF_RESPONSES)
"""Those that do not read clip_dual; one of the user's may."""


def algorithm_problems(config: Config) -> list[Problem]:
    """Return what of the chosen methods cannot work together."""
    algorithm, problems = config.algorithm, []
    samples = algorithm.samples_per_prompt

    def problem(knob: str, value: object, met: str, way: str) -> None:
        problems.append(Problem(f"algorithm.{knob}", value, met, way))

    if samples < 2 and bare(algorithm.advantage) in COMPARING:
        met = f"the advantage compares samples of one prompt (algorithm.advantage = {algorithm.advantage})"
        problem("samples_per_prompt", samples, met, "take 2 or more, or the advantage reinforce_plus_plus or remax")
    elif samples < 2 and (algorithm.drop_uniform_groups or bare(algorithm.curation) == "teaching"):
        knob = "drop_uniform_groups" if algorithm.drop_uniform_groups else "curation"
        met = "a group of one sample (algorithm.samples_per_prompt) is uniform, so nothing would be trained"
        problem(knob, getattr(algorithm, knob), met, "take 2 or more samples, or train on all")
    if algorithm.refill_attempts and bare(algorithm.curation) == "all" and not algorithm.drop_uniform_groups:
        met = "with algorithm.curation = all every group is kept, and there is nothing to refill"
        problem("refill_attempts", algorithm.refill_attempts, met, "set the curation to teaching, or this to 0")
    if not algorithm.refill_attempts and algorithm.refill_oversample > 1.0:
        met = "with algorithm.refill_attempts = 0 no further prompts are sampled"
        problem("refill_oversample", algorithm.refill_oversample, met, "set the attempts, such as to 3, or this to 1")
    if algorithm.refill_leftover == "keep" and algorithm.refill_oversample == 1.0:
        met = (
            "nothing is left over with algorithm.refill_oversample = 1: so many prompts are taken as groups are missing"
        )
        problem("refill_leftover", "keep", met, "raise refill_oversample, such as to 1.5, or set this to drop")
    if algorithm.refill_attempts and config.reward.models:
        met = "reward models score after the rollout, too late to sample on"
        problem("refill_attempts", algorithm.refill_attempts, met, "set it to 0, or take rules alone (reward.rules)")
    if algorithm.kl_in_reward and algorithm.kl_coefficient == 0.0:
        met = "there is no reference to diverge from with algorithm.kl_coefficient = 0"
        problem("kl_in_reward", True, met, "set the coefficient, such as 0.001, or this to false")
    if bare(algorithm.loss) == "dual_clip" and algorithm.clip_dual <= 1.0 + algorithm.clip_high:
        met = (
            f"not above 1 + algorithm.clip_high = {1.0 + algorithm.clip_high:g}, so it would clip what clip_high keeps"
        )
        problem("clip_dual", algorithm.clip_dual, met, "raise it, such as to 3")
    return problems


def algorithm_notes(algorithm: AlgorithmConfig) -> list[str]:
    """Return what works and is worth knowing."""
    said = _without_effect(algorithm)
    if algorithm.kl_coefficient and not algorithm.kl_in_reward and algorithm.kl_estimator in ("k1", "kl"):
        said.append(
            f"algorithm.kl_estimator = {algorithm.kl_estimator}: in the loss its expected gradient is zero; k2 and k3 "
            "hold the policy back there, k1 with algorithm.kl_in_reward"
        )
    if bare(algorithm.loss) in OF_RESPONSES and bare(algorithm.loss_reduction) == "token_mean":
        said.append(
            f"algorithm.loss_reduction = token_mean: the loss {algorithm.loss} has one ratio a response, and so its "
            "longer responses count for more; in its paper the reduction is sequence_mean"
        )
    if bare(algorithm.loss) == "gspo" and algorithm.clip_high >= 0.1:
        said.append(
            f"algorithm.clip_high = {algorithm.clip_high}: the ratio of gspo is a mean over tokens and stays near 1; "
            "its paper clips at 0.0003 (clip_low) and 0.0004 (clip_high)"
        )
    return said


def _without_effect(algorithm: AlgorithmConfig) -> list[str]:
    """Return which settings were changed that the chosen methods do not look at."""
    uses = {
        ("gamma", "lam", "value_loss", "value_clip"): (algorithm.uses_critic, f"algorithm.advantage = {GAE}"),
        ("kl_target", "kl_horizon"): (algorithm.kl_control == "adaptive", "algorithm.kl_control = adaptive"),
        ("kl_estimator", "kl_control"): (algorithm.uses_reference, "algorithm.kl_coefficient above 0"),
        ("correction",): (algorithm.old_logprobs == "trainer", "algorithm.old_logprobs = trainer"),
        ("clip_dual",): (bare(algorithm.loss) not in LOSSES_WITHOUT_DUAL, "algorithm.loss = dual_clip"),
    }
    return [
        f"algorithm.{name} = {getattr(algorithm, name)}: without effect; it is for {needed}"
        for names, (used, needed) in uses.items()
        for name in names
        if not used and getattr(algorithm, name) != getattr(AlgorithmConfig(), name)
    ]


def bare(name: str) -> str:
    """Return a function's name without its options."""
    return name.partition("(")[0].strip()
