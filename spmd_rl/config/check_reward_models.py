"""Say what a configuration asks of reward models that they cannot give."""

from spmd_rl.config.check_model import room_problems
from spmd_rl.config.config import Config
from spmd_rl.config.reward_config import RewardModelConfig
from spmd_rl.config.wording import either, words
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape, read_model_shape


def reward_model_knob(name: str, setting: str = "path") -> str:
    """Return the full name of a reward model's setting."""
    return f"reward.models.{name}.{setting}"


def read_reward_shape(name: str, config: RewardModelConfig) -> ModelShape:
    """Return the shape of a reward model; ConfigError says why its directory holds none."""
    knob = reward_model_knob(name)
    if not config.path:
        way = "name the directory of a ...ForSequenceClassification model"
        raise ConfigError(Problem(knob, None, "not set", way))
    return read_model_shape(config.path, knob, "value")


def reward_model_problems(config: Config) -> list[Problem]:
    """Return all that is wrong with the reward models, as far as their config.json tells it."""
    problems: list[Problem] = []
    for name, model in config.reward.models.items():
        problems += _settings(config, name, model)
        try:
            shape = read_reward_shape(name, model)
        except ConfigError as error:
            problems += error.problems
        else:
            problems += _score(name, model, shape) + room_problems(config, f"the reward model {name}", shape)
    return problems


def _settings(config: Config, name: str, model: RewardModelConfig) -> list[Problem]:
    problems = []
    if name in config.reward.rules:
        met = f"a rule is called {name} too, and their scores would share a name"
        problems.append(Problem(f"reward.models.{name}", None, met, "call it otherwise"))
    if model.clip and not (len(model.clip) == 2 and model.clip[0] < model.clip[1]):
        met = "it takes two numbers, the lowest and the highest normalised score"
        problems.append(Problem(reward_model_knob(name, "clip"), words(model.clip), met, "give two such as -3 3"))
    return problems


def _score(name: str, model: RewardModelConfig, shape: ModelShape) -> list[Problem]:
    knob, labels = reward_model_knob(name, "label"), either(range(shape.labels))
    has = f"{model.path} has {shape.labels} outputs"
    if model.label is None and shape.labels > 1:
        return [Problem(knob, None, f"not set, and {has}", f"say which one is the score: {labels}")]
    if model.label is not None and not 0 <= model.label < shape.labels:
        return [Problem(knob, model.label, has, f"it can be {labels if shape.labels > 1 else 'left out'}")]
    return []
