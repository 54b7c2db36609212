"""Kills ranks at random moments of a tiny run, again and again: `python tools/chaos.py --kills 100 --seed 0`.

Runs a few hundred tiny steps undisturbed, and the same under `torchrun --max-restarts`, where a random rank is killed
(SIGKILL) at random moments: while ranks start, in steps, while a checkpoint is written. Every restart has to come by
itself, every checkpoint to be whole, nothing to be left over, and the end to be the undisturbed run's, bit for bit.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_run import make_tiny_run, tiny_rule, tiny_settings  # noqa: E402

from spmd_rl.analysis.compare_runs import compare  # noqa: E402
from spmd_rl.config.config import CheckpointConfig  # noqa: E402
from spmd_rl.data.digests import digests_of  # noqa: E402
from spmd_rl.runlog.checkpoint_store import CheckpointStore  # noqa: E402
from spmd_rl.runlog.run_dir import CHECKPOINTS  # noqa: E402
from spmd_rl.testing.launcher import LaunchedRun  # noqa: E402

OURS = ".chaos"
SAVE_EVERY = 2
# A kill in the start-up costs no progress, and with these steps left others could meet the end of the run.
RESERVE_STEPS = 8
# After so many kills without a new checkpoint one is let through.
PATIENCE = 3
# A step in the order of its phases: name in the table, its times in the metrics.
PHASES = (
    ("refresh", ("reshard_to_infer",)),
    ("rollout", ("rollout",)),
    ("rewards, plan, exchange", ("reshard_to_train", "non_overlap_rule_reward", "adv", "exchange")),
    ("log-probabilities", ("old_log_p", "reference_model")),
    ("update", ("update",)),
)


@dataclass
class Kill:
    """One kill, and how the run went on."""

    aim: str
    rank: int
    phase: str
    """Of the run: known from files for start-up and save, from the usual length of phases for the others."""
    step: int
    newest: int
    """Step of the newest complete checkpoint."""
    attempt: int
    at: float
    restarted: bool = False
    recovery_seconds: float | None = None
    """From the kill to the next finished step; None where the next kill came before."""
    lost_steps: int = 0


@dataclass
class Found:
    """Return what must be empty in the end."""

    corrupt: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    verified: set[tuple[str, int]] = field(default_factory=set)


class Chaos:
    """Kills ranks of a run. Seeded: the aims, ranks and delays are drawn from `seed` alone."""

    def __init__(
        self, run: LaunchedRun, kills: int, ranks: int, steps: int, seed: int, patience_seconds: float
    ) -> None:
        self.run, self.wanted, self.ranks, self.steps = run, kills, ranks, steps
        self.draw = random.Random(seed)
        self.patience = patience_seconds
        self.kills: list[Kill] = []
        self.found = Found()
        self.checkpoints = CheckpointStore(run.run_dir / CHECKPOINTS, CheckpointConfig())
        self.start_up: list[float] = []
        """Seconds from an attempt's processes to its first finished step."""
        self.step_rows: list[dict] = []
        self.save_seconds = 1.0
        self._begun = time.monotonic()
        self._starts = 0
        self._row_at_start: float = 0.0

    def all(self) -> None:
        """Make all kills, one after another; raises when the run does not go on by itself."""
        newest, without = -1, 0
        for number in range(self.wanted):
            self._attempt_begins(number)
            without = 0 if self.run.newest() > newest else without + 1
            newest = self.run.newest()
            victim, aim = self.draw.randrange(self.ranks), self._aim(number, without >= PATIENCE)
            if not self._await(aim):
                raise RuntimeError(f"the run ended after {number} of {self.wanted} kills:\n{self.run.tail()}")
            self._strike(number, aim, victim)
        self._attempt_begins(self.wanted)
        # One more where the run ends: whether it is met depends on how long that takes.
        delay = self.draw.uniform(0.0, 3.0)
        if self.run.until(lambda: self.run.last_row().get("step") == self.steps, self.patience):
            self._recovered()
            due = time.monotonic() + delay
            if self.run.until(lambda: time.monotonic() > due):
                self._strike(self.wanted, "end", self.draw.randrange(self.ranks))

    def _aim(self, number: int, let_through: bool) -> str:
        drawn = self.draw.random()
        if self.steps - max(self.run.newest(), 0) <= RESERVE_STEPS:
            return "start-up"
        if let_through:
            return "after a save"
        return "save" if drawn < 0.45 else "start-up" if drawn < 0.7 else "step"

    def _await(self, aim: str) -> bool:
        """Wait for the moment; False when the run ended before."""
        run, fraction = self.run, self.draw.random()
        more = self.draw.randrange(3)
        if aim == "start-up":
            usual = statistics.median(self.start_up) if self.start_up else 20.0
            due = self._begun + fraction * usual
            return run.until(lambda: time.monotonic() >= due)
        if aim == "save":
            if not run.until(lambda: bool(self._writing()), self.patience):
                return False
            self._recovered()
            due = time.monotonic() + fraction * self.save_seconds
            return run.until(lambda: time.monotonic() >= due)
        if aim == "after a save":
            newest = run.newest()
            if not run.until(lambda: run.newest() > newest, self.patience):
                return False
        if not run.until(lambda: self._new_row(), self.patience):
            return False
        self._recovered()
        step = run.last_row()["step"] + more
        run.until(lambda: run.last_row().get("step", 0) >= step, self.patience)
        due = time.monotonic() + fraction * run.last_row()["timing/all"]
        return run.until(lambda: time.monotonic() >= due)

    def _strike(self, number: int, aim: str, victim: int) -> None:
        run = self.run
        self._recovered()
        row = run.last_row()
        phase, newest = self._phase(row), run.newest()
        if aim == "end" and row.get("step") == self.steps and not self._writing():
            phase = "end"
        if not run.until(lambda: run.kill(victim), self.patience):
            if aim == "end":
                return
            raise RuntimeError(f"rank {victim} was not there to be killed:\n{run.tail()}")
        self.kills.append(Kill(aim, victim, phase, int(row.get("step", 0)), newest, number, time.monotonic()))
        last = self.kills[-1]
        print(f"{len(self.kills):>4}  rank {victim}  {phase:<32} step {last.step:>4}, saved {newest:>4}", flush=True)
        # torchrun starts the ranks again, or has given up.
        if not run.until(lambda: len(run.ranks(number + 1)) == self.ranks, self.patience):
            if run.wait(self.patience):
                raise RuntimeError(f"no restart after kill {len(self.kills)}:\n{run.tail()}")
            return
        last.restarted = True

    def _attempt_begins(self, number: int) -> None:
        """An attempt's processes are there: look at what the one before has left."""
        run = self.run
        if not run.until(lambda: len(run.ranks(number)) == self.ranks, self.patience):
            raise RuntimeError(f"attempt {number} never began:\n{run.tail()}")
        self._begun, self._row_at_start = time.monotonic(), run.last_row().get("time", 0.0)
        self._starts = self._count_starts()
        self._recovered_already = False
        self.verify()
        old = [process for process in run.leftover() if _attempt_of(process) < number]
        if old:
            time.sleep(2.0)  # they may be about to go
            self.found.left_over += [_name(process) for process in old if _lives(process)]

    def verify(self) -> None:
        """Every complete checkpoint that is there and was not looked at yet."""
        for saved in self.checkpoints.found():
            try:
                key = saved.path.name, (saved.path / "files.json").stat().st_mtime_ns
                if key in self.found.verified:
                    continue
                problems = self.checkpoints.problems(saved, digests_of)
            except OSError:
                continue
            if saved.path.exists():  # not removed meanwhile, as it may be
                self.found.verified.add(key)
                self.found.corrupt += problems

    def _recovered(self) -> None:
        """Note how long this attempt took to its first finished step."""
        if self._recovered_already or not self._new_row():
            return
        self._recovered_already = True
        row = self.run.last_row()
        self.step_rows.append(row)
        self.start_up.append(time.monotonic() - self._begun)
        if self.kills:
            self.kills[-1].recovery_seconds = time.monotonic() - self.kills[-1].at
            self.kills[-1].lost_steps = max(0, self.kills[-1].step - max(self.kills[-1].newest, 0))

    def _new_row(self) -> bool:
        return self.run.last_row().get("time", 0.0) > self._row_at_start

    def _writing(self) -> list[Path]:
        """Return what is being saved by this attempt; not what an earlier one has left or what is being removed."""
        if not self._new_row():
            return []
        return [path for path in self.run.saving() if ".removed" not in path.name]

    def _count_starts(self) -> int:
        try:
            return (self.run.run_dir / "run.log").read_text(encoding="utf-8").count("everything goes to")
        except OSError:
            return 0

    def _phase(self, row: dict) -> str:
        if not self._new_row():
            met = self._count_starts() > self._starts
            return "start-up: models are made" if met else "start-up: before the ranks met"
        writing = self._writing()
        if writing:
            sealed = any((path / "state.json").exists() for path in writing)
            return "save: read once more, renamed" if sealed else "save: ranks write"
        past = time.time() - row["time"]
        for name, timings in PHASES:
            past -= sum(row.get(f"timing/{timing}", 0.0) for timing in timings)
            if past < 0:
                return f"step: about {name}"
        return "step: about its end"


def _attempt_of(process: psutil.Process) -> int:
    try:
        return int(process.environ().get("TORCHELASTIC_RESTART_COUNT", 1 << 30))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 1 << 30


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return str(process.pid)


def settings(root: Path, run_dir: Path, steps: int, more: list[str]) -> list[str]:
    """Return the command line of one of the two runs."""
    own = tiny_settings(
        root,
        run={"dir": run_dir},
        evaluation={"every_steps": 4},
        algorithm={"kl_coefficient": 0.02},
        train={"steps": steps},
        checkpoint={"every_steps": SAVE_EVERY, "keep_last": 3},
    )
    return [*own, *tiny_rule(root), *more]


def table(kills: list[Kill]) -> str:
    """Kills by phase: how many, how many led to a restart by itself, and how long until the next finished step."""
    lines = [f"{'killed in':<34}{'kills':>6}{'recovered':>11}{'s to next step':>16}{'steps lost':>12}"]
    for name in sorted({kill.phase for kill in kills}):
        here = [kill for kill in kills if kill.phase == name]
        lines.append(_table_row(name, here))
    return "\n".join([*lines, _table_row("all", kills)])


def _table_row(name: str, kills: list[Kill]) -> str:
    seconds = [kill.recovery_seconds for kill in kills if kill.recovery_seconds is not None]
    usual = f"{statistics.median(seconds):.0f}" if seconds else ""
    lost = statistics.mean(kill.lost_steps for kill in kills)
    return f"{name:<34}{len(kills):>6}{sum(kill.restarted for kill in kills):>11}{usual:>16}{lost:>12.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further settings of a run, as --run.seed 2, go to both runs.",
        allow_abbrev=False,
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: 3 a kill, and some")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/chaos"), help="a new directory, or one of an earlier call"
    )
    parser.add_argument("--patience", type=float, default=900.0, help="seconds without progress that are a hang")
    parser.add_argument("--json", type=Path, help="also write the kills there")
    options, more = parser.parse_known_args()
    steps = options.steps or 3 * options.kills + 2 * RESERVE_STEPS
    directory = options.dir.resolve()
    if directory.exists() and any(directory.iterdir()) and not (directory / OURS).exists():
        sys.exit(f"--dir {directory}: not empty, and not of an earlier chaos; name another one")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / OURS).touch()
    problems = chaos(directory, options.kills, options.seed, options.ranks, steps, options.patience, more, options.json)
    sys.exit("\n".join(problems) if problems else 0)


def chaos(
    directory: Path,
    kills: int,
    seed: int,
    ranks: int,
    steps: int,
    patience: float,
    more: list[str],
    record: Path | None = None,
) -> list[str]:
    """Make both runs, print the table and the verdict. Returns what is wrong."""
    make_tiny_run(directory)
    calm, run_dir = directory / "undisturbed", directory / "killed"
    begun = time.monotonic()
    with LaunchedRun(settings(directory, calm, steps, more), calm, directory / "undisturbed.log", ranks, 0) as run:
        if run.wait(3600):
            raise RuntimeError(run.tail())
    print(f"undisturbed: {steps} steps on {ranks} ranks, {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    arguments = settings(directory, run_dir, steps, more)
    with LaunchedRun(arguments, run_dir, directory / "killed.log", ranks, kills + 1) as run:
        storm = Chaos(run, kills, ranks, steps, seed, patience)
        storm.all()
        status = run.wait(patience)
        deadline = time.monotonic() + 5.0
        while run.leftover() and time.monotonic() < deadline:
            time.sleep(0.2)
        storm.found.left_over += [_name(process) for process in run.leftover()]
    storm.verify()
    if record:
        record.write_text("\n".join(json.dumps(asdict(kill)) for kill in storm.kills) + "\n", encoding="utf-8")
    log = (run_dir / "run.log").read_text(encoding="utf-8")
    passed_over = log.count("passed over")
    found = compare(calm, run_dir)
    saves = sum(kill.phase.startswith("save") for kill in storm.kills)
    print(f"\n{table(storm.kills)}\n")
    print(f"seed {seed}: {len(storm.kills)} kills, {saves} of them in saves, in {time.monotonic() - begun:.0f} s")
    print(f"automatic restarts        {sum(kill.restarted for kill in storm.kills)}")
    print(f"checkpoints verified      {len(storm.found.verified)}, corrupt: {len(storm.found.corrupt)}")
    print(f"corrupt ones at a resume  {passed_over}")
    print(f"processes left over       {len(storm.found.left_over)}")
    print(f"against the undisturbed   {found.difference or f'{found}: bit-identical'}")
    problems = [*storm.found.corrupt, *storm.found.left_over]
    problems += [f"the run ended with status {status}"] if status else []
    problems += [f"kill {n} led to no restart" for n, kill in enumerate(storm.kills, 1) if not kill.restarted]
    problems += [f"{passed_over} checkpoints were passed over at a resume"] if passed_over else []
    return problems + ([found.difference] if found.difference else [])


if __name__ == "__main__":
    main()
