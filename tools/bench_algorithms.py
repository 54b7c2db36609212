"""Train by several configs with several seeds, and make the table of docs/algorithms.md:
`python tools/bench_algorithms.py configs/*demo_smollm2_cpu.yaml --seeds 1 2 3 --output runs/algorithms`.

A run that is there already is not made again, so an interrupted table goes on. What follows `--` goes to every run.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HEAD = (
    "| config | greedy accuracy before | after | gained, least to most | minutes | seeds |\n|---|---|---|---|---|---|"
)


def program(config: Path) -> str:
    """Return the module that trains by a config: PPO has a loop of its own."""
    return "spmd_rl.ppo" if config.name.startswith("ppo") else "spmd_rl.grpo"


def train(config: Path, seed: int, ranks: int, directory: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Return the rows of a run, which is made unless it has ended."""
    if not (directory / "hf").exists():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["-m", program(config), "--config", str(config), "--run.dir", str(directory), *overrides]
        command += ["--run.seed", str(seed), "--checkpoint.resume", "never"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def accuracies(rows: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Return the greedy accuracy before the first step and after the last, of the first benchmark."""
    found = [value for row in rows for name, value in row.items() if name.endswith("/accuracy")]
    if len(found) < 2:
        raise ValueError("the run was not evaluated before and after: set evaluation.before and evaluation.after")
    return found[0], found[-1]


def line(name: str, runs: Sequence[Sequence[dict[str, float]]]) -> str:
    """Return a row of the table: means over the seeds."""
    before, after = zip(*(accuracies(rows) for rows in runs), strict=True)
    gained = [100 * (last - first) for first, last in zip(before, after, strict=True)]
    minutes = statistics.mean(sum(row.get("timing/all", 0.0) for row in rows) for rows in runs) / 60
    first, last = (f"{100 * statistics.mean(values):.0f} %" for values in (before, after))
    return f"| `{name}` | {first} | {last} | {min(gained):+.0f} to {max(gained):+.0f} | {minutes:.0f} | {len(runs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"))
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser.parse_args(words[:end]), words[end + 1 :]
    print(HEAD, flush=True)
    for config in arguments.configs:
        places = [(seed, arguments.output / f"{config.stem}_{seed}") for seed in arguments.seeds]
        print(line(config.name, [train(config, s, arguments.ranks, d, overrides) for s, d in places]), flush=True)


if __name__ == "__main__":
    main()
