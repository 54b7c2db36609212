"""Does a long run keep what it should give back? `python tools/soak.py [--config FILE] [--section.key value ...]`.

Runs `spmd_rl.grpo` for some hundred steps with checkpoints, evaluations and a reward function, of a tiny random model
where no configuration is given. Prints by how much the memory of each rank grows a step (least squares after the
warm-up), what else grew, and what was left when the run had ended. Exit status 1 where something leaks.
`--judge DIR`: of a run that is there already.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_run import make_tiny_run, tiny_rule, tiny_settings  # noqa: E402

from spmd_rl.testing.launcher import environment, torchrun  # noqa: E402

RANKS = "ranks.jsonl"
MEGABYTE = 1e6
LIMIT_MEGABYTES_A_STEP = 0.1
MEMORY = "memory/resident_bytes"
CHILDREN = "memory/children_bytes"
COUNTS = {
    "process/open_files": "open files",
    "process/children": "processes",
    "process/shared_memory_files": "shared-memory files",
    "process/temporary_files": "temporary files",
}
LABELS = {MEMORY: "resident, MB", CHILDREN: "its processes, MB"} | COUNTS
KEPT = ("torchelastic_", "torchinductor_")
"""Temporary files that stay on purpose: torchrun's, one directory a launch, where a rank that raises leaves its
traceback; and torch's cache of compiled code, one a user."""
RULE = '''"""A reward function that has work to do, and ends its process at one response in fifty."""

import os
import zlib


def variety(sample):
    if zlib.crc32(sample.response.encode()) % 50 == 0:
        os._exit(1)
    pieces = [sample.response[i:j] for i in range(len(sample.response)) for j in range(i + 1, len(sample.response) + 1)]
    return len(set(pieces)) / max(len(pieces), 1)
'''
TINY = {
    "run": {"samples_logged": 4, "tensorboard": True},
    "data": {"eval_problems": 8},
    "rollout": {"max_response_length": 24, "max_sequences": 16},
    "algorithm": {"kl_coefficient": 0.02},
    "train": {"minibatches": 2, "tokens_per_microbatch": 300},
}


@dataclass(frozen=True)
class Slope:
    """A straight line through a series, by least squares."""

    a_step: float
    error: float
    """Standard error of `a_step`, as if the steps' deviations from the line were independent."""


def slope(steps: Sequence[float], values: Sequence[float]) -> Slope:
    """Return how much the values grow a step; at least three of them."""
    fit = statistics.linear_regression(steps, values)
    rest = sum((y - fit.slope * x - fit.intercept) ** 2 for x, y in zip(steps, values, strict=True))
    spread = sum((x - statistics.fmean(steps)) ** 2 for x in steps)
    return Slope(fit.slope, math.sqrt(rest / (len(steps) - 2) / spread))


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter: what comes and goes, as a checkpoint's writer, is in neither."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


@dataclass
class Verdict:
    """Hold what a soak found, to print, and what of it is a leak."""

    lines: list[str]
    leaks: list[str]


def judge(rows: Sequence[dict[str, list[float]]], warm_up: int, limit_megabytes: float) -> Verdict:
    """`rows`: of a run's ranks.jsonl; those of the first `warm_up` steps are left out.

    A leak is a rank whose memory grows by the limit or more a step, and a count that is higher at the end than at the
    beginning. The memory of a rank's processes is told, not judged: a reward function's is its author's.
    """
    steady = [row for row in rows if row["step"] > warm_up]
    if len(steady) < 8:
        raise ValueError(
            f"--warm-up {warm_up}: of {len(rows)} steps {len(steady)} are left, and a line takes 8 or more"
        )
    steps = [row["step"] for row in steady]
    head = f"steps {steps[0]:g} to {steps[-1]:g}"
    verdict = Verdict([f"{head:<30}{'begin':>10}{'end':>10}{'a step':>12}{'std. error':>12}"], [])
    for metric, label in LABELS.items():
        unit, digits = (1, 0) if metric in COUNTS else (MEGABYTE, 1)
        for rank in range(len(steady[0][metric])):
            values = [row[metric][rank] / unit for row in steady]
            line, (begin, end) = slope(steps, values), ends(values)
            name = f"rank {rank}: {label}"
            numbers = f"{begin:>10.{digits}f}{end:>10.{digits}f}{line.a_step:>+12.4f}{line.error:>12.4f}"
            verdict.lines.append(f"{name:<30}{numbers}")
            if metric == MEMORY and line.a_step >= limit_megabytes:
                verdict.leaks.append(
                    f"rank {rank} grows by {line.a_step:.3f} MB a step; {limit_megabytes:g} is the limit"
                )
            if metric in COUNTS and end > begin:
                verdict.leaks.append(f"rank {rank}: {end - begin:g} more {label} at the end than at the beginning")
    return verdict


def read_rows(run_dir: Path) -> list[dict[str, list[float]]]:
    """Return what each rank of a run held after each step, since the number of ranks last changed."""
    rows = [json.loads(line) for line in (run_dir / RANKS).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if len(row[MEMORY]) == len(rows[-1][MEMORY])]


def left_over(mark: str, temporary: Path, run_dir: Path, shared_before: set[str]) -> list[str]:
    """Return what a run that has ended has not taken away: processes, files in memory, temporary and unfinished files.

    `mark`: the run had it in its environment as SPMD_RL_SOAK.
    """
    from spmd_rl.worker.process_usage import shared_memory

    found = []
    held: set[str] = set()
    for process in psutil.process_iter():
        try:
            held |= shared_memory(process.pid)
            if process.environ().get("SPMD_RL_SOAK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
        except (psutil.Error, OSError):
            continue  # it ended a moment ago, or is another user's
    # What came meanwhile and a process has mapped or open is another program's.
    came = (Path("/dev/shm") / name for name in sorted(set(os.listdir("/dev/shm")) - shared_before))
    found += [
        str(path) for path in came if str(path) not in held and path.exists() and path.stat().st_uid == os.getuid()
    ]
    found += [str(path) for path in sorted(temporary.iterdir()) if not path.name.startswith(KEPT)]
    found += [str(path) for kind in ("partial", "new") for path in sorted(run_dir.rglob(f"*.{kind}"))]
    return found


def run(
    options: argparse.Namespace, overrides: list[str], root: Path
) -> tuple[list[dict[str, list[float]]], list[str]]:
    """The rows of ranks.jsonl, and what is left over."""
    run_dir, temporary, mark = root / "run", root / "tmp", uuid.uuid4().hex
    temporary.mkdir()
    words = ["--config", str(options.config)] if options.config else []
    if not options.config:
        make_tiny_run(root, RULE)
        words = tiny_settings(root, **TINY) if "--model.path" not in overrides else []
        words += tiny_rule(root) if "--reward.rules" not in overrides else []
    words += ["--checkpoint.every_steps", str(options.checkpoint_every)]
    words += ["--evaluation.every_steps", str(options.evaluate_every)]
    words += [*overrides, "--train.steps", str(options.steps), "--run.dir", str(run_dir)]
    command = torchrun(options.ranks, "-m", "spmd_rl.grpo", *words)
    # A directory of its own for temporary files: what is in it is the run's.
    variables = environment(TMPDIR=str(temporary), SPMD_RL_SOAK=mark)
    shared_before = set(os.listdir("/dev/shm"))
    if subprocess.run(command, stdout=sys.stderr, env=variables).returncode:
        raise ValueError(f"the run failed, see above: {' '.join(command)}")
    return read_rows(run_dir), left_over(mark, temporary, run_dir, shared_before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="default: a tiny random model on CPU ranks")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="a run's directory: judge that one, and run nothing")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=100, help="steps that are left out")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps")
    parser.add_argument("--limit", type=float, default=LIMIT_MEGABYTES_A_STEP, help="MB a step that a rank may grow")
    parser.add_argument("--keep", type=Path, help="also copy the run's ranks.jsonl there")
    options, overrides = parser.parse_known_args()
    if options.judge is None and options.steps < options.warm_up + 8:
        parser.error(f"--steps {options.steps}: no 8 are left after --warm-up {options.warm_up}")
    try:
        if options.judge:
            rows, left = read_rows(options.judge), None
        else:
            with tempfile.TemporaryDirectory(prefix="soak.") as directory:
                rows, left = run(options, overrides, Path(directory))
                if options.keep:
                    shutil.copy(Path(directory) / "run" / RANKS, options.keep)
        verdict = judge(rows, options.warm_up, options.limit)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(verdict.lines))
    leaks = verdict.leaks
    if left is not None:
        print("left when the run had ended: " + ("; ".join(left) or "nothing"))
        leaks = leaks + [f"{len(left)} things were left"] * bool(left)
    print("\n" + ("\n".join(leaks) or "no leak"))
    sys.exit(1 if leaks else 0)


if __name__ == "__main__":
    main()
