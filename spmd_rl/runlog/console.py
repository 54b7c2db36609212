"""Show a run to a person: one line a step, what is being done right now, a summary at the end."""

import atexit
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from spmd_rl.config.names import REWARDS, Phase
from spmd_rl.data.tickets import UNJUDGED

WIDTH = 100
"""Columns that a step's line has at most."""
_KL = "actor/kl_loss"
_ACCURACY = "reward/cause/correct"
SHOWN = (
    ("reward", REWARDS, ".3f"),
    ("acc", (_ACCURACY,), "3.0%"),
    ("trunc", ("rollout/truncated_fraction",), "3.0%"),
    ("len", ("response_length/mean",), ".1f"),
    ("kl", (_KL,), ".4f"),
    ("vf loss", ("critic/vf_loss",), ".3f"),
    ("explained", ("critic/explained_variance",), ".2f"),
    ("entropy", ("actor/entropy",), ".2f"),
    ("grad", ("grad_norm",), ".2f"),
    ("lr", ("grpo/lr", "actor/lr"), ".1e"),
)
"""In the order of the line: label, metrics of which the first that was measured is shown, format."""
_NEEDED = ("step", "reward", "acc", "trunc", "", "tok/s", "explained", "vf loss", "kl", "len", "entropy", "grad")
_NEEDED += ("rollout", "update", "critic", "lr")
"""Labels that stay where not all fits, the first ones first."""
NAMED_STEPS = 8
"""The summary names so many of the steps in which something failed."""
FRAMES = 4
"""Of an error's traceback so many are shown; all of them are in the ranks' output."""
_PARTS = (("rollout", Phase.ROLLOUT), ("critic", Phase.CRITIC_UPDATE), ("update", Phase.UPDATE))
TIMES = (*((label, f"timing/{phase}") for label, phase in _PARTS), ("", "timing/all"))


class Console(Protocol):
    """Takes lines, and what is shown between them."""

    def line(self, text: str) -> None: ...

    def starting(self, part: str) -> None:
        """Say which part of the start begins."""

    def doing(self, phase: str) -> None:
        """Say what is being done from now on."""

    def advance(self, step: int) -> None:
        """Show how many steps are done."""

    def close(self) -> None: ...


def console(steps: int) -> Console:
    """A live display when standard output is a terminal, plain lines otherwise."""
    return LiveConsole(steps) if sys.stdout.isatty() else PlainConsole()


class PlainConsole:
    """Lines only: for files, pipes and job logs."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        """Parts of the start that have a line: one that goes on after another gets no second one."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def starting(self, part: str) -> None:
        if part not in self.begun:
            self.begun.add(part)
            self.line(f"starting: {part}")

    def doing(self, phase: str) -> None:
        pass

    def advance(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class LiveConsole:
    """Lines scroll above a progress bar that names the current phase and for how long it has been going on."""

    def __init__(self, steps: int, target: RichConsole | None = None):
        self.target = target or RichConsole()
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(compact=True),
            TextColumn("left "),
            _PhaseColumn(),
            console=self.target,
            refresh_per_second=2,
            speed_estimate_period=600,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        self.task = self.progress.add_task("", total=steps, phase="starting", since=time.monotonic())
        self.progress.start()
        atexit.register(self.progress.stop)  # the cursor comes back whatever ends the program

    def line(self, text: str) -> None:
        self.target.print(text, soft_wrap=True, markup=False, highlight=False)

    def starting(self, part: str) -> None:
        self.doing(f"starting: {part}")

    def doing(self, phase: str) -> None:
        self.progress.update(self.task, phase=phase, since=time.monotonic())

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def close(self) -> None:
        self.progress.stop()


class _PhaseColumn(ProgressColumn):
    max_refresh = None

    def render(self, task: Task) -> Text:
        phase, seconds = task.fields["phase"], time.monotonic() - task.fields["since"]
        return Text(f"{phase} {seconds:.0f} s" if phase else "", style="cyan", no_wrap=True)


def step_line(row: Mapping[str, float], steps: int, world_size: int, reference: bool = True) -> str:
    """Write one step in one line; what was not measured is left out, and what matters least where not all fits.

    tok/s counts prompt and response tokens of all ranks over the whole step. Without a `reference` there is no KL.
    """
    parts = {"step": f"step {int(row['step']):>{len(str(steps))}}/{steps}"}
    judged = any(value for name, value in row.items() if name.startswith("reward/cause/") and UNJUDGED not in name)
    without = {*(() if reference else (_KL,)), *(() if judged else (_ACCURACY,))}
    for label, names, form in SHOWN:
        found = [f"{label} {row[name]:{form}}" for name in names if name in row and name not in without]
        parts |= {label: found[0]} if found else {}
    for label, name in TIMES:
        if name in row:
            parts[label] = f"{label} {row[name]:.1f}s".lstrip()
    if "e2e_tps" in row:
        parts["tok/s"] = f"{row['e2e_tps'] * world_size:.0f} tok/s"
    while len(line := "  ".join(parts.values())) > WIDTH:
        del parts[max(parts, key=_NEEDED.index)]
    return line


def cut_short(error: BaseException, steps: int) -> str:
    """Say what ended a run."""
    return f"cut short after {steps} step{'s' * (steps != 1)} by {described(error)}"


def described(error: BaseException) -> str:
    """Return an error's kind and text, and the last frames of our own code on lines below, innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "spmd_rl" in frame.filename]
    places = [f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames[-FRAMES:]]
    said = f": {error}" if str(error) else ""
    return "\n".join([f"{type(error).__name__}{said}", *places])


def untrained_line(step: int) -> str:
    """Say that a step trains nothing."""
    return (
        f"step {step}: no group of it teaches (algorithm.drop_uniform_groups, algorithm.curation); "
        "nothing is trained, the policy stays as it is"
    )


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Write the accuracy of each benchmark, or whatever else was measured."""
    accuracies = {name: value for name, value in metrics.items() if name.endswith("/accuracy")} or metrics
    when = f"after step {step}" if step else "before training"
    shown = [f"{_readable(name)} {value:.3f}" for name, value in accuracies.items()]
    return f"evaluation {when}: {', '.join(shown)}"


def _readable(name: str) -> str:
    return name.removeprefix("eval/").replace("/", " ")


def sample_text(sample: Mapping[str, Any]) -> str:
    """Return a sample as a person reads it."""
    head = f"reward {sample.get('reward')}  cause {sample.get('cause')}  finish {sample.get('finish_reason')}"
    said = (f"  {who + ':':<9} {_indented(sample[who])}" for who in ("prompt", "response"))
    return "\n".join([head, *said])


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n" + " " * 12)


FAILURES = {
    "update/skipped": "updates skipped",
    "update_critic/skipped": "updates of the critic skipped",
    "reward/cause/crash": "samples whose rule crashed",
    "reward/cause/timeout": "samples whose rule took too long",
}
"""Metrics of a step that say what did not go as it should; what they count."""
SUMMARY = ("step", *REWARDS, "timing/all", *FAILURES)
"""Metrics that `summary` reads of the row of a step."""


def summary(
    rows: Sequence[Mapping[str, float]],
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
    places: Mapping[str, Path],
    failed_saves: Sequence[int] = (),
) -> str:
    """Sum up what the run reached, what failed on the way, and where everything lies.

    `rows` of steps, first and last `evaluations` as (step, metrics), `failed_saves`: the steps.
    """
    facts: list[tuple[str, str]] = []
    if len(evaluations) > 1:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        for name in (name for name in before if name.endswith("/accuracy") and name in after):
            change = f"{before[name]:.1%} -> {after[name]:.1%}"
            points = (after[name] - before[name]) * 100
            facts.append((_readable(name), f"{change}  (step {first} and {last}, {points:+.1f} points)"))
    rewards = [row[name] for row in rows for name in REWARDS if name in row]
    if len(rewards) > 1:
        facts.append(("reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"))
    if rows:
        seconds = sum(row["timing/all"] for row in rows)
        facts.append(("steps", f"{len(rows)} in {_duration(seconds)}, {seconds / len(rows):.1f} s each"))
    for name, what in FAILURES.items():
        met = [row for row in rows if row.get(name, 0.0) > 0]
        if met:
            share = f", {sum(row[name] for row in met) / len(rows):.1%} of all" if name.startswith("reward/") else ""
            facts.append(("failed", f"{what}{share}: {_steps([row.get('step', 0) for row in met])}"))
    if failed_saves:
        facts.append(("failed", f"checkpoints not saved: {_steps(failed_saves)}"))
    facts += [(name, str(path)) for name, path in places.items()]
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(["", "summary", *(f"  {name:<{width}}  {value}" for name, value in facts)])


def _steps(steps: Sequence[float]) -> str:
    named = ", ".join(f"{step:.0f}" for step in steps[:NAMED_STEPS])
    return f"step{'s' if len(steps) > 1 else ''} {named}" + (", ..." if len(steps) > NAMED_STEPS else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
