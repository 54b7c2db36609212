"""A run whose steps take a fraction of a second, for tools and tests that start real ranks."""

from pathlib import Path

from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

RULE = "def variety(sample):\n    return len(set(sample.response)) % 5 / 5\n"
SETTINGS = {
    "model.dtype": "float32",
    "run.platform": "cpu",
    "run.samples_logged": -1,
    "run.tensorboard": False,
    "rollout.max_response_length": 10,
    "rollout.max_sequences": 8,
    "rollout.cache_gib": 0.02,
    "data.max_prompt_length": 120,
    "data.eval_problems": 4,
    "train.prompts_per_step": 4,
    "train.learning_rate": 1e-3,
    "algorithm.samples_per_prompt": 4,
}


def make_tiny_run(root: Path, rule: str = RULE) -> None:
    """Write a model and a reward rule into a directory."""
    make_tokenizer(make_tiny(root / "model", "qwen2"))
    (root / "rule.py").write_text(rule)


def tiny_settings(root: Path, **others: object) -> list[str]:
    """Return the command line of a run of what `make_tiny_run` wrote; `others` by section: train={"steps": 6}."""
    own = {f"{section}.{name}": value for section, values in others.items() for name, value in values.items()}
    settings = {"model.path": root / "model"} | SETTINGS | own
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def tiny_rule(root: Path) -> list[str]:
    """Return the words that have a run use the reward rule."""
    return ["--reward.rules", f"{root / 'rule.py'}:variety", "1.0"]
