"""What a configuration asks of reward models that they cannot give."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd_rl.config.check_model import training_problems
from spmd_rl.config.config import Config, RewardModelConfig
from spmd_rl.config.wording import either
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import VALUE_FAMILIES, ModelShape, read_model_shape


@contextmanager
def speaking_of(knob: str) -> Iterator[None]:
    """What is said inside of model.path is meant of another setting that names a model's directory."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).replace("model.path", knob)) from error


def read_reward_shape(name: str, config: RewardModelConfig) -> ModelShape:
    """The shape of a reward model; ConfigError says why its directory holds none."""
    knob = f"reward.models.{name}.path"
    if not config.path:
        raise ConfigError(f"{knob}: not set; name the directory of a ...ForSequenceClassification model")
    if not Path(config.path).is_dir():
        raise ConfigError(f"{knob} = {config.path}: there is no such directory; name a Hugging Face model directory")
    with speaking_of(knob):
        architectures = _architectures(Path(config.path))
        if architectures and architectures[0] not in VALUE_FAMILIES:
            raise ConfigError(
                f"{knob} = {config.path}: the architecture in its config.json is {', '.join(architectures)}, which is "
                f"not one that scores; a reward model is one of {', '.join(VALUE_FAMILIES)}. A model that writes "
                "becomes one by training: tools/convert_checkpoint.py --head value gives it a score head to start from"
            )
        return read_model_shape(config.path)


def _architectures(path: Path) -> list[str]:
    """None where config.json can't be read: read_model_shape says why."""
    try:
        return list(json.loads((path / "config.json").read_text(encoding="utf-8")).get("architectures") or [])
    except (OSError, ValueError, AttributeError):
        return []


def reward_model_problems(config: Config) -> list[str]:
    """All that is wrong with the reward models, as far as their config.json tells it."""
    problems: list[str] = []
    for name, model in config.reward.models.items():
        problems += _settings(config, name, model)
        try:
            shape = read_reward_shape(name, model)
        except ConfigError as error:
            problems += error.problems
        else:
            problems += _score(name, model, shape) + _room(config, name, shape)
    return problems


def _settings(config: Config, name: str, model: RewardModelConfig) -> list[str]:
    knob, problems = f"reward.models.{name}", []
    if name in config.reward.rules:
        problems.append(f"{knob}: a rule is called {name} too, and their scores would share a name; call it otherwise")
    if not math.isfinite(model.weight):
        problems.append(f"{knob}.weight = {model.weight}: not a finite number; give one")
    if model.clip and not (len(model.clip) == 2 and model.clip[0] < model.clip[1]):
        problems.append(
            f"{knob}.clip = {' '.join(map(str, model.clip))}: it takes two numbers, the lowest and the highest "
            "normalised score, such as -3 3"
        )
    if model.tokens_per_microbatch is not None and model.tokens_per_microbatch < 1:
        problems.append(f"{knob}.tokens_per_microbatch = {model.tokens_per_microbatch}: it must be 1 or more")
    return problems


def _score(name: str, model: RewardModelConfig, shape: ModelShape) -> list[str]:
    knob = f"reward.models.{name}.label"
    if model.label is None and shape.labels > 1:
        return [
            f"{knob}: not set, and {model.path} has {shape.labels} outputs; say which one is the score: "
            f"{either(range(shape.labels))}"
        ]
    if model.label is not None and not 0 <= model.label < shape.labels:
        return [f"{knob} = {model.label}: {model.path} has {shape.labels} outputs; it can be {_labels(shape)}"]
    return []


def _labels(shape: ModelShape) -> str:
    return either(range(shape.labels)) if shape.labels > 1 else "left out"


def _room(config: Config, name: str, shape: ModelShape) -> list[str]:
    """Whether the ranks can share the model as they share the policy, and whether samples fit its positions."""
    problems = training_problems(config.parallel, shape, f"the reward model {name}")
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > shape.max_positions:
        problems.append(
            f"data.max_prompt_length + rollout.max_response_length = {config.data.max_prompt_length} + "
            f"{config.rollout.max_response_length}: the reward model {name} has {shape.max_positions} positions; lower "
            "one of them"
        )
    return problems
