"""The learning rate as a function of the step."""

import math

from spmd_rl.config.config import Config


def learning_rates(config: Config, step: int) -> dict[str, float]:
    """Return the learning rate of each model that learns, by its name."""
    train, critic, steps = config.train, config.critic, config.train.steps
    peak, floor, warmup_steps = train.learning_rate, train.min_learning_rate, train.warmup_steps
    rates = {"policy": learning_rate(step, peak, floor, train.schedule, warmup_steps, steps)}
    if config.algorithm.uses_critic:
        peak, floor, warmup_steps = critic.learning_rate, critic.min_learning_rate, critic.learning_rate_warmup_steps
        rates["critic"] = learning_rate(step, peak, floor, critic.schedule, warmup_steps, steps)
    return rates


def learning_rate(step: int, peak: float, floor: float, schedule: str, warmup_steps: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up, then constant, linear or cosine decay.

    Warm-up ends on the peak: step 0 gets 1/warmup_steps of it, step warmup_steps - 1 all of it. Decay starts there and
    would reach the floor at step `steps`, one after the last, so that no step is spent on a rate of 0; a resumed run
    that goes on past `steps` stays at the floor. Cosine is SGDR's without restarts (https://arxiv.org/abs/1608.03983).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if schedule == "linear":
        return peak + (floor - peak) * progress
    if schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"train.schedule = {schedule!r}: choose constant, linear or cosine")
