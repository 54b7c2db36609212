"""Hold what can be set of the programs that only generate: evaluate and chat. They hold an engine and no trainer."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmd_rl.config.config import Config, HangConfig, ModelConfig, PlatformName, RunConfig
from spmd_rl.config.data_config import DataConfig
from spmd_rl.config.fields import Bounds, NonNegativeInt, PositiveFloat, PositiveInt
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.reward_config import RewardConfig
from spmd_rl.config.rollout_config import EngineConfig, EnginesConfig, RolloutConfig, SamplingConfig, TopP

Dtype = Literal["float32", "bfloat16"]
_COUNTED = "binomial coefficients of more do not fit a float, in which majority@k is computed"


@dataclass(frozen=True)
class ServeConfig:
    """Settings that both programs have."""

    model: str
    """A Hugging Face directory or hub name, a run (runs/mine) or one of its checkpoints, or a Megatron checkpoint that
    tools/convert_checkpoint.py wrote."""
    system: str | None = None
    """System message before every question or conversation. None: what the dataset's file or the template says."""
    template: str | None = None
    """Template of messages: "chat" (the tokenizer's own chat template), a name in configs/templates/, or a .jinja
    file. None: what the dataset's file says, else "chat"."""
    enable_thinking: bool | None = None
    """Passed to a template that knows it (Qwen3). None: what the template does by itself."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights. auto: as the model's config.json says."""
    seed: NonNegativeInt = 1
    """The same seed gives the same samples, whatever the number of ranks."""
    platform: PlatformName = "auto"
    """Kind of machine. auto: the accelerator that is there, else the CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer."""


@dataclass(frozen=True)
class EvaluateConfig(SamplingConfig, ServeConfig):
    """One evaluation."""

    benchmark: tuple[str, ...] = ()
    """Benchmarks: files of configs/datasets/, or sources with all defaults. Several are evaluated one by one."""
    limit: PositiveInt | None = None
    """At most so many questions of each benchmark, the first ones. None: all."""
    samples: Annotated[int, Bounds(ge=1, le=1024, note=_COUNTED)] = 1
    """Of each question; more than 1 needs a temperature. Without torchrun, which takes it for its own, --n is the same.
    """
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end tokens."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, besides the model's own."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of what the grader and stop strings see, also tags such as <think>; else only those
    that begin, end or pad a text."""
    shots: NonNegativeInt = 0
    """Worked examples before each question, as turns of its conversation, with the whole text of the answer's column
    (few-shot). For base models together with the template question_answer and --stop Question:"""
    shots_source: str | None = None
    """Dataset whose first rows are the worked examples, named as benchmark is. None: the benchmark's split for
    training."""
    max_prompt_length: PositiveInt = 1024
    """Tokens, template included."""
    overlong_prompts: Literal["drop", "refuse"] = "refuse"
    """Leave longer prompts out and say how many, or stop and name them."""
    image_min_pixels: PositiveInt | None = None
    """A picture with fewer pixels is enlarged to so many. None: what the model's preprocessor_config.json says."""
    image_max_pixels: PositiveInt | None = None
    """A picture with more pixels is made smaller. None: what the model's preprocessor_config.json says."""
    images_per_prompt: PositiveInt = 1
    """Pictures of a question, at most."""
    max_response_length: PositiveInt = 512
    """Tokens; a longer response is cut and counts as truncated."""
    grader: str = "math_answer"
    """The reward rule that decides what is correct: a name that comes with spmd_rl, file.py:function or
    package.module:function."""
    grader_workers: PositiveInt = 1
    """Grading processes per rank."""
    grader_timeout_seconds: PositiveFloat = 10.0
    """A rule that takes longer for one sample is stopped; the sample is not correct, its cause is "timeout"."""
    output: str | None = None
    """Directory for everything. None: evaluations/<model>-<benchmark>, with a number where that exists."""
    baseline: str | None = None
    """Baseline, compared question by question: the output directory of an earlier evaluation, or a second model of
    the same architecture and size, which is evaluated too."""
    control_timeout_seconds: PositiveFloat = 600.0
    """Limit of rank 0's wait for the others to begin or end a verb, after which it names who is missing."""
    rollout: EnginesConfig = field(default_factory=EnginesConfig)
    hang: HangConfig = field(default_factory=HangConfig)


@dataclass(frozen=True)
class ChatConfig(SamplingConfig, EngineConfig, ServeConfig):
    """One conversation."""

    prefix = ""

    temperature: Annotated[float, Bounds(ge=0, note="0: greedy")] = 0.7
    """0: greedy, the likeliest token each time."""
    top_p: TopP = 0.95
    """Sample from the smallest set of tokens with this probability together. 1: from all."""
    max_tokens: PositiveInt = 1024
    """Of one answer; a longer one is cut."""
    context: Annotated[int, Bounds(ge=2)] = 4096
    """Tokens of the whole conversation; at most the model's positions."""
    images_per_conversation: PositiveInt = 8
    """Pictures that /image shows in one conversation, at most."""


class _TopLevelModel(ModelConfig):
    """Call the setting that names the model as evaluate and chat do."""

    knob = "model"


class _TopLevelData(DataConfig):
    """Call the settings of prompts as evaluate does."""

    prefix = ""


def of_evaluation(given: EvaluateConfig, directory: str, dtype: Dtype) -> Config:
    """Return the part of a run's configuration that an evaluation has; `directory`: with the model's config.json."""
    config = Config(
        _TopLevelModel(directory, dtype, trust_remote_code=given.trust_remote_code),
        _TopLevelData(
            system=given.system,
            template=given.template,
            enable_thinking=given.enable_thinking,
            max_prompt_length=given.max_prompt_length,
            overlong_prompts=given.overlong_prompts,
            image_min_pixels=given.image_min_pixels,
            image_max_pixels=given.image_max_pixels,
            images_per_prompt=given.images_per_prompt,
        ),
        rollout=RolloutConfig(
            **vars(given.rollout),
            stop=given.stop,
            stop_token_ids=given.stop_token_ids,
            skip_special_tokens=given.skip_special_tokens,
            max_response_length=given.max_response_length,
        ),
        reward=RewardConfig({given.grader: 1.0}, given.grader_timeout_seconds, given.grader_workers),
        hang=given.hang,
        run=RunConfig(seed=given.seed, platform=given.platform, control_timeout_seconds=given.control_timeout_seconds),
    )
    return with_machine_sizes(config)


def of_chat(given: ChatConfig, directory: str, dtype: Dtype, world_size: int) -> Config:
    """Return the part of a run's configuration that a conversation has: one engine on all ranks."""
    config = Config(
        _TopLevelModel(directory, dtype, trust_remote_code=given.trust_remote_code),
        # The engine holds a prompt and its response together; how they share it is decided turn by turn.
        DataConfig(
            max_prompt_length=given.context - 1,
            template=given.template,
            images_per_prompt=given.images_per_conversation,
        ),
        rollout=RolloutConfig(
            tensor=world_size,
            expert_parallel=given.expert_parallel,
            max_response_length=1,
            max_sequences=1,
            cache_gib=given.cache_gib,
            memory_fraction=given.memory_fraction,
            eager=given.eager,
            prefix_caching=given.prefix_caching,
            max_batched_tokens=given.max_batched_tokens,
            block_tokens=given.block_tokens,
        ),
        run=RunConfig(seed=given.seed, platform=given.platform),
    )
    return with_machine_sizes(config)
