"""Tell what a run makes of each fault: `python tools/fault_matrix.py [GROUP ...]` injects them and prints a table.

Every group is one run of a tiny random model on two CPU ranks under `torchrun --max-restarts`, with the faults of the
group one after another; docs/faults.md holds what it printed. `--list` names the groups, `--keep DIR` keeps the runs.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from tiny_run import make_tiny_run, tiny_rule, tiny_settings  # noqa: E402

from spmd_rl.analysis.compare_runs import first_difference  # noqa: E402
from spmd_rl.testing.launcher import environment, torchrun  # noqa: E402

RESTARTED, WENT_ON, STOPPED = "started again from the newest checkpoint", "goes on", "stops"
# The first is the same parameter in training and rollout, which on a CPU share its memory; the second is not.
NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"


@dataclass(frozen=True)
class Case:
    """A fault, and what is expected of the run."""

    fault: str
    """With the rank and the step: faults are told apart by the order in which they strike."""
    by: str
    """The name of what detects it."""
    message: str
    """Regular expression of the words; what they match stands in the table. Empty: nothing is said."""
    then: str


@dataclass(frozen=True)
class Group:
    cases: tuple[Case, ...]
    exact: bool
    """At the end, all is bit-identical to a run without faults."""
    restarts: int = 0
    settings: tuple[str, ...] = ()
    world_size: int = 2


@dataclass
class Seen:
    """Hold what became of one fault; seconds from the strike."""

    struck: str = ""
    message: str = ""
    seconds: float | None = None


@dataclass
class Outcome:
    directory: Path
    status: int
    output: list[str]
    seen: list[Seen] = field(default_factory=list)


def killed(rank: int) -> str:
    """Return what the others say, or torchrun; which of them first is chance."""
    return rf"exitcode: -9\) local_rank: {rank}|rank {rank} is gone [^(]*|Connection (closed|reset) by peer|Broken pipe"


UNLIKELY = r"rank 1: 1 of \d+ samples have log-probabilities that are not finite .*\)"
ALL_UNLIKELY = r"rank 0: \d+ of \d+ samples have log-probabilities that are not finite .*\)"
UNSAVED = r"rank 0: \S+ holds values that are not finite, so nothing is saved"
GROUPS = {
    # The suite runs this one (tests/spmd/test_faults.py).
    "restarts": Group(
        (
            Case("slow:reward,rank=0,seconds=1,step=1", "nothing needs to", "", WENT_ON),
            Case("slow:rank=1,phase=exchange,seconds=1,step=1", "nothing needs to", "", WENT_ON),
            Case(
                "raise:rank=0,phase=update,step=1,error=MemoryError",
                "the rank itself",
                r"MemoryError: injected by raise:rank=0\S*",
                RESTARTED,
            ),
            Case(
                f"corrupt:param={BIAS},bit=3,rank=1,step=2",
                "proof of sync",
                rf"{BIAS}\[0:\d+\]: not as in \S+ of training on rank 0 .*: \S+ of rollout on rank 1",
                RESTARTED,
            ),
            # Step 2 may be on its way to the disk.
            Case("kill:rank=1,phase=rollout,step=3", "the other rank, torchrun", killed(1), RESTARTED),
            Case("disk_full:rank=1,step=4", "the writer", r"step 4 could not be saved: .*No space left", WENT_ON),
            # All files are written, and the checkpoint has no name yet.
            Case("kill:rank=0,verb=checkpoint_digests,step=6", "the other rank, torchrun", killed(0), RESTARTED),
        ),
        exact=True,
        restarts=8,
    ),
    # And this one, whose faults change what is learned.
    "learning": Group(
        (
            Case("kill:reward,rank=0,step=1", "the grader pool", r"rule .*: its process .*scores 0\.0 by it", WENT_ON),
            Case("stop:reward,rank=1,step=2", "the grader pool", r"rule .* took longer than .* 0\.0 by it", WENT_ON),
            Case(
                "nan:phase=update,of=gradient,rank=1,step=3",
                "the gradient's norm",
                r"step 3: the update was skipped: .*",
                WENT_ON,
            ),
            Case(
                "nan:phase=update,of=loss,rank=1,step=5",
                "the gradient's norm",
                r"step 5: the update was skipped: .*",
                WENT_ON,
            ),
            Case("nan:phase=rollout,rank=1,step=6", "the rank itself", UNLIKELY, STOPPED),
        ),
        exact=False,
        settings=("--reward.timeout_seconds", "3"),
    ),
    "skipped": Group(
        (
            Case(
                "nan:phase=update,of=loss,rank=1,step=1", "the gradient's norm", r"step 1: the update was .*", WENT_ON
            ),
            Case(
                "nan:phase=update,of=loss,rank=0,step=2",
                "train.max_skipped",
                r"train\.max_skipped = 2: .*in step 2: [^;]*; [^;]*",
                STOPPED,
            ),
        ),
        exact=False,
        settings=("--train.max_skipped", "2"),
    ),
    "clock": Group(
        (
            Case(
                "stop:rank=1,phase=rollout,step=2",
                "the watchdog",
                r"rank 1 is stopped by a signal \(process state T\)",
                RESTARTED,
            ),
            Case(
                "loop:rank=0,phase=update,step=3", "the watchdog", r"rank 0 computes and makes no progress.*", RESTARTED
            ),
            Case(
                "slow:rank=1,phase=exchange,step=4,seconds=3600",
                "the watchdog",
                r"rank 1 .*exchange.*<- look here first",
                RESTARTED,
            ),
        ),
        exact=True,
        restarts=8,
        settings=(
            *("--hang.silent_seconds", "20", "--hang.first_seconds", "300", "--hang.minimum_seconds", "300"),
            *("--hang.deadline_seconds", "rollout", "20", "update", "20", "exchange", "20"),
        ),
    ),
    "others": Group(
        (
            Case(
                "raise:rank=1,phase=evaluation,step=2",
                "the rank itself",
                r"RuntimeError: injected by raise:rank=1\S*",
                RESTARTED,
            ),
            Case("kill:rank=0,phase=checkpoint,step=2", "the other rank, torchrun", killed(0), RESTARTED),
            Case(
                f"corrupt:param={NORM},bit=3,side=training,rank=1,step=3",
                "proof of sync",
                rf"{NORM}\[0:\d+\]: not as in \S+ of training on rank 0 .*: \S+ of training on rank 1.*",
                RESTARTED,
            ),
            Case("nan:phase=rollout,rank=1,step=3", "the rank itself", UNLIKELY, RESTARTED),
            Case("kill:rank=0,phase=update,step=4,after=0.01", "the other rank, torchrun", killed(0), RESTARTED),
            # The next rollout may meet it while the writer is still reading.
            Case(
                "nan:phase=checkpoint,rank=0,step=4",
                "the save, the next rollout",
                f"{UNSAVED}|{ALL_UNLIKELY}",
                RESTARTED,
            ),
            Case("kill:rank=1,phase=reshard_to_infer,step=6", "the other rank, torchrun", killed(1), RESTARTED),
        ),
        exact=True,
        restarts=8,
    ),
}
PLACE = re.compile(r"inject: rank \d+ .* in .* of step \d+.*, at ")


def command(root: Path, run_dir: Path, restarts: int, world_size: int = 2, *more: str) -> list[str]:
    """Return the command of one run of six steps, saved and evaluated at every second one."""
    settings = tiny_settings(
        root,
        run={"dir": run_dir},
        evaluation={"every_steps": 2},
        train={"steps": 6},
        checkpoint={"every_steps": 2, "keep_last": 9},
    )
    return torchrun(world_size, "-m", "spmd_rl.grpo", *settings, *tiny_rule(root), *more, max_restarts=restarts)


def undisturbed(root: Path) -> Outcome:
    """The run that nothing happens to."""
    return _run(root, "undisturbed", [], 0, 2, ())


def suffer(root: Path, name: str) -> Outcome:
    """The run of one group."""
    group = GROUPS[name]
    return _run(root, name, list(group.cases), group.restarts, group.world_size, group.settings)


def _run(root: Path, name: str, cases: list[Case], restarts: int, world_size: int, settings: tuple) -> Outcome:
    faults = ("--inject", *(case.fault for case in cases)) if cases else ()
    run_dir = root / name
    process = subprocess.Popen(
        command(root, run_dir, restarts, world_size, *settings, *faults),
        cwd=ROOT,
        env=environment(COLUMNS="400"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    done = Outcome(run_dir, 0, [], [Seen() for _ in cases])
    struck = -1
    since = 0.0
    for line in process.stdout:
        now, line = time.monotonic(), line.rstrip()
        done.output.append(line)
        if PLACE.match(line):
            struck, since = struck + 1, now
            if struck < len(cases):
                done.seen[struck].struck = line
        elif 0 <= struck < len(cases) and cases[struck].message and not done.seen[struck].message:
            found = re.search(cases[struck].message, line)
            if found:
                done.seen[struck].message, done.seen[struck].seconds = found[0], now - since
    done.status = process.wait()
    return done


def table(rows: list[tuple[str, str, str, str, str, str]]) -> str:
    """As Markdown."""
    head = ("Fault", "Detected by", "What it says", "after", "The run", "In the end")
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---|---|---|---|---|---|", *lines[1:]])


def row(case: Case, seen: Seen, end: str) -> tuple[str, str, str, str, str, str]:
    """Return a row of the table."""
    silent = "NOT DETECTED" if case.message else "nothing"
    message = f"`{' '.join(seen.message.split())}`" if seen.message else silent
    after = "" if seen.seconds is None else f"{seen.seconds:.1f} s"
    return f"`{case.fault}`", case.by, message, after, case.then, end if seen.struck else "DID NOT STRIKE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the groups and their faults, and end")
    parser.add_argument("--keep", type=Path, help="directory for the runs and what they said; default: thrown away")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.groups if name not in GROUPS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are the groups {', '.join(GROUPS)}")
    names = chosen.groups or list(GROUPS)
    if chosen.list:
        for name in names:
            print(name, *(f"  {case.fault}" for case in GROUPS[name].cases), sep="\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = (chosen.keep or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            parser.error(f"--keep {root}: not empty; runs that are there would go on")
        make_tiny_run(root)
        calm = undisturbed(root) if any(GROUPS[name].exact for name in names) else None
        rows = []
        for name in names:
            group, outcome = GROUPS[name], suffer(root, name)
            (root / f"{name}.txt").write_text("\n".join(outcome.output) + "\n", encoding="utf-8")
            end = "not compared"
            if group.exact and calm is not None:
                differs = first_difference(calm.directory, outcome.directory)
                end = "bit-identical" if differs is None else f"DIFFERS: {differs}"
            rows += [row(case, seen, end) for case, seen in zip(group.cases, outcome.seen, strict=True)]
            print(f"{name}: exit status {outcome.status}, {end}", file=sys.stderr, flush=True)
        print(table(rows))


if __name__ == "__main__":
    main()
