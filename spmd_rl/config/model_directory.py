"""Find the model that a setting names: a directory, a name on the hub, a run, one of its checkpoints."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.shipped import model_sizes
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.hub import local_directory
from spmd_rl.models.model_shape import foreign_checkpoint

_STATE = "state.json"
_WEIGHTS = "training"


@dataclass(frozen=True)
class ModelDirectory:
    """Hold where a model is."""

    weights: str
    """A Hugging Face directory, or a Megatron checkpoint."""
    config: str
    """The directory with its config.json and tokenizer."""


def find_model(knob: str, path: str) -> ModelDirectory:
    """Return where a model is: a Hugging Face directory, a checkpoint, a run or one of its checkpoints, a hub name.

    Of a run: what it exported at its end, else its newest checkpoint. Raises ConfigError.
    """
    directory = Path(local_directory(path, knob))
    if not directory.is_dir():
        way = "name a Hugging Face directory or a checkpoint"
        raise ConfigError(Problem(knob, path, "there is no such directory", way))
    if (directory / "config.json").is_file():
        return ModelDirectory(str(directory), str(directory))
    if (directory / "metadata.json").is_file():
        if (directory.parent / _STATE).is_file():
            return _of_checkpoint(knob, directory.parent)
        return _converted(knob, path, directory)
    if (directory / _STATE).is_file():
        return _of_checkpoint(knob, directory)
    if (directory / "hf" / "config.json").is_file():
        return ModelDirectory(str(directory / "hf"), str(directory / "hf"))
    saved = sorted(one for one in (directory / "checkpoints").glob("step_*") if one.suffix != ".partial")
    if saved:
        return _of_checkpoint(knob, saved[-1])
    if (directory / "config.yaml").is_file():
        met, way = "this run has neither hf/ nor a checkpoint", "let it end, or save with checkpoint.every_steps"
        raise ConfigError(Problem(knob, path, met, way))
    if foreign := foreign_checkpoint(path, knob):
        raise ConfigError(foreign)
    met = "it has neither config.json (a Hugging Face directory) nor metadata.json (a Megatron checkpoint)"
    raise ConfigError(Problem(knob, path, met, "name one of these, a run or one of its checkpoints"))


def _converted(knob: str, path: str, directory: Path) -> ModelDirectory:
    if not (directory / "hf" / "config.json").is_file():
        way = f"put the model's config.json and tokenizer into {directory / 'hf'}, as tools/convert_checkpoint.py does"
        raise ConfigError(Problem(knob, path, "a checkpoint without hf/config.json", way))
    return ModelDirectory(str(directory), str(directory / "hf"))


def _of_checkpoint(knob: str, directory: Path) -> ModelDirectory:
    """Return the model of a run's checkpoint, whose config.json is that of the model which the run began with."""
    try:
        began: Any = json.loads((directory / _STATE).read_text(encoding="utf-8"))["settings"]["model.path"]
        began = local_directory(str(began), knob)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        met = f"{directory / _STATE} does not say which model the run began with"
        raise ConfigError(Problem(knob, directory, met, "name a checkpoint that spmd_rl has written")) from error
    if not (Path(began) / "config.json").is_file():
        met = f"the run began with {began}, which has the config.json and tokenizer, and is not here"
        raise ConfigError(Problem(knob, directory, met, "start from the directory that the run was started in"))
    return ModelDirectory(str(directory / _WEIGHTS), began)


def sizes_directory(path: str, knob: str) -> str:
    """Return the directory of a model, else the shipped one with its config.json alone, else what the hub has."""
    shipped = None if Path(path).is_dir() else model_sizes(path)
    return str(shipped) if shipped else local_directory(path, knob)


def with_local_models(config: Config, find: Callable[[str, str], str] = local_directory) -> Config:
    """Return a run's settings with the directories of models that were named as on the hub; they are downloaded now.

    `find`: (path, the setting that names it) -> its directory.
    """
    model, critic, reward = config.model, config.critic, config.reward
    named = {"path": model.path, "reference_path": model.reference_path}
    found = {name: path and find(path, f"model.{name}") for name, path in named.items()}
    models = {
        name: replace(one, path=find(one.path, f"reward.models.{name}.path")) for name, one in reward.models.items()
    }
    path = find(critic.path, "critic.path") if critic.path else critic.path
    return replace(
        config,
        model=replace(model, **found),  # type: ignore[arg-type]
        critic=replace(critic, path=path),
        reward=replace(reward, models=models),
    )
