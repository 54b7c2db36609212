"""The learning rate as a function of the step."""

import math


def learning_rate(step: int, train) -> float:
    """Learning rate of `step` (from 0): linear warm-up, then constant, linear or cosine decay.

    Warm-up ends on the peak: step 0 gets 1/warmup_steps of it, step warmup_steps - 1 all of it. Decay starts there and
    would reach min_learning_rate at step `steps`, one after the last, so that no step is spent on a rate of 0; a
    resumed run that goes on past `steps` stays at the minimum. Cosine is SGDR's without restarts
    (https://arxiv.org/abs/1608.03983). `train` is the config's train section.
    """
    peak, floor = train.learning_rate, train.min_learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return peak
    progress = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    if train.schedule == "linear":
        return peak + (floor - peak) * progress
    if train.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"train.schedule = {train.schedule!r}: choose constant, linear or cosine")
