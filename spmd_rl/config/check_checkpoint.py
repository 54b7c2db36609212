"""What cannot work among the settings of checkpoints, and what is worth knowing of them."""

import difflib
from pathlib import Path

from spmd_rl.config.config import Config
from spmd_rl.config.resume_policy import may_differ

_WORTH_SAVING = 20
"""Steps of a run that somebody would miss."""


def checkpoint_problems(config: Config, known: list[str]) -> list[str]:
    """`known`: dotted names of all settings."""
    checkpoint, problems = config.checkpoint, []
    if checkpoint.resume not in ("auto", "never") and not (Path(checkpoint.resume) / "state.json").is_file():
        problems.append(
            f"checkpoint.resume = {checkpoint.resume}: no checkpoint is there; name a directory such as "
            "runs/mine/checkpoints/step_000012, or take auto or never"
        )
    if checkpoint.load == "weights" and checkpoint.resume in ("auto", "never"):
        problems.append(
            f"checkpoint.load = weights: of which checkpoint? name its directory with checkpoint.resume, which is "
            f"{checkpoint.resume}"
        )
    for name in checkpoint.resume_allow:
        if not any(may_differ(setting, [name]) for setting in known):
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            problems.append(
                f"checkpoint.resume_allow = {name}: there is no such setting{meant}; "
                "give names such as train.learning_rate, or train. for all of a section"
            )
    for keep, value in (("keep_every", checkpoint.keep_every), ("keep_best", checkpoint.keep_best)):
        if value and not checkpoint.every_steps:
            problems.append(
                f"checkpoint.{keep} = {value}: nothing is saved with checkpoint.every_steps = 0; set that too"
            )
    return problems


def checkpoint_notes(config: Config) -> list[str]:
    """What works and is worth knowing."""
    if config.checkpoint.every_steps or config.train.steps <= _WORTH_SAVING:
        return []
    return [
        f"checkpoint.every_steps = 0: {config.train.steps} steps, and none is saved before the end; with "
        "--checkpoint.every_steps 10 the same command would go on where it stopped"
    ]
