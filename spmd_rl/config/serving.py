"""What can be set of the programs that only generate: evaluate and chat. They hold an engine and no trainer."""

from dataclasses import dataclass, field, replace
from typing import Literal

from spmd_rl.config.config import (
    Config,
    DataConfig,
    HangConfig,
    ModelConfig,
    PlatformName,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)


@dataclass(frozen=True)
class EngineConfig:
    tensor: int = 1
    """Ranks that share one inference engine. There are ranks / tensor engines, each with its own questions."""
    data: int = 1
    """Engines that share the experts of a mixture-of-experts model; they run in step. 1: each has all of them."""
    expert_parallel: bool = False
    """Each rank of tensor x data holds some experts whole; otherwise a part of every expert."""
    max_sequences: int = 64
    """Sequences one engine runs at once."""
    cache_gib: float = 1.0
    """Memory of the key-value cache, GiB per rank."""
    block_tokens: int = 32
    """Tokens in one block of the cache; a shared prefix is reused in whole blocks. (Latent attention on a CPU: 16.)"""


@dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation."""

    model: str
    """A Hugging Face directory, or a Megatron checkpoint directory as tools/convert_checkpoint.py writes it."""
    benchmark: tuple[str, ...] = ()
    """What to ask: files of configs/datasets/, or sources with all defaults. Several are evaluated one by one."""
    limit: int | None = None
    """At most so many questions of each benchmark, the first ones. None: all."""
    samples: int = 1
    """Of each question; more than 1 needs a temperature. Without torchrun, which takes it for its own, --n is the same.
    """
    temperature: float = 0.0
    """0: greedy, the likeliest token each time."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability together. 1: from all."""
    top_k: int = 0
    """Sample from so many likeliest tokens. 0: from all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability. 0: none."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own."""
    system: str | None = None
    """System message put before every question. None: what the dataset's file or the template says."""
    template: str | None = None
    """How messages are spelled: "chat" (the tokenizer's own chat template), a name in configs/templates/, or a .jinja
    file. None: what the dataset's file says, else "chat"."""
    enable_thinking: bool | None = None
    """Passed to a template that knows it (Qwen3). None: what the template does by itself."""
    max_prompt_length: int = 1024
    """Tokens, template included."""
    overlong_prompts: Literal["drop", "refuse"] = "refuse"
    """What to do with longer prompts: leave them out and say how many, or stop and name them."""
    max_response_length: int = 512
    """Tokens; a longer response is cut and counts as truncated."""
    grader: str = "math_answer"
    """The reward rule that decides what is correct: a name that comes with spmd_rl, file.py:function or
    package.module:function."""
    grader_workers: int = 1
    """Grading processes per rank."""
    grader_timeout_seconds: float = 10.0
    """A rule that takes longer for one sample is stopped; the sample is not correct, its cause is "timeout"."""
    output: str | None = None
    """Where everything is written. None: evaluations/<model>-<benchmark>, with a number where that exists."""
    baseline: str | None = None
    """What to compare with, question by question: the output directory of an earlier evaluation, or a second model of
    the same architecture and size, which is evaluated too."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights. auto: as the model's config.json says."""
    seed: int = 1
    """The same seed gives the same samples, whatever the number of ranks."""
    platform: PlatformName = "auto"
    """What to run on. auto: the accelerator that is there, else the CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer."""
    control_timeout_seconds: float = 600.0
    """How long rank 0 waits for the others to begin or end a verb before it names who is missing."""
    rollout: EngineConfig = field(default_factory=EngineConfig)
    hang: HangConfig = field(default_factory=HangConfig)


@dataclass(frozen=True)
class ChatConfig:
    """One conversation."""

    model: str
    """A Hugging Face directory, or a Megatron checkpoint directory as tools/convert_checkpoint.py writes it."""
    system: str | None = None
    """System message before the conversation. None: what the chat template does by itself."""
    template: str | None = None
    """How messages are spelled: "chat" (the tokenizer's own chat template), a name in configs/templates/, or a .jinja
    file. None: the tokenizer's own."""
    enable_thinking: bool | None = None
    """Passed to a template that knows it (Qwen3). None: what the template does by itself."""
    temperature: float = 0.7
    """0: greedy, the likeliest token each time."""
    top_p: float = 0.95
    """Sample from the smallest set of tokens with this probability together. 1: from all."""
    top_k: int = 0
    """Sample from so many likeliest tokens. 0: from all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability. 0: none."""
    max_tokens: int = 1024
    """Of one answer; a longer one is cut."""
    context: int = 4096
    """Tokens of the whole conversation; at most the model's positions."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights. auto: as the model's config.json says."""
    seed: int = 1
    """The same seed and the same words give the same answers."""
    platform: PlatformName = "auto"
    """What to run on. auto: the accelerator that is there, else the CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer."""
    cache_gib: float = 1.0
    """Memory of the key-value cache, GiB per rank."""
    block_tokens: int = 32
    """Tokens in one block of the cache; a shared prefix is reused in whole blocks. (Latent attention on a CPU: 16.)"""
    expert_parallel: bool = False
    """Each rank holds some experts whole; otherwise a part of every expert."""


def of_evaluation(given: EvaluateConfig, directory: str, dtype: Literal["float32", "bfloat16"]) -> Config:
    """The part of a run's configuration that an evaluation has; `directory`: with the model's config.json."""
    engine = given.rollout
    return Config(
        ModelConfig(directory, dtype, trust_remote_code=given.trust_remote_code),
        DataConfig(
            system=given.system,
            template=given.template,
            enable_thinking=given.enable_thinking,
            max_prompt_length=given.max_prompt_length,
            overlong_prompts=given.overlong_prompts,
        ),
        rollout=RolloutConfig(
            tensor=engine.tensor,
            data=engine.data,
            expert_parallel=engine.expert_parallel,
            stop=given.stop,
            stop_token_ids=given.stop_token_ids,
            max_response_length=given.max_response_length,
            max_sequences=engine.max_sequences,
            cache_gib=engine.cache_gib,
            block_tokens=engine.block_tokens,
        ),
        reward=RewardConfig({given.grader: 1.0}, given.grader_timeout_seconds, given.grader_workers),
        hang=given.hang,
        run=replace(RunConfig(), seed=given.seed, control_timeout_seconds=given.control_timeout_seconds),
    )


def of_chat(given: ChatConfig, directory: str, dtype: Literal["float32", "bfloat16"], world_size: int) -> Config:
    """The part of a run's configuration that a conversation has: one engine on all ranks."""
    return Config(
        ModelConfig(directory, dtype, trust_remote_code=given.trust_remote_code),
        # The engine holds a prompt and its response together; how they share it is decided turn by turn.
        DataConfig(max_prompt_length=given.context - 1),
        rollout=RolloutConfig(
            tensor=world_size,
            expert_parallel=given.expert_parallel,
            max_response_length=1,
            max_sequences=1,
            cache_gib=given.cache_gib,
            block_tokens=given.block_tokens,
        ),
        run=replace(RunConfig(), seed=given.seed),
    )
