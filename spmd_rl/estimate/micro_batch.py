"""Describe one micro-batch by its lengths: what it lays out, predicts and shares."""

from dataclasses import dataclass

from spmd_rl.config.config import Config


@dataclass(frozen=True)
class Lengths:
    """Hold the tokens of a prompt and of a response: means, or the most that the settings allow."""

    prompt: float
    response: float

    @classmethod
    def longest(cls, config: Config) -> "Lengths":
        """Return what the settings allow at most."""
        return cls(config.data.max_prompt_length, config.rollout.max_response_length)


@dataclass(frozen=True)
class MicroBatch:
    """Hold the sizes of one micro-batch of a data-parallel rank; fractions where it is a mean."""

    prompts: float
    """Prompts that are laid out; `samples` of each follow it."""
    samples: float
    lengths: Lengths
    shared: bool
    """Samples of a prompt share one copy of it."""

    @property
    def tokens(self) -> float:
        """Return the tokens that are laid out: a response's last one predicts nothing."""
        after = self.lengths.response - 1
        if self.shared:
            return self.prompts * (self.lengths.prompt + self.samples * after)
        return self.prompts * self.samples * (self.lengths.prompt + after)

    @property
    def loss_tokens(self) -> float:
        """Return the tokens that are predicted."""
        return self.prompts * self.samples * self.lengths.response

    @property
    def pairs(self) -> float:
        """Return the pairs of a token and one that it sees."""
        prompt, after = self.lengths.prompt, self.lengths.response - 1
        if self.shared:
            return self.prompts * (prompt**2 / 2 + self.samples * (after * prompt + after**2 / 2))
        return self.prompts * self.samples * (prompt + after) ** 2 / 2


@dataclass(frozen=True)
class Split:
    """Hold how a mini-batch becomes micro-batches on the data-parallel rank that has most."""

    batch: MicroBatch
    count: int


def budget_tokens(config: Config) -> int:
    """Return the tokens of a micro-batch with gradients; where nothing says so, those of the longest sample."""
    return config.train.tokens_per_microbatch or config.longest_sample


def split(config: Config, data: int, lengths: Lengths, budget: int = 0) -> Split:
    """Return the micro-batches of a mini-batch over `data` ranks, filled as the planner fills them.

    `budget`: tokens of one; 0: train.tokens_per_microbatch.
    """
    train, group = config.train, config.algorithm.samples_per_prompt
    budget, shared = budget or budget_tokens(config), train.share_prompts
    samples = train.prompts_per_step * group / train.minibatches / data

    def tokens(together: int) -> float:
        return MicroBatch(1, together, lengths, shared).tokens

    # A group is parted into as few units as fit the budget, and no rank has less than a sample.
    together = max(1, min(group, int(samples)))
    together = next(
        (-(-together // parts) for parts in range(1, together) if tokens(-(-together // parts)) <= budget), 1
    )
    most = min(samples, train.sequences_per_microbatch or samples)
    fit = max(1, int(budget // tokens(together))) if tokens(together) <= budget else 1
    count = max(1, -(-int(samples + 0.999) // max(1, int(min(fit * together, most)))))
    each = samples / count
    return Split(MicroBatch(max(1.0, each / together), min(together, max(1.0, each)), lengths, shared), count)


def full(split: Split, budget: int) -> MicroBatch:
    """Return a micro-batch that takes all of its budget, where there are several: memory is to suffice for it."""
    batch = split.batch
    if split.count == 1 or batch.tokens >= budget:
        return batch
    return MicroBatch(batch.prompts * budget / batch.tokens, batch.samples, batch.lengths, batch.shared)
