"""Hold what can be set of rewards: rules in processes of their own, and models that score."""

from dataclasses import dataclass, field
from typing import Literal

from spmd_rl.config.fields import FiniteFloat, MayDiffer, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class RewardModelConfig:
    path: str = ""
    """Hugging Face directory or hub name of a ...ForSequenceClassification model: config.json, *.safetensors,
    tokenizer."""
    weight: FiniteFloat = 1.0
    """Of its normalised score in the reward, beside the rules. 0: the score is measured and earns nothing."""
    label: NonNegativeInt | None = None
    """Which of the model's outputs is the score, counted from 0; needed where it has several."""
    reads: Literal["auto", "tokens", "conversation"] = "auto"
    """tokens: the policy's own token ids. conversation: messages and response in its own chat template and tokenizer.
    auto: tokens where tokenizer and template are the policy's, else conversation."""
    normalize: Literal["none", "group", "batch", "running"] = "none"
    """Subtract the mean of the scores and divide by their standard deviation: within the samples of a prompt, within
    a step, or over the run so far."""
    clip: tuple[FiniteFloat, ...] = ()
    """Lowest and highest normalised score; what is beyond counts as these. Empty: not clipped."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of its weights; the score itself is computed in float32. None: model.dtype."""
    tokens_per_microbatch: PositiveInt | None = None
    """Tokens in one of its passes. None: as the policy's. Scores do not depend on it."""


@dataclass(frozen=True)
class RewardConfig:
    rules: dict[str, FiniteFloat] = field(default_factory=lambda: {"math_answer": 1.0})
    """Rule -> weight; a sample's reward is the weighted sum. A rule is a name (math_answer, format, exact, acc,
    base_acc, math_17k_acc, acc_for_dapo, acc_for_ppo, math_verify_reward, strict_format, step, think_boxed, overlong,
    length, repetition), or file.py:function, or package.module:function, with options: --reward.rules acc 1
    "overlong(buffer_tokens=512)" 1. trl:file.py:function and verl:file.py:function have the signatures of TRL and
    verl."""
    timeout_seconds: MayDiffer[PositiveFloat] = 10.0
    """A rule that takes longer for one sample is stopped; the sample's cause is then "timeout"."""
    first_call_seconds: MayDiffer[PositiveFloat] = 60.0
    """The first call of a rule in a grading process may take so long, where that is more than timeout_seconds: a model
    that is loaded when it is first needed. A rule whose later calls are as slow has it no more."""
    workers: MayDiffer[PositiveInt] = 1
    """Grading processes per rank, for rules that take one sample; every other rule has one of its own."""
    batch: PositiveInt = 64
    """Samples that a rule for lists of samples is given at most, or that an asynchronous one works on at once."""
    memory_mib: MayDiffer[NonNegativeInt] = 2048
    """Memory of a grading process; a rule that needs more scores 0 with cause "crash". 0: no limit."""
    max_failed_steps: MayDiffer[NonNegativeInt] = 3
    """A step in which rules crashed or took too long on every sample teaches nothing. After so many in a row the run
    stops. 0: never."""
    models: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Name -> a reward model that scores the samples too, on the ranks that train. NAME is any word of yours:
    --reward.models.helpful.path DIR"""
