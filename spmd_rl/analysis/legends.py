"""Tell runs from each other: what differs between their settings, what matters first."""

from collections.abc import Sequence
from pathlib import PurePath

from spmd_rl.analysis.curves import Run

_FIRST = (
    *("algorithm.advantage", "algorithm.loss", "train.learning_rate", "model.path", "algorithm.kl_coefficient"),
    *("algorithm.samples_per_prompt", "train.prompts_per_step", "data.source", "rollout.max_response_length"),
)
_PATHS = ("model.path", "model.reference_path", "critic.path")


def differences(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Return settings that are not the same in all runs -> their value in each, what matters first.

    Names and places of the runs are left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ("run.name", "run.dir"))
    first = [name for name in _FIRST if name in names]
    found = {name: [run.settings.get(name, "not set") for run in runs] for name in dict.fromkeys([*first, *names])}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def labels(runs: Sequence[Run], most: int = 3) -> list[str]:
    """Return a legend: each run's name and what its settings have that the others' have not, `most` of it."""
    differ = {
        name: [_brief(name, value) for value in values]
        for name, values in differences(runs).items()
        if not name.startswith("run.") or name in ("run.seed", "run.platform")
    }
    # A copy of a model in another place is the same model, and a setting that one program did not know is no choice.
    differ = {name: values for name, values in differ.items() if len(set(values)) > 1}
    last = [name.rsplit(".", 1)[-1] for name in differ]
    short = {
        name: end if last.count(end) == 1 or name in _FIRST else ".".join(name.split(".")[-2:])
        for name, end in zip(differ, last, strict=True)
    }
    found = []
    for position, run in enumerate(runs):
        parts = [f"{short[name]}={values[position]}" for name, values in list(differ.items())[:most]]
        more = [f"and {len(differ) - most} more"] if len(differ) > most else []
        found.append(f"{run.name}: {', '.join(parts + more)}" if parts else run.name)
    return distinct(found)


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, those that occur twice with a number: two directories of one name are still two runs."""
    return [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def _brief(name: str, value: object, most: int = 30) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = PurePath(text).name or text if name in _PATHS else text
    return text if len(text) <= most else text[: most - 1] + "…"
