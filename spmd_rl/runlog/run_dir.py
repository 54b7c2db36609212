"""A run's directory: the names of what a run writes there, and what an earlier run left."""

import json
from pathlib import Path

from spmd_rl.config.config import CheckpointConfig, Config
from spmd_rl.config.loading import read_settings
from spmd_rl.data.samples import SAMPLES, SKIPPED, samples_step
from spmd_rl.errors import Problem
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.launches import LAUNCHES

METRICS = "metrics.jsonl"
RANKS = "ranks.jsonl"
EVALUATIONS = "evaluations"
CHECKPOINTS = "checkpoints"
WRITTEN_HERE = (
    *(
        "config.yaml",
        METRICS,
        RANKS,
        "run.log",
        SAMPLES,
        EVALUATIONS,
        "tensorboard",
        "wandb",
        "swanlab",
        "hf",
        "report",
        "hang",
    ),
    *(SKIPPED, CHECKPOINTS, LAUNCHES),
)


def way_on(run_dir: Path, resume: str) -> str:
    """Say what the same command does after a run has ended early; `resume`: checkpoint.resume."""
    store = CheckpointStore(run_dir / CHECKPOINTS, CheckpointConfig())
    # One that is written, and was not complete when the run ended, is completed by the command that goes on.
    saved = {*store.sealed(), *(one.step for one in store.found())}
    if not saved:
        again = "begins anew" if resume in ("auto", "never") else f"begins from {resume} again"
        return f"no checkpoint is saved: the same command {again}"
    but = ", without checkpoint.resume = never," if resume == "never" else ""
    return f"the same command{but} resumes from step {max(saved)}"


def run_directory(config: Config) -> Path:
    """Return the directory that a run writes to."""
    return Path(config.run.dir or f"runs/{config.run.name}")


def finished_problem(run_dir: Path, resume: str) -> Problem | None:
    """Return the problem that a run which begins anew would move a finished one; `resume`: checkpoint.resume."""
    steps = finished_steps(run_dir)
    if not steps:
        return None
    own = "give this one a run.name or run.dir of its own"
    anew = "or begin anew with checkpoint.resume = never, which moves what is there into earlier/"
    way = f"{own}, {anew}" if resume == "auto" else own
    return Problem("run.dir", run_dir, f"it holds a finished run of {steps} steps", way)


def finished_steps(run_dir: Path) -> int:
    """Return the steps of the finished run that a directory holds; 0: it holds none."""
    try:
        told = read_settings(run_dir / "config.yaml")
        last = (run_dir / METRICS).read_text(encoding="utf-8").splitlines()[-1:]
        done, wanted = (json.loads(line)["step"] for line in last), told["train.steps"]
        whole = (run_dir / "hf").is_dir() or not told.get("run.export_hf", True)
        return wanted if whole and next(done, 0) >= wanted else 0
    except (OSError, ValueError, KeyError, TypeError):  # no run that ended as one does
        return 0


def lost_work(run_dir: Path, step: int) -> tuple[int, float]:
    """Count whole steps that the run did after `step`, and the seconds from then to the end of the last of them."""
    metrics = run_dir / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    done = [json.loads(line) for line in lines if line.endswith("\n")]
    later = [row for row in done if row["step"] > step]
    if not later:
        return 0, 0.0
    before = [row["time"] for row in done if row["step"] <= step]
    begun = before[-1] if before else later[0]["time"] - later[0].get("timing/all", 0.0)
    return int(later[-1]["step"]) - step, max(0.0, later[-1]["time"] - begun)  # a clock may have been set back


def set_aside(run_dir: Path) -> Path | None:
    """Move an earlier run's files, and nothing else, out of the way.

    A directory with metrics has a run's files; they go last, so that a kill in between leaves the rest to the next.
    """
    if not (run_dir / METRICS).exists():
        return None
    target = _free(run_dir / "earlier")
    target.mkdir(parents=True)
    for name in sorted(WRITTEN_HERE, key=METRICS.__eq__):
        if (run_dir / name).exists():
            (run_dir / name).rename(target / name)
    return target


def set_later_aside(run_dir: Path, step: int) -> Path | None:
    """Move what a run did after a step out of the way: rows of metrics, samples, checkpoints."""
    kept, later = {}, {}
    for name in (METRICS, RANKS):
        kept[name], later[name] = _lines_until(run_dir / name, step)
    files = [
        path
        for place in (SAMPLES, SKIPPED, EVALUATIONS)
        for path in (run_dir / place).glob("step_*")
        if samples_step(path.name) > step
    ]
    checkpoints = CheckpointStore(run_dir / CHECKPOINTS, CheckpointConfig())
    if not any(later.values()) and not files and not checkpoints.after(step):
        return None
    target = _free(run_dir / "earlier")
    target.mkdir(parents=True)
    checkpoints.set_aside(step, target / CHECKPOINTS)
    for path in files:
        (target / path.parent.name).mkdir(exist_ok=True)
        path.rename(target / path.parent.name / path.name)
    for name in kept:
        (target / name).write_text("".join(later[name]), encoding="utf-8")
        scratch = run_dir / (name + ".new")
        scratch.write_text("".join(kept[name]), encoding="utf-8")
        scratch.rename(run_dir / name)
    return target


def _lines_until(path: Path, step: int) -> tuple[list[str], list[str]]:
    """Return the lines of steps up to this one, and the others."""
    kept, later = [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        whole = line.endswith("\n")  # a line without its end was being written when the run ended
        (kept if whole and json.loads(line)["step"] <= step else later).append(line)
    return kept, later


def _free(directory: Path) -> Path:
    number = 1
    while (directory / str(number)).exists():
        number += 1
    return directory / str(number)
