"""Show that a run of yours goes on exactly: `python -m spmd_rl.verify_resume --config FILE [--section.key value ...]`.

Runs a few steps undisturbed, and the same steps with a rank killed on the way; compares what both have computed.
"""

import argparse
import dataclasses
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spmd_rl.analysis.compare_runs import compare, largest_gap
from spmd_rl.config.check import check
from spmd_rl.config.config import Config
from spmd_rl.config.loading import dump, load_config
from spmd_rl.config.model_directory import with_local_models
from spmd_rl.errors import refuse
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.platforms import current
from spmd_rl.runlog.run_dir import CHECKPOINTS
from spmd_rl.testing.launcher import LaunchedRun

USER_ERROR = 2
_say = partial(print, flush=True)


@dataclass(frozen=True)
class Plan:
    """The runs that are compared."""

    config: Config
    ranks: int
    directory: Path
    seed: int
    by_hand: bool
    """The killed run is started again by us, not by torchrun."""
    timeout_seconds: float


def main(arguments: list[str] | None = None) -> None:
    """Print a verdict; the exit status is 1 where the runs differ, 2 where the user can fix what is wrong."""
    options, words = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        plan = _plan(options, words)
        other = None
        if options.other_layout is not None:
            other = _with_words(plan.config, options.other_layout)
            _check(other, plan.ranks)
    except ValueError as error:
        print(f"\nspmd_rl.verify_resume cannot start:\n{error}\n", file=sys.stderr)
        sys.exit(USER_ERROR)
    try:
        same = verify(plan, options.twice, options.tolerance)
        if other is not None:
            _other_layout(plan, other, options.other_layout)
    except (RuntimeError, TimeoutError) as error:
        print(f"\nspmd_rl.verify_resume: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0 if same else 1)


def verify(plan: Plan, twice: bool, tolerance: float) -> bool:
    """Run, kill, go on, compare; prints as it goes. Returns whether the runs are the same, up to `tolerance`."""
    calm, killed = plan.directory / "undisturbed", plan.directory / "killed"
    saved, ended = run_undisturbed(plan, calm)
    if twice:
        again = plan.directory / "undisturbed_again"
        run_undisturbed(plan, again)
        found = compare(calm, again)
        _say(f"two undisturbed runs: {found.difference or f'{found}: bit-identical'}")
    run_killed(plan, killed, ended - saved)
    found = compare(calm, killed)
    if found.difference is None:
        _say(f"\nexact: {found}: bit-identical")
        return True
    gap, where = largest_gap(calm, killed)
    _say(f"\nnot exact: {found.difference}")
    _say(f"the largest relative difference is {gap:.1e} ({where})")
    exact = plan.config.run.deterministic or current(plan.config.run.platform).repeats_exactly
    if not exact and not twice:
        _say("accelerators' kernels may differ from run to run: --twice shows whether two undisturbed runs do")
    return gap <= tolerance


def run_undisturbed(plan: Plan, run_dir: Path) -> tuple[float, float]:
    """Run undisturbed. Returns when its first checkpoint was complete, and when its last step was done."""
    with _launched(plan, plan.config, run_dir, "once", 0) as run:
        begun = time.monotonic()
        run.until(lambda: run.newest() >= 0, plan.timeout_seconds)
        saved = time.monotonic()
        run.until(lambda: run.last_row().get("step") == plan.config.train.steps, plan.timeout_seconds)
        ended = time.monotonic()
        _require(run, plan.timeout_seconds)
    _say(f"undisturbed: {plan.config.train.steps} steps on {plan.ranks} ranks, {time.monotonic() - begun:.0f} s")
    return saved, ended


def run_killed(plan: Plan, run_dir: Path, window_seconds: float) -> None:
    """Run the same; at a random moment between its first checkpoint and its end a random rank is killed."""
    draw = random.Random(plan.seed)
    victim, delay = draw.randrange(plan.ranks), draw.uniform(0.0, window_seconds)
    last = plan.config.train.steps
    with _launched(plan, plan.config, run_dir, "killed", 0 if plan.by_hand else 1) as run:
        run.until(lambda: run.newest() >= 0, plan.timeout_seconds)
        due = time.monotonic() + delay
        # A run that is faster this time is killed before it is over.
        run.until(lambda: time.monotonic() >= due or run.last_row().get("step", 0) >= last - 1, plan.timeout_seconds)
        done, newest = run.last_row().get("step", 0), run.newest()
        if not run.kill(victim):
            raise RuntimeError(f"rank {victim} was gone before it could be killed:\n{run.tail()}")
        _say(f"killed: rank {victim} after step {done}, when step {newest} was saved")
        if plan.by_hand:
            run.wait(plan.timeout_seconds)
        else:
            _require(run, plan.timeout_seconds)
    if plan.by_hand:
        with _launched(plan, plan.config, run_dir, "again", 0) as run:
            _require(run, plan.timeout_seconds)
    for line in (run_dir / "run.log").read_text(encoding="utf-8").splitlines():
        if re.match(r"resuming from|loaded|lost:|torchrun has", line):
            _say(f"  {line}")


def _other_layout(plan: Plan, other: Config, words: str) -> None:
    """Go on from the undisturbed run's first kept checkpoint in another layout, and state the gap."""
    calm = plan.directory / "undisturbed"
    saved = min((calm / CHECKPOINTS).glob("step_*/files.json")).parent
    step = int(saved.name[5:])
    if step == plan.config.train.steps:
        raise RuntimeError(f"{saved}: the only one that is kept is of the last step; give --steps more")
    config = _set(other, checkpoint={"resume": str(saved), "every_steps": 0, "keep_every": 0})
    run_dir = plan.directory / "other_layout"
    with _launched(plan, config, run_dir, "once", 0) as run:
        _require(run, plan.timeout_seconds)
    first = largest_gap(calm, run_dir, range(step + 1, step + 2), weights=False)
    last = largest_gap(calm, run_dir, range(step + 1, plan.config.train.steps + 1))
    _say(f"\nin another layout ({words}), going on from {saved.name}, the largest relative differences are")
    _say(f"  {first[0]:.1e} in the next step ({first[1]})")
    _say(f"  {last[0]:.1e} up to step {plan.config.train.steps} ({last[1]})")


def _launched(plan: Plan, config: Config, run_dir: Path, name: str, max_restarts: int) -> LaunchedRun:
    file = plan.directory / f"{run_dir.name}.yaml"
    file.touch(0o600)  # the secrets are in it
    file.write_text(dump(_set(config, run={"dir": str(run_dir)}), hide=False), encoding="utf-8")
    output = plan.directory / f"{run_dir.name}_{name}.log"
    return LaunchedRun(["--config", str(file)], run_dir, output, plan.ranks, max_restarts, config.program)


def _require(run: LaunchedRun, timeout_seconds: float) -> None:
    status = run.wait(timeout_seconds)
    if status:
        raise RuntimeError(f"a run ended with status {status}; its output is in {run.output}:\n{run.tail()}")


def _plan(options: argparse.Namespace, words: list[str]) -> Plan:
    if options.steps <= options.every:
        raise ValueError(
            f"--steps = {options.steps}, --every = {options.every}: the first checkpoint comes after {options.every} "
            "steps, and some must follow it; give --steps more"
        )
    given = load_config([*(["--config", options.config] if options.config else []), *words])
    given = dataclasses.replace(given, inject=())
    config = _set(
        given,
        train={"steps": options.steps},
        checkpoint={
            "every_steps": options.every,
            "resume": "auto",
            "load": "all",
            "on_failure": "stop",
            "keep_last": 9,
            "keep_best": None,
        },
        evaluation={"before": False, "after": False, "every_steps": 0},
        run={"samples_logged": -1, "export_hf": True, "wandb": "off", "tensorboard": False, "dir": None},
    )
    ranks = options.ranks or current(config.run.platform).device_count() or 2  # on a CPU
    _check(config, ranks)
    directory = options.dir.resolve()
    for own in filter(None, (given.run.dir, f"runs/{given.run.name}")):
        if directory == Path(own).resolve():
            raise ValueError(f"--dir = {options.dir}: the run's own directory; verify_resume needs one to itself")
    _empty(directory)
    return Plan(config, ranks, directory, options.seed, options.by_hand, options.timeout)


_OURS = ".verify_resume"


def _empty(directory: Path) -> None:
    """Empty a directory of what an earlier call left; nothing else is ever removed."""
    if directory.exists() and any(directory.iterdir()):
        if not (directory / _OURS).exists():
            raise ValueError(f"--dir = {directory}: not empty, and not of an earlier verify_resume; name another one")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _OURS).touch()


def _set(config: Config, **sections: dict) -> Config:
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def _with_words(config: Config, words: str) -> Config:
    """Lay settings from a command line over a configuration."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump(config, hide=False))
        file.flush()
        return load_config(["--config", file.name, *shlex.split(words)])


def _check(config: Config, ranks: int) -> None:
    config = with_local_models(config)
    refuse(check(config, ranks, read_model_shape(config.model.path)))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own options, and the rest: those of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_rl.verify_resume",
        description="Compare a few steps undisturbed with the same steps with a rank killed: does a run go on exactly?",
        epilog="All settings of a run can be given too: python -m spmd_rl.grpo --help lists them. Evaluations are left "
        "out; train.steps, checkpoint.*, evaluation.* and run.dir are set here. Exit status: 0 the same, 1 not, 2 "
        "something to fix first.",
        allow_abbrev=False,
        usage="%(prog)s --config FILE [options] [--section.key value ...]",
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="the run's YAML file")
    add("--ranks", type=int, metavar="N", help="processes on this machine; default: one a device, 2 on a CPU")
    add("--steps", type=int, default=6, metavar="K", help="default: 6")
    add("--every", type=int, default=2, metavar="K", help="save after every K steps; default: 2")
    add("--seed", type=int, default=0, metavar="N", help="of which rank is killed, and when; default: 0")
    add("--by-hand", action="store_true", help="start again by the same command; else torchrun restarts the ranks")
    add("--twice", action="store_true", help="also compare two undisturbed runs with each other")
    add("--tolerance", type=float, default=0.0, metavar="X", help="exit 0 up to this relative difference; default: 0")
    add(
        "--other-layout",
        metavar="WORDS",
        help="also go on with these settings, as '--parallel.tensor 2': states the gap",
    )
    add("--dir", type=Path, default=Path("runs/verify_resume"), help="scratch directory; default: runs/verify_resume")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="for each wait; default: 3600")
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    main()
