"""Hold what can be set of PPO's critic: what it begins as, and how it learns."""

from dataclasses import dataclass

from spmd_rl.config.fields import (
    Fraction,
    FromZeroToOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Schedule,
)


@dataclass(frozen=True)
class CriticConfig:
    path: str | None = None
    """Hugging Face directory or hub name that the critic begins as: a ...ForSequenceClassification model, such as a
    trained reward model, or a ...ForCausalLM one, which gets a value head of zeros. It needs the policy's tokenizer.
    None: the policy's directory."""
    label: NonNegativeInt | None = None
    """Which of the outputs of critic.path is the value, counted from 0; needed where it has several."""
    warmup_steps: NonNegativeInt = 0
    """Rounds at the beginning in which the critic alone learns, and the policy stays as it is."""
    epochs: PositiveInt | None = None
    """Passes of the critic over the mini-batches of a step, which are train.minibatches: values bear that a sample is
    used more often than a policy does (https://arxiv.org/abs/2009.04416). None: train.epochs."""
    learning_rate: NonNegativeFloat = 5e-6
    """At its highest, after its own warm-up."""
    schedule: Schedule = "constant"
    """As train.schedule."""
    learning_rate_warmup_steps: NonNegativeInt = 0
    """Rounds in which the learning rate rises from 0."""
    learning_rate_warmup_fraction: FromZeroToOne = 0.0
    """As train.warmup_fraction."""
    decay_fraction: FromZeroToOne = 0.1
    """As train.decay_fraction."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled from the gradient (AdamW)."""
    adam_beta1: Fraction = 0.9
    """As train.adam_beta1."""
    adam_beta2: Fraction = 0.95
    """As train.adam_beta2."""
    adam_epsilon: PositiveFloat = 1e-8
    """As train.adam_epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the critic's gradient over all ranks. 0: not clipped."""
