"""Tell where a step's time, memory and traffic go: `python tools/bench_step.py --config FILE [--section.key ...]`.

Runs the configuration for a few steps without evaluations and prints the median step after the first, which warms up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
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
RATES = (
    ("end to end", "e2e_tps"),
    ("rollout", "vllm_tps"),
    ("rollout, responses only", "rollout/response_tps"),
    ("update", "update_tps"),
)


def run(config: Path, ranks: int, steps: int, overrides: list[str], directory: Path) -> list[dict[str, float]]:
    """The rows of a run of `steps` steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = ["--config", str(config), *overrides]
    command += ["-m", load_config(words).program, *words]
    command += ["--train.steps", str(steps), "--run.dir", str(directory)]
    for name in ("evaluation.before", "evaluation.after", "run.export_hf", "run.tensorboard"):
        command += [f"--{name}", "False"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def table(rows: list[dict[str, float]], ranks: int) -> str:
    """The median of every number over the rows."""

    def median(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return statistics.median(values) if values else None

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
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = run(options.config, options.ranks, options.steps, overrides, Path(directory) / "run")
    if options.json:
        options.json.write_text("\n".join(json.dumps(row) for row in rows))
    # Memory is a peak over the whole life of a rank, its start included.
    peak = max(row["memory/peak_bytes"] for row in rows)
    steady = [row | {"memory/peak_bytes": peak} for row in rows[1:]]
    print(table(steady, options.ranks))


if __name__ == "__main__":
    main()
