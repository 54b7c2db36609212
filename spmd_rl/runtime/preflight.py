"""Find all that keeps a run from starting, at once: settings, models, data, rules, device, engine, disk, accounts.

torch stays out, but for asking it about a GPU that is here.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from spmd_rl.algorithms.table import chosen_functions, unknown_algorithms
from spmd_rl.config.check import check
from spmd_rl.config.check_data import named_sources
from spmd_rl.config.config import CheckpointConfig, Config
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.model_directory import with_local_models
from spmd_rl.config.source_names import FORMATS, is_made
from spmd_rl.data.sources.first_row import try_rows
from spmd_rl.data.sources.prepared import is_prepared
from spmd_rl.data.sources.prompts import template_of, with_overrides
from spmd_rl.data.sources.tables import is_saved_dataset
from spmd_rl.distributed.environment import local_size_from_environment, size_from_environment
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.hub import local_directory
from spmd_rl.models.model_shape import ModelShape, read_model_shape
from spmd_rl.platforms import detect, record
from spmd_rl.rewards.rule_table import RULES, TABLE
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.run_dir import CHECKPOINTS, finished_problem, run_directory
from spmd_rl.runlog.run_lock import holder_here
from spmd_rl.runlog.sinks import require_wandb_key

LEAST_FREE_BYTES = 64 << 20
"""Below this nothing of use can be written, whatever the model."""
Answer = TypeVar("Answer")


def preflight(config: Config, known: Sequence[Problem] = ()) -> tuple[ModelShape | None, list[Problem]]:
    """Return the shape of a run's model, and all problems; `known`: what reading the settings has found already.

    Of a model on the hub that is not here, only the small files are downloaded: config.json, the tokenizer.
    """
    problems = [*known]
    config = with_machine_sizes(with_local_models(config, partial(_small_files, problems)))
    shape = tried(problems, lambda: read_model_shape(config.model.path)) if config.model.path else None
    said = {(problem.knob, str(problem.value)) for problem in problems}
    found = [*check(config, size_from_environment(), shape), *unknown_algorithms(config.algorithm)]
    problems += [problem for problem in found if (problem.knob, str(problem.value)) not in said]
    _device(problems, config, shape)
    for table, name in chosen_functions(config.algorithm):
        problems += table.in_file(name)
    for name in config.reward.rules:
        if name.partition("(")[0].strip() in RULES:
            tried(problems, partial(TABLE.find, name))
        problems += [*TABLE.unknown(name), *TABLE.in_file(name)]
    for knob, text in named_sources(config):
        tried(problems, partial(_source, config, knob, text))
    if config.run.wandb == "online":
        tried(problems, require_wandb_key)
    return shape, [*problems, *disk_problems(config)]


def tried(problems: list[Problem], act: Callable[[], Answer]) -> Answer | None:
    """Do something, and keep what it says is wrong."""
    try:
        return act()
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(Problem("", None, "", str(error)))
    return None


def _small_files(problems: list[Problem], path: str, knob: str) -> str:
    return tried(problems, lambda: local_directory(path, knob, weights=False)) or path


def _device(problems: list[Problem], config: Config, shape: ModelShape | None) -> None:
    """Find out whether the machine is here, has a device for each rank, and an engine that can hold the model."""
    name = config.run.platform
    machine = record(detect() if name == "auto" else name)
    if why := machine.missing():
        problems.append(Problem("run.platform", name, "", why))
        return
    here, ranks = machine.device_count(), local_size_from_environment()
    if here and ranks > here:
        met = f"this machine has {here} {machine.name} device{'s' * (here > 1)}"
        problems.append(Problem("--nproc_per_node", ranks, met, f"start {here} ranks on it, or fewer"))
    if shape is not None:
        model = config.model
        tried(
            problems, lambda: machine.engine_model_options(model.path, shape, config.rollout.block_tokens, model.knob)
        )


def _source(config: Config, knob: str, text: str) -> None:
    """Read the first rows of a source that is on this machine. What its settings alone tell is told already."""
    dataset = load_dataset_config(text, knob)
    path = Path(dataset.source)
    there = path.is_dir() or (path.is_file() and path.suffix in FORMATS)
    if is_made(dataset.source) or not there or is_prepared(dataset.source) or is_saved_dataset(path):
        return
    if knob != "evaluation.benchmarks":
        dataset = with_overrides(dataset, config.data)
    try:
        template = template_of(dataset, config.data)
    except ConfigError:
        return
    try_rows(dataset, config.data, template, "train" if knob in ("data.source", "data.mix") else "eval")


def disk_problems(config: Config) -> list[Problem]:
    """Return a problem where the run's directory can't be written, or has no room for what every run writes."""
    directory = run_directory(config)
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not place.is_dir():
        return []  # said already
    if not os.access(place, os.W_OK | os.X_OK):
        return [
            Problem("run.dir", directory, f"{place} cannot be written", "name a directory that this user can write")
        ]
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    needed, free = max(LEAST_FREE_BYTES, weights if config.run.export_hf else 0), shutil.disk_usage(place).free
    if free >= needed:
        return []
    met = f"its disk has {free / 2**30:.2f} GiB free, and the run writes {needed / 2**30:.2f} GiB at least"
    return [Problem("run.dir", directory, met, "remove old runs or checkpoints, or name another disk")]


def directory_problems(config: Config) -> list[Problem]:
    """Return a problem where the run's directory is another's: one that is at work on this machine, or a finished run.

    Of the command that starts a run; the ranks find out more, together (runtime/run_directory.py).
    """
    directory, resume = run_directory(config), config.checkpoint.resume
    if (problem := holder_here(directory)) is not None:
        return [problem]
    goes_on = resume == "auto" and CheckpointStore(directory / CHECKPOINTS, CheckpointConfig()).found()
    own = resume not in ("auto", "never") and Path(resume).absolute().parent.parent == directory.absolute()
    problem = None if resume == "never" or goes_on or own else finished_problem(directory, resume)
    return [] if problem is None else [problem]
