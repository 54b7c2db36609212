"""The learning rate as a function of the step."""

import math
from dataclasses import dataclass
from typing import get_args

from spmd_rl.config.config import Config
from spmd_rl.config.fields import Schedule


@dataclass(frozen=True)
class Course:
    """Hold how a learning rate goes over the steps of a run."""

    peak: float
    floor: float
    schedule: str
    warmup_steps: int
    steps: int
    decay_fraction: float = 0.1


def learning_rates(config: Config, step: int) -> dict[str, float]:
    """Return the learning rate of each model that learns, by its name."""
    train, critic, steps = config.train, config.critic, config.train.steps
    warmup = train.warmup_steps or round(train.warmup_fraction * steps)
    rates, shape = {}, (train.learning_rate, train.min_learning_rate, train.schedule, warmup, steps)
    rates["policy"] = learning_rate(step, Course(*shape, train.decay_fraction))
    if config.algorithm.uses_critic:
        warmup = critic.learning_rate_warmup_steps or round(critic.learning_rate_warmup_fraction * steps)
        shape = (critic.learning_rate, critic.min_learning_rate, critic.schedule, warmup, steps)
        rates["critic"] = learning_rate(step, Course(*shape, critic.decay_fraction))
    return rates


def learning_rate(step: int, course: Course) -> float:
    """Return the learning rate of `step` (from 0): linear warm-up, then as the schedule says.

    Warm-up ends on the peak: step 0 gets 1/warmup_steps of it, step warmup_steps - 1 all of it. Decay starts there and
    would reach the floor at step `steps`, one after the last, so that no step is spent on a rate of 0; a resumed run
    that goes on past `steps` stays at the floor. Cosine is SGDR's without restarts (https://arxiv.org/abs/1608.03983).
    inverse_sqrt is the Transformer's (https://arxiv.org/abs/1706.03762), scaled to begin at the peak.
    """
    if course.schedule not in get_args(Schedule):
        raise ValueError(f"train.schedule = {course.schedule!r}: choose {', '.join(get_args(Schedule))}")
    peak, floor, warmup = course.peak, course.floor, course.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    begins = max(warmup, 1)
    if course.schedule == "wsd":
        begins = max(warmup, course.steps - round(course.decay_fraction * course.steps))
        return peak + (floor - peak) * min(1.0, max(0, step - begins) / max(1, course.steps - begins))
    progress = min(1.0, (step - warmup) / max(1, course.steps - warmup))
    return {
        "constant": peak,
        "linear": peak + (floor - peak) * progress,
        "cosine": floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)),
        "inverse_sqrt": max(floor, peak * math.sqrt(begins / max(step, begins))),
    }[course.schedule]
