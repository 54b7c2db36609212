"""Tell where a step's time, memory and traffic go: `python tools/bench_step.py --config FILE [--section.key ...]`.

Runs the configuration for a few steps without evaluations and prints the median step after the first, which warms up.
`--against FILE` runs a second configuration with the same settings behind it, and says what the first one's training
costs in updates of the second, and its memory: PPO's critic against GRPO.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from spmd_rl.config.loading import load_config

PHASES = (
    ("weights to vLLM", "reshard_to_infer"),
    ("rollout", "rollout"),
    ("device back", "reshard_to_train"),
    ("waiting for reward workers", "non_overlap_rule_reward"),
    ("advantages, plan", "adv"),
    ("exchange", "exchange"),
    ("policy log-probs", "old_log_p"),
    ("reference log-probs", "reference_model"),
    ("critic's values", "critic_model"),
    ("critic's update", "update_critic"),
    ("update", "update"),
)
TRAINING = ("old_log_p", "critic_model", "adv", "update_critic", "update")
"""All that learning from the samples of a step takes, but for a reference's pass."""
RATES = (
    ("end to end", "e2e_tps"),
    ("rollout", "vllm_tps"),
    ("rollout, responses only", "rollout/response_tps"),
    ("update", "update_tps"),
)


def run(config: Path, ranks: int, steps: int, overrides: list[str], directory: Path) -> list[dict[str, float]]:
    """Return the rows of a run of `steps` steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = ["--config", str(config), *overrides]
    command += ["-m", load_config(words).program, *words]
    command += ["--train.steps", str(steps), "--run.dir", str(directory)]
    for name in ("evaluation.before", "evaluation.after", "run.export_hf", "run.tensorboard"):
        command += [f"--{name}", "False"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def median_of(rows: list[dict[str, float]], name: str) -> float | None:
    """Return the median of a metric over the rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def compared(rows: list[dict[str, float]], others: list[dict[str, float]]) -> str:
    """Return what training on a step's samples takes in policy updates of another run, and the memory of both.

    Raises ValueError where the other run has no update.
    """
    update = median_of(others, "timing/update")
    if not update:
        raise ValueError("the configuration of --against made no update that could be compared with")

    def parts_of(run: list[dict[str, float]]) -> dict[str, float]:
        seconds = {phase: median_of(run, f"timing/{phase}") for phase in TRAINING}
        return {phase: took for phase, took in seconds.items() if took is not None}

    parts, theirs = parts_of(rows), sum(parts_of(others).values())
    peaks = [max(row["memory/peak_bytes"] for row in of_run) for of_run in (rows, others)]
    return "\n".join(
        (
            f"training on a step's samples: {sum(parts.values()):.3f} s, an update of --against: {update:.3f} s: "
            f"{sum(parts.values()) / update:.2f} times",
            "  " + ", ".join(f"{phase} {took / update:.2f}" for phase, took in parts.items()),
            f"all of the training of --against: {theirs:.3f} s: {sum(parts.values()) / theirs:.2f} times",
            f"peak memory of a rank: {_bytes(peaks[0])}, of --against: {_bytes(peaks[1])}: "
            f"{peaks[0] / peaks[1]:.2f} times",
        )
    )


def table(rows: list[dict[str, float]], ranks: int) -> str:
    """Return the median of every number over the rows."""
    median = partial(median_of, rows)
    total = median("timing/all")
    assert total is not None
    lines = [f"{'phase':<24}{'seconds':>10}{'share':>9}{'peak memory':>14}{'network':>12}{'copied':>12}"]
    for label, phase in PHASES:
        seconds = median(f"timing/{phase}")
        if seconds is None:
            continue
        cells = (
            _bytes(median(f"memory/{phase}/peak_bytes")),
            _bytes(median(f"bytes/{phase}/network")),
            _bytes(median(f"bytes/{phase}/local")),
        )
        lines.append(f"{label:<24}{seconds:>10.3f}{seconds / total:>9.1%}{cells[0]:>14}{cells[1]:>12}{cells[2]:>12}")
    lines.append(f"{'step':<24}{total:>10.3f}{'':>9}{_bytes(max(row['memory/peak_bytes'] for row in rows)):>14}")
    lines.append("")
    lines.append(f"{'tokens/s':<24}{'a rank':>10}{'all':>9}")
    for label, name in RATES:
        rate = median(name)
        if rate is not None:
            lines.append(f"{label:<24}{rate:>10.0f}{rate * ranks:>9.0f}")
    return "\n".join(line.rstrip() for line in lines)


def _bytes(count: float | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--steps", type=int, default=4, help="the first is left out")
    parser.add_argument("--json", type=Path, help="also write the rows there, of the first configuration")
    parser.add_argument("--against", type=Path, metavar="FILE", help="a configuration to compare with")
    options, overrides = parser.parse_known_args()

    def steady(config: Path) -> list[dict[str, float]]:
        with tempfile.TemporaryDirectory() as directory:
            rows = run(config, options.ranks, options.steps, overrides, Path(directory) / "run")
        if options.json and config == options.config:
            options.json.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        # Memory is a peak over the whole life of a rank, its start included.
        peak = max(row["memory/peak_bytes"] for row in rows)
        return [row | {"memory/peak_bytes": peak} for row in rows[1:]]

    rows = steady(options.config)
    print(table(rows, options.ranks), flush=True)
    if options.against:
        others = steady(options.against)
        print(f"\n{options.against}\n{table(others, options.ranks)}\n\n{compared(rows, others)}")


if __name__ == "__main__":
    main()
