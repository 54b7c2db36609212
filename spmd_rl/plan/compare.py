"""Put what a plan predicts beside what a run measured: memory, bytes, seconds."""

import argparse
import json
import math
from pathlib import Path
from statistics import median

from spmd_rl.analysis.curves import read_rows
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.plan.case import Case, Json
from spmd_rl.plan.sizes import in_bytes
from spmd_rl.weights.device_memory import rank_bytes

_RANKS = "ranks.jsonl"
_RESTING = "memory/start/resident_bytes"
_ADDED = "added"
"""The ratio of what comes on top of what a process holds."""
# Name in the metrics -> that of the figure whose largest rank it is.
_BYTES = {
    "bytes/reshard_to_infer/network": "received_bytes",
    "bytes/reshard_to_infer/local": "copied_bytes",
}


def as_the_run(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Fill in from a run's directory what was not given: settings, ranks, lengths; returns the settings' words.

    Raises ConfigError for a directory that is no run's.
    """
    run_dir = Path(options.compare)
    if not (run_dir / "config.yaml").is_file() or not (run_dir / _RANKS).is_file():
        met = f"there is no config.yaml and {_RANKS} in it"
        raise ConfigError(Problem("--compare", options.compare, met, "name the directory of a run that made a step"))
    rows = read_rows(run_dir)
    last = (run_dir / _RANKS).read_text(encoding="utf-8").splitlines()[-1]
    options.world_size = options.world_size or len(json.loads(last)["memory/resident_bytes"])
    for kind in ("prompt", "response"):
        found = [row[f"{kind}_length/mean"] for row in rows if row.get(f"{kind}_length/mean") is not None]
        mean = math.fsum(one for one in found if one is not None) / len(found) if found else None
        setattr(options, f"{kind}_tokens", getattr(options, f"{kind}_tokens") or mean)
    return rest if options.config else ["--config", str(run_dir / "config.yaml"), *rest]


def compare(case: Case, answer: Json, run_dir: Path) -> Json:
    """Return rows of a prediction and a measurement, and what a process holds beside its models before the first verb.

    On a machine of one memory the measured peaks are of the process: that base, which the run has measured, is part of
    the prediction, and `added_ratio` is of what comes on top of it. A row without a ratio has only one of the two.
    """
    rows = read_rows(run_dir)

    def largest(name: str) -> float | None:
        return max((value for row in rows if (value := row.get(name)) is not None), default=None)

    base, found = _base(case, largest(_RESTING)), list[Json]()
    for phase, one in answer["memory"]["estimate"].items():
        peak = largest(f"memory/{phase}/peak_bytes")
        if peak is not None:
            found.append(_peak(f"memory/{phase}/peak_bytes", one["bytes"], peak, base))
    for name, figure in _BYTES.items():
        found.append(_row(name, answer["figures"][figure]["most"], largest(name)))
    for phase, seconds in answer.get("time", {}).get("seconds", {}).items():
        took = [value for row in rows if (value := row.get(f"timing/{phase}")) is not None]
        found.append(_row(f"timing/{phase}", seconds, median(took) if took else None))
    return {"run": str(run_dir), "base_bytes": base, "rows": found}


def _base(case: Case, resting: float | None) -> float | None:
    """Return what a process holds beside its models; 0 where peaks are the device's own; None: the run doesn't say."""
    if not case.run.kernels.stays:
        return 0.0
    if resting is None:
        return None
    held = [rank_bytes(case.config, case.shape, case.train, case.rollout, rank) for rank in range(case.world_size)]
    there = [
        sum(one.weights + one.masters for one in rank.learners.values()) + rank.reference + sum(rank.judges.values())
        for rank in held
    ]
    return resting - max(there)


def _peak(name: str, added: float, measured: float, base: float | None) -> Json:
    if base is None:
        return _row(name, added, None)
    more = {"added_ratio": added / (measured - base)} if base and measured > base else {}
    return _row(name, base + added, measured) | more


def _row(name: str, predicted: float, measured: float | None) -> Json:
    ratio = predicted / measured if measured else None
    return {"name": name, "predicted": predicted, "measured": measured, "ratio": ratio}


def compare_text(found: Json) -> list[str]:
    """Return the lines for a person."""
    base = found["base_bytes"]
    beside = "" if not base else f"; {in_bytes(base)} that its process holds beside models are in both"
    if base is None:
        beside = f"; the run has no {_RESTING}: its memory can't be compared"
    lines = [
        f"beside {found['run']}{beside}",
        f"{'':<36}{'predicted':>12}{'measured':>12}{'ratio':>8}{_ADDED if base else '':>8}",
    ]
    for row in found["rows"]:
        write = _seconds if row["name"].startswith("timing/") else in_bytes
        measured = "-" if row["measured"] is None else write(row["measured"])
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        added = f"{row['added_ratio']:>8.2f}" if "added_ratio" in row else ""
        lines.append(f"{row['name']:<36}{write(row['predicted']):>12}{measured:>12}{ratio:>8}{added}")
    return lines


def _seconds(took: float) -> str:
    return f"{took:.2f} s"
