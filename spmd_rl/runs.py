"""Start and read runs from Python, as a notebook does: nothing here ends the interpreter.

What trains or evaluates runs in processes of its own, started by torchrun.
"""

import asyncio
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.analysis.curves import read_rows
from spmd_rl.config import loading
from spmd_rl.config.check_serving import SUMMARY
from spmd_rl.config.config import Config
from spmd_rl.data import samples
from spmd_rl.rewards.grade import Grade, RewardSample, as_grade
from spmd_rl.rewards.rule_table import is_async, is_batched, resolve

if TYPE_CHECKING:
    from pandas import DataFrame

_LAST_LINES = 40


@dataclass(frozen=True)
class Outcome:
    """Hold how a run ended."""

    status: int
    """The exit status; 0: it did what it was asked."""
    directory: Path
    said: str
    """The last lines of its console."""


def load_config(file: str | None = None, settings: Mapping[str, object] | None = None) -> Config:
    """Return the settings of a YAML file (or a shipped one by its name), with others over them: {"train.steps": 2}.

    Raises ConfigError, a ValueError, with all problems.
    """
    return loading.load_config(words(file, settings))


def words(file: str | None, settings: Mapping[str, object] | None) -> list[str]:
    """Return a command line that says the same."""
    found = ["--config", str(file)] if file is not None else []
    for name, value in (settings or {}).items():
        found.append(f"--{name}")
        if isinstance(value, Mapping):
            found += [str(word) for pair in value.items() for word in pair]
        else:
            found += [str(word) for word in (value if isinstance(value, list | tuple) else [value])]
    return found


def train(
    file: str | None = None, settings: Mapping[str, object] | None = None, ranks: int = 1, quiet: bool = False
) -> Outcome:
    """Train in processes of their own, `ranks` on this machine, and wait. Raises ConfigError where settings are wrong.

    `quiet`: print nothing meanwhile.
    """
    config = load_config(file, settings)
    status, said = _torchrun(config.program, words(file, settings), ranks, quiet)
    return Outcome(status, Path(config.run.dir or f"runs/{config.run.name}"), said)


def evaluate(
    model: str,
    benchmark: str,
    settings: Mapping[str, object] | None = None,
    ranks: int = 1,
    output: str | None = None,
    quiet: bool = False,
) -> dict[str, object]:
    """Measure a model on a benchmark in processes of its own; return the summary, with its `directory`.

    `settings`: of spmd_rl.evaluate, such as {"samples": 4, "temperature": 0.6}. `output` None: a new temporary
    directory. Raises RuntimeError with what the program said where it failed.
    """
    directory = output or tempfile.mkdtemp(prefix="evaluation-")
    own = {"model": model, "benchmark": benchmark, "output": directory, **(settings or {})}
    status, said = _torchrun("spmd_rl.evaluate", words(None, own), ranks, quiet)
    if status:
        raise RuntimeError(f"the evaluation ended with status {status}:\n{said}")
    summary = json.loads((Path(directory) / SUMMARY).read_text(encoding="utf-8"))
    return {**summary, "directory": directory}


def read_metrics(run: str | Path) -> "DataFrame":
    """Return a run's metrics, a row a step and one an evaluation, by their names in metrics.jsonl."""
    from pandas import DataFrame

    return DataFrame(read_rows(Path(run)))


def read_samples(run: str | Path) -> "DataFrame":
    """Return the samples that a run wrote, a row each; the scores of its rules are columns score/RULE."""
    from pandas import DataFrame

    rows = []
    for sample in samples.read_samples(Path(run)):
        scores = sample.get("scores") or {}
        rows.append(sample | {f"score/{rule}": score for rule, score in scores.items()})
    return DataFrame(rows)


def grade(
    response: str,
    answer: str,
    rule: str = "math_answer",
    prompt: str = "",
    row: Mapping[str, object] | None = None,
) -> Grade | None:
    """Grade a response by a rule, named as in reward.rules, in this process; None: the rule does not apply to it.

    There is no time limit here, as a run's reward workers have.
    """
    found: Any = resolve(rule)
    sample = RewardSample(prompt=prompt, response=response, answer=answer, row=dict(row or {}))
    value = found([sample] if is_batched(found) else sample)
    if is_async(found) or inspect.isawaitable(value):
        value = asyncio.run(value)
    value = value[0] if is_batched(found) else value
    return None if value is None else as_grade(rule, value)


def _torchrun(module: str, arguments: list[str], ranks: int, quiet: bool) -> tuple[int, str]:
    """Run a module on ranks of this machine; return its status and the last lines that it said."""
    start = [sys.executable, "-m", "spmd_rl.runtime.torchrun", "--standalone", "--nproc_per_node", str(ranks)]
    last: list[str] = []
    process = subprocess.Popen(
        [*start, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last = [*last[1 - _LAST_LINES :], line]
            if not quiet:
                print(line, end="", flush=True)
        return process.wait(), "".join(last)
    finally:
        if process.poll() is None:  # interrupted: torchrun ends the ranks
            process.terminate()
            process.wait()
