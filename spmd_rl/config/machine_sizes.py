"""Sizes that the configuration leaves to the machine."""

from dataclasses import replace

from spmd_rl.config.config import Config
from spmd_rl.platforms import detect, record


def with_machine_sizes(config: Config, elsewhere: str = "") -> Config:
    """Return the configuration with the sizes that suit the machine, where it names none.

    `elsewhere`: the machine that `auto` means, where that is not this one. What is free for the cache is known when the
    engine starts (worker/cache_size.py).
    """
    name, rollout, train = config.run.platform, config.rollout, config.train
    machine = record((elsewhere or detect()) if name == "auto" else name)
    rollout = replace(rollout, max_sequences=rollout.max_sequences or machine.max_sequences)
    tokens = train.tokens_per_microbatch or max(machine.microbatch_tokens, config.longest_sample)
    return replace(config, rollout=rollout, train=replace(train, tokens_per_microbatch=tokens))
