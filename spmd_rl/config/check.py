"""What cannot work, said before anything starts: each as knob = value: what it met; the way out."""

import dataclasses
import difflib
import importlib.util
import math
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_rl.config.check_checkpoint import checkpoint_notes, checkpoint_problems
from spmd_rl.config.check_model import model_problems
from spmd_rl.config.check_reward_models import reward_model_problems
from spmd_rl.config.config import Config, DataConfig, EvaluationConfig, HangConfig
from spmd_rl.config.fault_spec import fault_problems
from spmd_rl.config.loading import load_dataset_config, settings
from spmd_rl.config.names import Phase, Verb
from spmd_rl.config.source_names import ARITHMETIC, FORMATS, REASONING_GYM, is_hub_name, is_made
from spmd_rl.config.template_names import CHAT, PLAIN, template_file
from spmd_rl.config.wording import divisors
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import ModelShape

LEAST_SILENT_SECONDS = 3.0


def check(config: Config, world_size: int, model: ModelShape | None) -> list[str]:
    """All problems at once; none means that the run can start. model None: what needs its shape is not checked."""
    problems = _ranges(config)
    parallel, rollout = config.parallel, config.rollout
    sizes = (
        *(parallel.tensor, parallel.context, parallel.pipeline, parallel.virtual),
        *(parallel.expert, parallel.expert_tensor),
        *(rollout.tensor, rollout.data, config.train.minibatches),
    )
    if min(sizes) >= 1:
        problems += _layout(config, world_size) + _batches(config, world_size)
        problems += model_problems(config, model) if model is not None else []
    problems += checkpoint_problems(
        config, list(dict.fromkeys((*_settings(config), *settings(config))))
    ) + hang_problems(config.hang)
    problems += _refresh(config) + _data(config) + reward_model_problems(config) + _files(config)
    return problems + fault_problems(config, world_size)


def notes(config: Config, world_size: int) -> list[str]:
    """What works and is worth knowing: where a device would idle, or training meets another distribution."""
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
    for knob, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(rollout, knob) != off:
            said.append(
                f"rollout.{knob} = {getattr(rollout, knob)}: samples are drawn from a part of the distribution; "
                "training computes log-probabilities over all of it"
            )
    return said + checkpoint_notes(config)


# ---- each setting by itself

# What the values must be, in words; the test; the knobs it holds for.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "1 or more",
        lambda value: value >= 1,
        "parallel.tensor parallel.context parallel.pipeline parallel.virtual parallel.expert parallel.expert_tensor "
        "rollout.tensor rollout.data rollout.max_response_length rollout.max_sequences "
        "rollout.block_tokens reward.workers reward.batch train.steps train.prompts_per_step train.minibatches "
        "train.max_skipped "
        "train.tokens_per_microbatch train.logprob_chunk_tokens data.max_prompt_length data.arithmetic.problems "
        "evaluation.samples checkpoint.keep_last",
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        "rollout.top_k data.eval_problems data.arithmetic.min_operand algorithm.kl_coefficient algorithm.std_epsilon "
        "train.warmup_steps train.learning_rate train.min_learning_rate train.weight_decay train.clip_grad "
        "rollout.canary_steps reward.memory_mib evaluation.every_steps evaluation.temperature evaluation.top_k "
        "run.seed checkpoint.every_steps checkpoint.keep_every",
    ),
    ("-1 (all) or more", lambda value: value >= -1, "run.samples_logged"),
    (
        "above 0",
        lambda value: value > 0,
        "rollout.cache_gib algorithm.clip_high train.adam_epsilon reward.timeout_seconds run.control_timeout_seconds "
        "run.collective_timeout_seconds",
    ),
    (
        "above 0: training uses the log-probabilities of the distribution at this temperature",
        lambda value: value > 0,
        "rollout.temperature",
    ),
    ("above 0 and at most 1 (1: all tokens)", lambda value: 0 < value <= 1, "rollout.top_p evaluation.top_p"),
    ("at least 0 (0: all tokens) and below 1", lambda value: 0 <= value < 1, "rollout.min_p"),
    ("above 0 and at most 1", lambda value: 0 < value <= 1, "algorithm.clip_low"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "train.adam_beta1 train.adam_beta2"),
)


def _ranges(config: Config) -> list[str]:
    settings = _settings(config)
    problems = [
        f"{knob} = {value}: not a finite number; give one"
        for knob, value in settings.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    for words, fits, knobs in _RANGES:
        problems += [
            f"{knob} = {settings[knob]}: out of range; it must be {words}"
            for knob in knobs.split()
            if math.isfinite(settings[knob]) and not fits(settings[knob])
        ]
    return problems


def hang_problems(hang: HangConfig) -> list[str]:
    """What is wrong with the deadlines that a run is watched with."""
    seconds = {name: getattr(hang, name) for name in ("minimum_seconds", "factor", "first_seconds", "silent_seconds")}
    seconds |= {f"deadline_seconds {name}": value for name, value in hang.deadline_seconds.items()}
    problems = [
        f"hang.{knob} = {value}: out of range; it must be above 0" for knob, value in seconds.items() if not value > 0
    ]
    places = (*Phase, *Verb)
    for name in hang.deadline_seconds:
        if name not in places:
            near = difflib.get_close_matches(name, places, 1)
            meant = f"did you mean {near[0]}?" if near else f"a phase is one of {', '.join(Phase)}"
            problems.append(f"hang.deadline_seconds {name}: there is no such phase or verb; {meant}")
    if hang.silent_seconds < LEAST_SILENT_SECONDS:
        problems.append(
            f"hang.silent_seconds = {hang.silent_seconds}: a sign of life comes once a second, and later on a machine "
            f"that is full; set it to {LEAST_SILENT_SECONDS:g} or more"
        )
    return problems


def _settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every setting -> its value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), prefix + field.name
        found |= _settings(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


# ---- settings with each other, the ranks and the model


def _layout(config: Config, world_size: int) -> list[str]:
    problems: list[str] = []
    parallel, rollout = config.parallel, config.rollout
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
    if parallel.context == 1:
        del sizes["context"]
    if world_size % math.prod(sizes.values()):
        problems.append(
            f"{' x '.join(f'parallel.{name}' for name in sizes)} = {' x '.join(map(str, sizes.values()))}: does not "
            f"divide the {world_size} ranks; their product can be {divisors(world_size)}, or start other ranks"
        )
    elif (world_size // parallel.pipeline) % (parallel.expert * parallel.expert_tensor):
        stage = world_size // parallel.pipeline
        problems.append(
            f"parallel.expert x parallel.expert_tensor = {parallel.expert} x {parallel.expert_tensor}: does not divide "
            f"the {stage} ranks of a pipeline stage; their product can be {divisors(stage)}"
        )
    if world_size % (rollout.tensor * rollout.data):
        knob = f"rollout.tensor = {rollout.tensor}"
        if rollout.data > 1:
            knob = f"rollout.tensor x rollout.data = {rollout.tensor} x {rollout.data}"
        problems.append(
            f"{knob}: does not divide the {world_size} ranks; it can be {divisors(world_size)}, or start other ranks"
        )
    if parallel.virtual > 1 and parallel.pipeline == 1:
        problems.append(
            f"parallel.virtual = {parallel.virtual}: there is one pipeline stage, so nothing waits; set it to 1, or "
            "raise parallel.pipeline"
        )
    return problems


def _refresh(config: Config) -> list[str]:
    rollout, problems = config.rollout, []
    if rollout.refresh_bucket_mib is not None and not rollout.refresh_bucket_mib >= 1:
        problems.append(
            f"rollout.refresh_bucket_mib = {rollout.refresh_bucket_mib}: a bucket has 1 MiB or more; leave it out for "
            "what suits the machine"
        )
    if rollout.canary_tolerance is not None and not rollout.canary_tolerance > 0:
        problems.append(
            f"rollout.canary_tolerance = {rollout.canary_tolerance}: it must be above 0; to have no canary, set "
            "rollout.canary_steps to 0"
        )
    return problems


def _batches(config: Config, world_size: int) -> list[str]:
    problems: list[str] = []
    train, rollout, samples = config.train, config.rollout, config.algorithm.samples_per_prompt
    longest = config.data.max_prompt_length + rollout.max_response_length
    data_parallel = config.parallel.data(world_size)
    if samples < 2:
        problems.append(
            f"algorithm.samples_per_prompt = {samples}: the advantage compares samples of one prompt; take 2 or more"
        )
    if train.prompts_per_step % train.minibatches:
        problems.append(
            f"train.minibatches = {train.minibatches}: does not divide train.prompts_per_step = "
            f"{train.prompts_per_step}; it can be {divisors(train.prompts_per_step)}"
        )
    elif train.prompts_per_step // train.minibatches * samples < data_parallel:
        problems.append(
            f"train.prompts_per_step = {train.prompts_per_step}: a mini-batch has "
            f"{train.prompts_per_step // train.minibatches * samples} samples for {data_parallel} data-parallel ranks, "
            "so some would have none; raise it, or lower train.minibatches"
        )
    replicas = world_size // rollout.tensor
    if train.prompts_per_step < replicas:
        problems.append(
            f"train.prompts_per_step = {train.prompts_per_step}: there are {replicas} inference engines, so some would "
            "have nothing to do; raise it, or raise rollout.tensor"
        )
    if train.tokens_per_microbatch < longest:
        problems.append(
            f"train.tokens_per_microbatch = {train.tokens_per_microbatch}: the longest sample has {longest} tokens "
            "(data.max_prompt_length + rollout.max_response_length) and must fit; raise it, or lower one of those"
        )
    if train.min_learning_rate > train.learning_rate:
        problems.append(
            f"train.min_learning_rate = {train.min_learning_rate}: above train.learning_rate = {train.learning_rate}; "
            "lower it"
        )
    if train.warmup_steps > train.steps:
        problems.append(
            f"train.warmup_steps = {train.warmup_steps}: the run ends after train.steps = {train.steps}, before the "
            "warm-up does; lower it"
        )
    return problems


# ---- data, rewards, files


def _data(config: Config) -> list[str]:
    problems: list[str] = []
    data, arithmetic, evaluation = config.data, config.data.arithmetic, config.evaluation
    if ARITHMETIC in (*(data.mix or (data.source,)), data.eval_source):
        if not arithmetic.operations:
            problems.append("data.arithmetic.operations is empty: there is nothing to ask; name some of +, -, *")
        if arithmetic.max_operand < arithmetic.min_operand:
            problems.append(
                f"data.arithmetic.max_operand = {arithmetic.max_operand}: below data.arithmetic.min_operand = "
                f"{arithmetic.min_operand}; raise it"
            )
        places = _places(arithmetic.wording)
        if places is None or not {"a", "op", "b"} <= places <= {"a", "op", "b"}:
            problems.append(
                f"data.arithmetic.wording = {arithmetic.wording!r}: its places must be {{a}}, {{op}} and {{b}}; "
                "write a brace that is meant as text twice"
            )
    problems += _evaluation(evaluation)
    held_out = data.eval_source is not None or evaluation.benchmarks or not (data.mix or not is_made(data.source))
    if evaluation.every_steps and not held_out:
        problems.append(
            f"evaluation.every_steps = {evaluation.every_steps}: there are no held-out problems; name a file with "
            "data.eval_source or evaluation.benchmarks, or set it to 0"
        )
    problems += _templates(data)
    if data.system is not None and data.template == PLAIN:
        problems.append(
            f"data.system = {data.system!r}: data.template = plain has no place for it; set the template to chat"
        )
    weights = config.reward.rules
    problems += [
        f"reward.rules: the weight of {rule} is {weight}, not a finite number; give one"
        for rule, weight in weights.items()
        if not math.isfinite(weight)
    ]
    if not any(weights.values()) and not any(model.weight for model in config.reward.models.values()):
        problems.append(
            f"reward.rules = {weights}: every reward would be 0; name a rule with a weight, such as math_answer 1.0"
        )
    return problems


def _evaluation(evaluation: EvaluationConfig) -> list[str]:
    problems: list[str] = []
    if evaluation.samples > 1 and evaluation.temperature == 0:
        problems.append(
            f"evaluation.samples = {evaluation.samples}: greedily (evaluation.temperature = 0) all samples of a "
            "problem are the same; set a temperature such as 0.6, or 1 sample"
        )
    problems += [
        f"evaluation.{knob} = {value}: out of range; it must be 1 or more"
        for knob, value in (("limit", evaluation.limit), ("max_response_length", evaluation.max_response_length))
        if value is not None and value < 1
    ]
    return problems


def _templates(data: DataConfig) -> list[str]:
    problems: list[str] = []
    if data.template not in (None, CHAT, PLAIN):
        try:
            template_file(data.template)
        except ValueError as error:
            problems.append(str(error))
    if data.enable_thinking is not None and data.template == PLAIN:
        problems.append(
            f"data.enable_thinking = {data.enable_thinking}: data.template = plain has no place for it; leave it out, "
            "or set the template to one that knows it, such as qwen3"
        )
    if data.answer_pattern is not None:
        try:
            groups = re.compile(data.answer_pattern).groups
        except re.error as error:
            problems.append(f"data.answer_pattern = {data.answer_pattern}: not a regular expression: {error}; fix it")
        else:
            if not groups:
                problems.append(
                    f"data.answer_pattern = {data.answer_pattern}: it has no group; put ( ) around what is the answer"
                )
    return problems


def _sources(config: Config) -> list[str]:
    data = config.data
    problems: list[str] = []
    if data.mix and data.source != ARITHMETIC:
        problems.append(f"data.source = {data.source}: data.mix names the sources already; leave one of them out")
    problems += [
        f"data.mix: the weight of {source} is {weight}; it must be above 0"
        for source, weight in data.mix.items()
        if not (math.isfinite(weight) and weight > 0)
    ]
    named = [("data.mix", source) for source in data.mix] or [("data.source", data.source)]
    named += [] if data.eval_source is None else [("data.eval_source", data.eval_source)]
    named += [("evaluation.benchmarks", source) for source in config.evaluation.benchmarks]
    for knob, text in named:
        try:
            dataset = load_dataset_config(text)
            if dataset.template not in (None, CHAT, PLAIN):
                template_file(dataset.template)
        except ConfigError as error:
            problems += [f"{knob} = {text}: {problem}" for problem in error.problems]
        except ValueError as error:
            problems.append(f"{knob} = {text}: {error}")
        else:
            problems += _source(f"{knob} = {text}", dataset.source)
    return problems


def _source(knob: str, source: str) -> list[str]:
    path = Path(source)
    if source.startswith(REASONING_GYM) and importlib.util.find_spec("reasoning_gym") is None:
        return [f"{knob}: the package reasoning-gym is not installed; install it, or name another source"]
    if is_made(source) or path.is_dir() or is_hub_name(source):
        return []
    if not path.is_file():
        what = "there is no such file" if knob.endswith(f"= {source}") else f"there is no file {source}"
        return [f"{knob}: {what}; name one, or set data.source to arithmetic"]
    if path.suffix not in FORMATS:
        return [f"{knob}: prompts are read from {', '.join(FORMATS)} files; convert it"]
    return []


def _places(wording: str) -> set[str] | None:
    try:
        return {name for _, name, _, _ in string.Formatter().parse(wording) if name is not None}
    except ValueError:
        return None


def _files(config: Config) -> list[str]:
    problems: list[str] = []
    for knob, path in (("model.path", config.model.path), ("model.reference_path", config.model.reference_path)):
        if path is not None and not Path(path).is_dir():
            problems.append(f"{knob} = {path}: there is no such directory; name a Hugging Face model directory")
    problems += _sources(config)
    if config.run.dir is None and (not config.run.name or "/" in config.run.name):
        problems.append(f"run.name = {config.run.name!r}: it names the directory runs/<name>; take a plain name")
    directory = Path(config.run.dir or f"runs/{config.run.name}")
    file = next((path for path in (directory, *directory.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        problems.append(f"run.dir = {directory}: {file} is a file; name another directory")
    for knob, wanted, package in (
        ("run.wandb", config.run.wandb != "off", "wandb"),
        ("run.tensorboard", config.run.tensorboard, "tensorboard"),
    ):
        # A mere folder of that name, which wandb itself leaves behind, is found too but has no origin.
        found = importlib.util.find_spec(package) if wanted else None
        if wanted and (found is None or found.origin is None):
            value = getattr(config.run, package)
            problems.append(f"{knob} = {value}: the package {package} is not installed; install it, or turn this off")
    return problems
