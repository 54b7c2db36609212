"""Say what cannot work among the settings of PPO and its critic, and what is worth knowing of them."""

from dataclasses import dataclass

from spmd_rl.config.check_model import room_problems
from spmd_rl.config.config import GAE, AlgorithmConfig, Config
from spmd_rl.config.wording import either
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape, read_model_shape, with_value_head

MOST_KL_ERROR = 0.2
"""Of the adaptive controller of the KL penalty (algorithms/kl_controller.py)."""
_FAR = 1.0
"""No policy that is still of use is so far from its reference, in nats a token."""


@dataclass(frozen=True)
class CriticSource:
    """Hold the directory that a critic begins as, and what becomes of it."""

    path: str
    knob: str
    """The setting that names the directory."""
    stored: ModelShape
    """As the directory has it."""
    shape: ModelShape
    """With its value head."""
    label: int = 0
    """Which of its outputs is the value."""

    @property
    def new_head(self) -> bool:
        """Return True where the directory has no value head."""
        return self.stored.head == "lm"

    def described(self) -> str:
        """Say what the critic begins as, for the log."""
        if self.new_head:
            return f"critic: begins as {self.path}, with a value head of zeros"
        return f"critic: begins as {self.path}, a {self.shape.architecture}, whose output {self.label} is the value"


def read_critic(config: Config) -> CriticSource:
    """Return what the critic begins as; ConfigError says why a directory can't become one."""
    path = config.critic.path or config.model.path
    knob = "critic.path" if config.critic.path else "model.path"
    stored = read_model_shape(path, knob)
    shape = stored if stored.head == "value" else with_value_head(stored)
    if shape is None:
        met = f"{stored.family} models are not supported with a value head"
        raise ConfigError(Problem(knob, path, met, "set critic.path to a model of another family, of this tokenizer"))
    label, labels = config.critic.label, either(range(shape.labels))
    has = f"{path} has {shape.labels} output{'s' * (shape.labels > 1)}"
    if label is None and shape.labels > 1:
        raise ConfigError(Problem("critic.label", None, f"not set, and {has}", f"say which one is the value: {labels}"))
    if label is not None and not 0 <= label < shape.labels:
        raise ConfigError(Problem("critic.label", label, has, f"it can be {labels}"))
    return CriticSource(path, knob, stored, shape, label or 0)


def ppo_problems(config: Config, model: ModelShape | None) -> list[Problem]:
    """Return all that is wrong with the settings of PPO, and of the weight of a divergence; `model`: the policy."""
    problems = _kl(config.algorithm, config.train.prompts_per_step)
    if not config.algorithm.uses_critic:
        return problems + _unused(config)
    problems += _learning(config)
    if model is None:
        return problems
    try:
        source = read_critic(config)
    except ConfigError as error:
        return [*problems, *error.problems]
    if source.shape.vocabulary < model.vocabulary:
        met = f"it has embeddings for {source.shape.vocabulary} tokens, the policy has {model.vocabulary}"
        way = "the critic reads the policy's token ids: take a model of the same tokenizer"
        problems.append(Problem(source.knob, source.path, met, way))
    return problems + room_problems(config, "the critic", source.shape)


def _unused(config: Config) -> list[Problem]:
    """Return a problem where a critic was named that another algorithm would leave aside."""
    if not config.critic.path:
        return []
    met = f"algorithm.advantage = {config.algorithm.advantage} has no critic, so nothing would come of it"
    way = f"set algorithm.advantage to {GAE} and start spmd_rl.ppo, or leave it out"
    return [Problem("critic.path", config.critic.path, met, way)]


def _kl(algorithm: AlgorithmConfig, prompts: int) -> list[Problem]:
    problems: list[Problem] = []
    coefficient, adaptive = algorithm.kl_coefficient, algorithm.kl_control == "adaptive"
    if adaptive and not coefficient:
        met = "algorithm.kl_coefficient = 0.0 stays 0, whatever it is multiplied by"
        problems.append(Problem("algorithm.kl_control", "adaptive", met, "give it a weight to begin with, as 0.001"))
    if adaptive and not algorithm.kl_in_reward:
        met = "it leads the KL coefficient (beta) of the reward, and here that is in the loss"
        problems.append(Problem("algorithm.kl_control", "adaptive", met, "set algorithm.kl_in_reward, or take fixed"))
    samples = prompts * algorithm.samples_per_prompt
    if adaptive and MOST_KL_ERROR * samples >= algorithm.kl_horizon:
        met = f"a step of {samples} samples could take all of the weight, or turn it negative"
        way = f"take more than {MOST_KL_ERROR * samples:g}, such as {10 * samples}"
        problems.append(Problem("algorithm.kl_horizon", algorithm.kl_horizon, met, way))
    return problems


def _learning(config: Config) -> list[Problem]:
    critic, steps = config.critic, config.train.steps
    problems: list[Problem] = []
    if critic.min_learning_rate > critic.learning_rate:
        met = f"above critic.learning_rate = {critic.learning_rate}"
        problems.append(Problem("critic.min_learning_rate", critic.min_learning_rate, met, "lower it"))
    if critic.learning_rate_warmup_steps and critic.learning_rate_warmup_fraction:
        met = f"critic.learning_rate_warmup_fraction = {critic.learning_rate_warmup_fraction:g} says it too"
        value = critic.learning_rate_warmup_steps
        problems.append(Problem("critic.learning_rate_warmup_steps", value, met, "leave one of them out"))
    if critic.learning_rate_warmup_steps > steps:
        met = f"the run ends after train.steps = {steps}, before the warm-up does"
        value = critic.learning_rate_warmup_steps
        problems.append(Problem("critic.learning_rate_warmup_steps", value, met, "lower it"))
    if critic.warmup_steps >= steps:
        met = f"the run ends after train.steps = {steps}, and the policy would never learn"
        problems.append(Problem("critic.warmup_steps", critic.warmup_steps, met, "lower it"))
    return problems


def ppo_notes(config: Config) -> list[str]:
    """Return what works and is worth knowing."""
    algorithm = config.algorithm
    said = []
    if algorithm.kl_control == "adaptive" and algorithm.kl_target > _FAR:
        said.append(
            f"algorithm.kl_target = {algorithm.kl_target:g}: a policy of use is seldom 1 nat a token from its "
            "reference, so the KL coefficient only falls; usual targets are 0.01 to 0.1"
        )
    return said
