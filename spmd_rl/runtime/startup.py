"""Read what every rank needs before the ranks meet: configuration, weights' headers, prompts, graders, reward models.

All that a user can have got wrong in them is found here, as ValueError; nothing here needs another rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.check_reward_models import read_reward_shape, reward_model_knob
from spmd_rl.config.config import GAE, Config
from spmd_rl.config.fault_spec import check_parameters
from spmd_rl.config.loading import load_config, load_dataset_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.model_directory import with_local_models
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.response_text import described, end_tokens, templates_of
from spmd_rl.data.reward_model_reading import Reader, make_reader
from spmd_rl.data.sources.order import PromptOrder
from spmd_rl.data.sources.prompts import Prompt, load_dataset, load_prompts
from spmd_rl.data.tokens import decode, load_tokenizer, same_tokens
from spmd_rl.distributed.status import doing
from spmd_rl.errors import ConfigError, Problem, refuse
from spmd_rl.evaluation.benchmark import Benchmark
from spmd_rl.models.model_shape import ModelShape, read_model_shape
from spmd_rl.rewards.grading.null_pool import NullPool
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.reward_sample import of_answer
from spmd_rl.runtime.preflight import preflight

_REFERENCE = "model.reference_path"


@dataclass(frozen=True)
class Inputs:
    """Hold what a rank has read; every rank reads all prompts, only their row numbers travel."""

    tokenizer: Any
    prompts: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """By split."""
    notes: Sequence[str] = ()
    order: PromptOrder | None = None
    """Of the prompts to train on."""
    benchmarks: Sequence[Benchmark] = ()
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Each reward model's reading of samples."""
    images: ImageReader | None = None
    """Reads pictures; None: the model sees none."""


def configure(arguments: list[str], critic: bool | None = None) -> tuple[Config, ModelShape]:
    """Return a run's settings and its model's shape; torch stays out. `critic`: see program.main.

    Raises ValueError that lists all that can be wrong before any rank has met another.
    """
    problems: list[Problem] = []
    config = load_config(arguments, problems)
    problems += _other_program(config) if critic not in (None, config.algorithm.uses_critic) else []
    shape, problems = preflight(config, problems)
    refuse(problems)
    assert shape is not None
    return with_machine_sizes(with_local_models(config)), shape


def _other_program(config: Config) -> list[Problem]:
    """Return the problem that another program is for what was asked."""
    if config.algorithm.uses_critic:
        met, way = "this program has no critic", "start spmd_rl.ppo, or take another such as grpo"
    else:
        met, way = "this program learns from a critic's values", f"set it to {GAE}, or start {config.program}"
    return [Problem("algorithm.advantage", config.algorithm.advantage, met, way)]


def check_weights(config: Config, shape: ModelShape) -> None:
    """Read the headers of all weight files: a missing, truncated or foreign one is found before anything is made."""
    from spmd_rl.weights.files.hf_reader import check_headers, read_headers

    check_parameters(config, read_headers(config.model.path) if config.inject else ())
    check_headers(config.model.path, read_headers(config.model.path), shape)
    if reference := config.model.reference_path:
        check_headers(reference, read_headers(reference, _REFERENCE), shape, _REFERENCE)
    if config.critic.path and config.algorithm.uses_critic:
        critic = read_critic(config)
        check_headers(critic.path, read_headers(critic.path, critic.knob), critic.stored, critic.knob)
    for name, model in config.reward.models.items():
        knob = reward_model_knob(name)
        check_headers(model.path, read_headers(model.path, knob), read_reward_shape(name, model), knob)


def read_inputs(config: Config) -> Inputs:
    """Return what a run trains on and is measured with; a tokenizer or template that can't be used is found out now."""
    with doing("reads the prompts"):
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        vision = read_model_shape(config.model.path).vision
        images = None if vision is None else ImageReader(config.model.path, vision, config.data)
        loaded = {split: load_prompts(config, tokenizer, split, images) for split in ("train", "eval")}
        names: dict[str, str] = {}
        if loaded["eval"].prompts:
            names["eval"] = load_dataset_config(config.data.eval_source or config.data.source).name or "eval"
        for text in config.evaluation.benchmarks:
            dataset = load_dataset_config(text)
            split = names_split(dataset.name or text, names)
            limit = config.evaluation.limit
            loaded[split] = load_dataset(dataset, config.data, tokenizer, config.run.seed, "eval", limit, images)
        prompts = {split: list(part.prompts) for split, part in loaded.items()}
        sizes, weights = zip(*loaded["train"].shares, strict=True)
        return Inputs(
            tokenizer,
            prompts,
            [
                *(note for part in loaded.values() for note in part.notes),
                *trained_on(prompts, names),
                *_critic_notes(config, tokenizer),
            ],
            PromptOrder(sizes, config.run.seed, config.data.shuffle, weights),
            [Benchmark(name, split, len(prompts[split])) for split, name in names.items()],
            _read_reward_models(config, tokenizer, prompts["train"]),
            images,
        )


def trained_on(prompts: Mapping[str, Sequence[Prompt]], names: Mapping[str, str]) -> list[str]:
    """Say of each benchmark how many of its prompts are trained on; `names`: of the splits that are benchmarks."""
    trained = {(prompt.token_ids, prompt.pictures_digest) for prompt in prompts["train"]}
    return [
        f"benchmark {name}: {count} of its {len(prompts[split])} prompts are among those that are trained on"
        for split, name in names.items()
        if (count := sum((prompt.token_ids, prompt.pictures_digest) in trained for prompt in prompts[split]))
    ]


def _read_reward_models(config: Config, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, Reader]:
    readers = {}
    for name, model in config.reward.models.items():
        own = load_tokenizer(model.path, config.model.trust_remote_code, reward_model_knob(name))
        vocabulary = read_reward_shape(name, model).vocabulary
        readers[name] = make_reader(f"reward.models.{name}", model.reads, own, tokenizer, vocabulary, prompts)
    return readers


def _critic_notes(config: Config, tokenizer: Any) -> list[str]:
    """Say what the critic begins as. Raises ConfigError where it reads other tokens than the policy writes."""
    if not config.algorithm.uses_critic:
        return []
    path = config.critic.path
    if path and not same_tokens(load_tokenizer(path, config.model.trust_remote_code, "critic.path"), tokenizer):
        met = "its tokenizer is another one than the policy's, whose token ids the critic reads"
        raise ConfigError(Problem("critic.path", path, met, "take a model of the same tokenizer, or leave it out"))
    return [read_critic(config).described()]


def describe_ends(config: Config, inputs: Inputs) -> str:
    """Say which tokens end a response."""
    templates = templates_of(inputs.prompts, config.data.template)
    ends = end_tokens(inputs.tokenizer, config.model.path, *templates)
    return described(inputs.tokenizer, ends, (*config.rollout.stop, *config.rollout.stop_token_ids))


def refuse_unknown_tokens(inputs: Inputs, rows: int, knob: str = "model.path") -> None:
    """Raise ValueError for a prompt with a token id beyond the model's `rows` of embeddings; `knob` names the model."""
    for prompt in (prompt for split in inputs.prompts.values() for prompt in split):
        token = max(prompt.token_ids, default=0)
        if token >= rows:
            word = inputs.tokenizer.convert_ids_to_tokens(token)
            raise ValueError(
                f"{knob}: row {prompt.index} of {prompt.source} has the token {word} (id {token}), and the model "
                f"has embeddings for {rows}, ids 0 to {rows - 1}; the tokenizer has {len(inputs.tokenizer)} tokens: "
                "resize the model's embeddings to it, or take the token out of the tokenizer"
            )


def names_split(name: str, names: dict[str, str]) -> str:
    """Give a benchmark a split of its own, and a name that no other of `names` has: a number is added where one has."""
    taken = set(names.values())
    free = next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(names) + 3))) if n not in taken)
    split = f"benchmark {len(names)}"
    names[split] = free.replace("/", "_")
    return split


def start_graders(config: Config, prompt: Prompt, tokenizer: Any) -> GraderPool | NullPool:
    """Start the grader processes and try the rules on a prompt's own answer; one that fails ends the run."""
    reward = config.reward
    if not reward.rules:  # reward models alone decide
        return NullPool()
    with doing("starts the reward workers"):
        limits = (reward.timeout_seconds, reward.memory_mib, reward.batch, reward.first_call_seconds)
        pool = GraderPool(reward.rules, reward.workers, *limits)
        rendered = decode(tokenizer, prompt.token_ids, special=True)
        try:
            pool.try_rules(of_answer(prompt, rendered, prompt.answer, limit=config.rollout.max_response_length))
        except ValueError:
            pool.close()
            raise
    return pool
