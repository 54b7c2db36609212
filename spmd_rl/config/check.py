"""Say what cannot work before anything starts."""

import importlib.util
import math
from pathlib import Path

from spmd_rl.config.check_algorithm import algorithm_notes, algorithm_problems
from spmd_rl.config.check_checkpoint import checkpoint_notes, checkpoint_problems
from spmd_rl.config.check_critic import ppo_notes, ppo_problems
from spmd_rl.config.check_data import data_problems
from spmd_rl.config.check_hang import hang_problems, profile_problems
from spmd_rl.config.check_model import model_problems
from spmd_rl.config.check_reward_models import reward_model_problems
from spmd_rl.config.config import Config, RunConfig
from spmd_rl.config.fault_spec import fault_problems
from spmd_rl.config.fields import knobs, range_problems
from spmd_rl.config.loading import settings
from spmd_rl.config.wording import divisors
from spmd_rl.errors import Problem
from spmd_rl.models.model_shape import ModelShape


def check(config: Config, world_size: int, model: ModelShape | None) -> list[Problem]:
    """Return all problems at once; none: the run can start. model None: what needs its shape is not checked."""
    problems = range_problems(config)
    parallel, rollout = config.parallel, config.rollout
    sizes = (
        *(parallel.tensor, parallel.context, parallel.pipeline, parallel.virtual),
        *(parallel.expert, parallel.expert_tensor),
        *(rollout.tensor, rollout.data, config.train.minibatches),
    )
    if min(sizes) >= 1:
        problems += _layout(config, world_size) + _batches(config, world_size)
        problems += model_problems(config, model) if model is not None else []
        problems += ppo_problems(config, model)
    problems += checkpoint_problems(config, [*knobs(Config), *settings(config)]) + hang_problems(config.hang)
    problems += profile_problems(config.run, world_size)
    problems += algorithm_problems(config)
    problems += data_problems(config) + _rewards(config) + reward_model_problems(config) + _files(config)
    return problems + fault_problems(config, world_size)


def notes(config: Config, world_size: int) -> list[str]:
    """Return what works and is worth knowing: where a device would idle, or training meets another distribution."""
    said: list[str] = []
    parallel, rollout, train = config.parallel, config.rollout, config.train
    samples = train.prompts_per_step // train.minibatches * config.algorithm.samples_per_prompt
    share = samples // max(1, parallel.data(world_size))
    if parallel.pipeline > 1 and share < 4 * parallel.pipeline:
        said.append(
            f"parallel.pipeline = {parallel.pipeline}: a mini-batch gives each data-parallel rank about {share} "
            "samples; with so few micro-batches the stages wait for each other much of the time; prefer parallel.tensor"
        )
    replicas = world_size // rollout.tensor
    if train.prompts_per_step % replicas:
        said.append(
            f"train.prompts_per_step = {train.prompts_per_step}: not a multiple of the {replicas} inference engines, "
            "so some get one prompt more than others"
        )
    weighs = "algorithm.correction weighs"
    if config.algorithm.old_logprobs == "rollout":
        weighs = "the ratio, which is against vLLM's (algorithm.old_logprobs = rollout), begins below 1 and weighs"
    for knob, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(rollout, knob) != off:
            said.append(
                f"rollout.{knob} = {getattr(rollout, knob)}: samples are drawn from a part of the distribution; "
                f"training computes log-probabilities over all of it, and {weighs} the tokens less"
            )
    return said + algorithm_notes(config.algorithm) + ppo_notes(config) + checkpoint_notes(config)


def _layout(config: Config, world_size: int) -> list[Problem]:
    problems: list[Problem] = []
    parallel, rollout = config.parallel, config.rollout
    met = f"does not divide the {world_size} ranks"
    ways = f"{divisors(world_size)}, or start other ranks"
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
    if parallel.context == 1:
        del sizes["context"]
    if world_size % math.prod(sizes.values()):
        knob = " x ".join(f"parallel.{name}" for name in sizes)
        value = " x ".join(map(str, sizes.values()))
        problems.append(Problem(knob, value, met, f"their product can be {ways}"))
    elif (world_size // parallel.pipeline) % (parallel.expert * parallel.expert_tensor):
        stage = world_size // parallel.pipeline
        problems.append(
            Problem(
                "parallel.expert x parallel.expert_tensor",
                f"{parallel.expert} x {parallel.expert_tensor}",
                f"does not divide the {stage} ranks of a pipeline stage",
                f"their product can be {divisors(stage)}",
            )
        )
    if world_size % (rollout.tensor * rollout.data):
        knob, value = "rollout.tensor", str(rollout.tensor)
        if rollout.data > 1:
            knob, value = "rollout.tensor x rollout.data", f"{rollout.tensor} x {rollout.data}"
        problems.append(Problem(knob, value, met, f"it can be {ways}"))
    if parallel.virtual > 1 and parallel.pipeline == 1:
        met = "there is one pipeline stage, so nothing waits"
        problems.append(Problem("parallel.virtual", parallel.virtual, met, "set it to 1, or raise parallel.pipeline"))
    return problems


def _batches(config: Config, world_size: int) -> list[Problem]:
    problems: list[Problem] = []
    train, rollout, samples = config.train, config.rollout, config.algorithm.samples_per_prompt
    prompts = train.prompts_per_step
    longest = config.longest_sample
    share, data_parallel = prompts // train.minibatches * samples, config.parallel.data(world_size)

    def problem(knob: str, value: object, met: str, way: str) -> None:
        problems.append(Problem(knob, value, met, way))

    if prompts % train.minibatches:
        met = f"does not divide train.prompts_per_step = {prompts}"
        problem("train.minibatches", train.minibatches, met, f"it can be {divisors(prompts)}")
    elif share < data_parallel:
        met = f"a mini-batch has {share} samples for {data_parallel} data-parallel ranks, so some would have none"
        problem("train.prompts_per_step", prompts, met, "raise it, or lower train.minibatches")
    replicas = world_size // rollout.tensor
    if prompts < replicas:
        met = f"there are {replicas} inference engines, so some would have nothing to do"
        problem("train.prompts_per_step", prompts, met, "raise it, or raise rollout.tensor")
    if train.tokens_per_microbatch is not None and train.tokens_per_microbatch < longest:
        lengths = "(data.max_prompt_length + rollout.max_response_length)"
        met = f"the longest sample has {longest} tokens {lengths} and must fit"
        way = "raise it, leave it out, or lower one of those"
        problem("train.tokens_per_microbatch", train.tokens_per_microbatch, met, way)
    if train.min_learning_rate > train.learning_rate:
        met = f"above train.learning_rate = {train.learning_rate}"
        problem("train.min_learning_rate", train.min_learning_rate, met, "lower it")
    forward, budget = train.tokens_per_forward_microbatch, train.tokens_per_microbatch
    if forward is not None and budget is not None and forward < budget:
        met = f"below train.tokens_per_microbatch = {budget}"
        problem("train.tokens_per_forward_microbatch", forward, met, "raise it, or leave it out")
    if train.recompute_layers and train.recomputes != "full":
        met = f"train.recompute = {train.recompute} has no layers to count"
        problem("train.recompute_layers", train.recompute_layers, met, "set train.recompute to full, or leave it out")
    if train.warmup_steps and train.warmup_fraction:
        met = f"train.warmup_fraction = {train.warmup_fraction:g} says it too"
        problem("train.warmup_steps", train.warmup_steps, met, "leave one of them out")
    if train.warmup_steps > train.steps:
        met = f"the run ends after train.steps = {train.steps}, before the warm-up does"
        problem("train.warmup_steps", train.warmup_steps, met, "lower it")
    return problems


def _rewards(config: Config) -> list[Problem]:
    weights = config.reward.rules
    if any(weights.values()) or any(model.weight for model in config.reward.models.values()):
        return []
    way = "name a rule with a weight, such as math_answer 1.0"
    return [Problem("reward.rules", weights, "every reward would be 0", way)]


def _log_packages(run: RunConfig) -> tuple[tuple[str, bool], ...]:
    return ("wandb", run.wandb != "off"), ("swanlab", run.swanlab != "off"), ("tensorboard", run.tensorboard)


def _files(config: Config) -> list[Problem]:
    problems: list[Problem] = []
    for knob, path in (("model.path", config.model.path), ("model.reference_path", config.model.reference_path)):
        if path is not None and not Path(path).is_dir():
            way = "name a Hugging Face model directory"
            problems.append(Problem(knob, path, "there is no such directory", way))
    run = config.run
    if run.dir is None and (not run.name or "/" in run.name):
        problems.append(Problem("run.name", repr(run.name), "it names the directory runs/<name>", "take a plain name"))
    directory = Path(run.dir or f"runs/{run.name}")
    file = next((path for path in (directory, *directory.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        problems.append(Problem("run.dir", directory, f"{file} is a file", "name another directory"))
    for package, wanted in _log_packages(run):
        # A mere folder of that name, which wandb itself leaves behind, is found too but has no origin.
        found = importlib.util.find_spec(package) if wanted else None
        if wanted and (found is None or found.origin is None):
            met = f"the package {package} is not installed"
            problems.append(Problem(f"run.{package}", getattr(run, package), met, "install it, or turn this off"))
    return problems
