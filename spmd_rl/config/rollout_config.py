"""Hold what can be set of inference engines and of sampling: a run, an evaluation and a conversation share it."""

from dataclasses import dataclass
from typing import Annotated

from spmd_rl.config.fields import Bounds, MayDiffer, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

TopP = Annotated[float, Bounds(gt=0, le=1, note="1: all tokens")]
_ON_POLICY = "training uses the log-probabilities of the distribution at this temperature"


@dataclass(frozen=True)
class EngineLayoutConfig:
    """Settings of how ranks make engines, which share out prompts."""

    tensor: MayDiffer[PositiveInt] = 1
    """Tensor-parallel size (TP) of the inference engines: ranks that share one. There are ranks / tensor engines, each
    with its own prompts."""
    data: MayDiffer[PositiveInt] = 1
    """Data-parallel size (DP) of the inference engines: those that share the experts of a mixture-of-experts model;
    they run in step. 1: each has all of them."""
    max_sequences: MayDiffer[PositiveInt | None] = None
    """Batch size of an engine: sequences that it runs at once. None: 64 on CPUs, 256 on accelerators."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one inference engine."""

    prefix = "rollout."
    """Stands before their names, where the program at hand has them in a section."""

    expert_parallel: MayDiffer[bool] = False
    """Each rank of an engine, or of the engines that share experts, holds some experts whole; otherwise a part of every
    expert."""
    cache_gib: MayDiffer[PositiveFloat | None] = None
    """Memory of the key-value cache, GiB per rank. None: what rollout.memory_fraction says; without it, as much as
    max_sequences samples of full length take; at most, on accelerators, what the engine's weights and 4 GiB for all
    else leave of what is free, on CPUs 20 % of the machine's free memory for all its ranks together."""
    memory_fraction: MayDiffer[Annotated[float, Bounds(gt=0, le=1)] | None] = None
    """In place of cache_gib: the part of the device that the engine's weights and cache take together, which others
    call gpu_memory_utilization; on CPUs the part of the machine's free memory that the caches of all its ranks take."""
    eager: MayDiffer[bool | None] = None
    """Run the engine's layers one by one, without graphs of a device: slower, and what goes wrong is easier to find.
    None: False on NVIDIA GPUs, True elsewhere."""
    prefix_caching: MayDiffer[bool] = True
    """Keep keys and values of a prompt for the other samples of its group, and empty them at every refresh. False: to
    find a fault."""
    max_batched_tokens: MayDiffer[PositiveInt | None] = None
    """Tokens of one step of an engine, prompts and responses together, at most; longer prompts are computed in parts.
    None: 2048, or the longest sample where that is more."""
    block_tokens: MayDiffer[PositiveInt] = 32
    """Tokens in one block of the cache; a shared prefix is reused in whole blocks. (Latent attention on a CPU: 16.)"""


@dataclass(frozen=True)
class EnginesConfig(EngineConfig, EngineLayoutConfig):
    """Settings of several engines."""


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of how tokens are drawn."""

    temperature: NonNegativeFloat = 0.0
    """0: greedy, the likeliest token each time."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens with this probability together. 1: from all."""
    top_k: NonNegativeInt = 0
    """Sample from so many likeliest tokens. 0: from all."""
    min_p: Annotated[float, Bounds(ge=0, lt=1, note="0: all tokens")] = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability. 0: none."""


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig, EnginesConfig):
    """Settings of the engines that make a run's samples."""

    temperature: Annotated[float, Bounds(gt=0, note=_ON_POLICY)] = 1.0
    """Above 0. Training uses the log-probabilities of the distribution at this temperature. Evaluation is greedy."""
    router_replay: bool = False
    """Score and train the policy with the experts that vLLM chose for each token (router replay), in a model of
    experts: where rounding would choose others, its log-probabilities are then of the same weights as vLLM's."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, besides the model's own: those of tokenizer, config.json, generation_config.json
    and the end of a turn in the chat template."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of what rules, logged samples and stop strings see, also tags such as <think>; else
    only those that begin, end or pad a text."""
    max_response_length: PositiveInt = 512
    """Tokens; a longer response is cut and its finish reason is "length"."""
    refresh_bucket_mib: MayDiffer[Annotated[float, Bounds(ge=1, note="a bucket has 1 MiB or more")] | None] = None
    """Weights travel in buckets of this size; a rank holds at most two that it sends and two that it receives. None:
    what suits the machine (16 on CPUs, 256 on accelerators)."""
    canary_steps: MayDiffer[NonNegativeInt] = 10
    """Every so many steps, from the first on, vLLM and Megatron both score a sequence of a few tokens. 0: never."""
    canary_tolerance: MayDiffer[
        Annotated[float, Bounds(gt=0, note="for no canary, set rollout.canary_steps to 0")] | None
    ] = None
    """The run stops when their log-probabilities differ by more on average. None: 0.001 in float32, 0.1 in bfloat16."""
