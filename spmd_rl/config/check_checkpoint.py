"""Say what cannot work among the settings of checkpoints, and what is worth knowing of them."""

from pathlib import Path

from spmd_rl.config.config import Config
from spmd_rl.config.resume_policy import is_among
from spmd_rl.errors import Problem, did_you_mean

_WORTH_SAVING = 20
"""Steps of a run that somebody would miss."""


def checkpoint_problems(config: Config, known: list[str]) -> list[Problem]:
    """Return all problems of the section; `known`: dotted names of all settings."""
    checkpoint, problems = config.checkpoint, []
    if checkpoint.resume not in ("auto", "never") and not (Path(checkpoint.resume) / "state.json").is_file():
        way = "name a directory such as runs/mine/checkpoints/step_000012, or take auto or never"
        problems.append(Problem("checkpoint.resume", checkpoint.resume, "no checkpoint is there", way))
    if checkpoint.load == "weights" and checkpoint.resume in ("auto", "never"):
        way = f"name its directory with checkpoint.resume, which is {checkpoint.resume}"
        problems.append(Problem("checkpoint.load", "weights", "nothing says of which checkpoint", way))
    for name in checkpoint.resume_allow:
        if not any(is_among(setting, [name]) for setting in known):
            way = did_you_mean(name, known, "give names such as train.learning_rate, or train. for all of a section")
            problems.append(Problem("checkpoint.resume_allow", name, "there is no such setting", way))
    for keep, value in (("keep_every", checkpoint.keep_every), ("keep_best", checkpoint.keep_best)):
        if value and not checkpoint.every_steps:
            met = "nothing is saved with checkpoint.every_steps = 0"
            problems.append(Problem(f"checkpoint.{keep}", value, met, "set that too"))
    return problems


def checkpoint_notes(config: Config) -> list[str]:
    """Return what works and is worth knowing."""
    if config.checkpoint.every_steps or config.train.steps <= _WORTH_SAVING:
        return []
    return [
        f"checkpoint.every_steps = 0: {config.train.steps} steps, and none is saved before the end; with "
        "--checkpoint.every_steps 10 the same command would go on where it stopped"
    ]
