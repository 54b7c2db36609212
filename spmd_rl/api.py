"""Name what files and notebooks of a user's import: for rules, loops and algorithms, and to start and read runs. These
names stay; nothing else is promised.

Each is imported when it is asked for: a rule's process stays without what a loop needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_rl.config.config import Config
    from spmd_rl.controller.session import Session, Step
    from spmd_rl.program import main
    from spmd_rl.rewards.grade import Grade, RewardSample
    from spmd_rl.runs import evaluate, grade, load_config, read_metrics, read_samples, train

__all__ = ["Config", "Grade", "RewardSample", "Session", "Step", "main"]
__all__ += ["evaluate", "grade", "load_config", "read_metrics", "read_samples", "train"]

_PLACES = {
    "Config": "spmd_rl.config.config",
    "Grade": "spmd_rl.rewards.grade",
    "RewardSample": "spmd_rl.rewards.grade",
    "Session": "spmd_rl.controller.session",
    "Step": "spmd_rl.controller.session",
    "main": "spmd_rl.program",
    "evaluate": "spmd_rl.runs",
    "grade": "spmd_rl.runs",
    "load_config": "spmd_rl.runs",
    "read_metrics": "spmd_rl.runs",
    "read_samples": "spmd_rl.runs",
    "train": "spmd_rl.runs",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"spmd_rl.api has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(_PLACES[name]), name)
