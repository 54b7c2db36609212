"""The door to reasoning_gym: tasks made on the fly, with answers."""

from collections.abc import Iterator
from typing import Any

from spmd_rl.config.source_names import REASONING_GYM
from spmd_rl.data.seeds import derived_seed
from spmd_rl.data.sources.row import Row
from spmd_rl.errors import ConfigError, Problem, did_you_mean

_TRIES = 8


def make_task(task: str, options: dict[str, Any], count: int, seed: int, split: str) -> list[Row]:
    """Up to `count` different problems of "train" or "eval", the same for the same seed; fewer where there are no more.

    Rows have the columns prompt and answer, and metadata: what the task's own scoring function reads. A hash of the
    problem decides its split (a quarter is held out), whatever the seed: no problem is in both.
    """
    assert split in ("train", "eval"), split
    chosen: dict[str, Row] = {}
    for entry in _entries(task, options, _TRIES * count + 64, derived_seed(f"reasoning_gym {split}", seed)):
        if len(chosen) == count:
            break
        question = entry["question"]
        held_out = derived_seed(f"held out {task} {question}") % 4 == 0
        if held_out == (split == "eval") and question not in chosen:
            chosen[question] = {"prompt": question, "answer": entry["answer"], "metadata": entry["metadata"]}
    return list(chosen.values())


def _entries(task: str, options: dict[str, Any], size: int, seed: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        way = did_you_mean(task, DATASETS, f"it has {', '.join(sorted(DATASETS))}")
        raise ConfigError(Problem("data.source", f"{REASONING_GYM}{task}", "reasoning_gym has no such task", way))
    try:
        made = reasoning_gym.create_dataset(task, **{"seed": seed, "size": size} | options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"data.source = {REASONING_GYM}{task}: its options {options} do not fit: {error}; see the task's "
            "configuration in reasoning_gym"
        ) from error
    yield from made
